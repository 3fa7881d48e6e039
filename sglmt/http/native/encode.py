"""`POST /encode`: the body to a checked request, results to the answer. Pure; runs in the tokenizer workers.

A text of a batch that cannot be embedded costs itself only: its entry says why, the others have their vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from sglmt.http import checks
from sglmt.http.embedding import EmbeddingContext, EmbeddingRequest, EmbeddingResult, EmbeddingRow
from sglmt.http.errors import ApiError, bad_field, encodable
from sglmt.http.formatting import encode_json
from sglmt.http.json_body import BodyDecoder
from sglmt.http.limits import ModelLimits
from sglmt.http.openai.embeddings import check_row_count
from sglmt.http.openai.fields import priority_of, refuse, timeout_of

_UNSUPPORTED = {
    "image_data": "only text is served",
    "audio_data": "only text is served",
    "video_data": "only text is served",
    "input_embeds": "send text or input_ids",
    "lora_path": "leave it out",
}


class EncodeBody(msgspec.Struct, kw_only=True):
    """The fields that count; others are ignored."""

    text: str | list[Any] | None = None
    input_ids: list[Any] | None = None
    rid: str | list[str] | None = None
    priority: int | None = None
    timeout_s: float | None = None
    # refused when set
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    input_embeds: Any = None
    lora_path: Any = None


_BODY = BodyDecoder(EncodeBody)


def parse_encode(body: bytes, limits: ModelLimits) -> EmbeddingRequest:
    """The request of a body. Raises ApiError naming the field that cannot be used."""
    fields = _BODY.decode(body)
    refuse(fields, _UNSUPPORTED)
    if fields.text is not None and fields.input_ids is not None:
        raise bad_field("input_ids", "cannot be combined with text; send one of them")
    rows, is_batch = _text_rows(fields, limits) if fields.input_ids is None else _id_rows(fields, limits)
    return EmbeddingRequest(
        rows=rows,
        one_fails_all=False,
        formatter_type=EncodeFormatter,
        is_batch=is_batch,
        priority=priority_of(fields.priority),
        timeout_s=timeout_of(fields.timeout_s),
    )


def _text_rows(fields: EncodeBody, limits: ModelLimits) -> tuple[list[EmbeddingRow], bool]:
    if isinstance(fields.text, list) and fields.text:
        return _batch(fields.text, str, fields.rid, "text", limits), True
    row = checks.prompt_rows(fields.text, limits, "text")[0][0]
    return [EmbeddingRow(checks.request_ids(fields.rid, 1, 1)[0], "text", *row)], False


def _id_rows(fields: EncodeBody, limits: ModelLimits) -> tuple[list[EmbeddingRow], bool]:
    ids = fields.input_ids or []
    if any(isinstance(item, list) for item in ids):
        return _batch(ids, list, fields.rid, "input_ids", limits), True
    if any(isinstance(item, str) for item in ids):
        raise bad_field("input_ids", "integer token ids are expected, got a string")
    row = checks.prompt_rows(ids, limits, "input_ids")[0][0]
    return [EmbeddingRow(checks.request_ids(fields.rid, 1, 1)[0], "input_ids", *row)], False


def _batch(
    items: list[Any], kind: type, rid: str | list[str] | None, field: str, limits: ModelLimits
) -> list[EmbeddingRow]:
    check_row_count(items, limits, field)
    rids = checks.request_ids(rid, len(items), 1)
    return [_row(item, kind, rids[index], f"{field}[{index}]", limits) for index, item in enumerate(items)]


def _row(item: Any, kind: type, rid: str, param: str, limits: ModelLimits) -> EmbeddingRow:
    """A row of a batch; what is wrong with it is its own matter."""
    try:
        if not isinstance(item, kind):
            raise bad_field(param, "a text is expected" if kind is str else "a list of token ids is expected")
        return EmbeddingRow(rid, param, *checks.prompt_row(item, limits, param))
    except ApiError as error:
        return EmbeddingRow(rid, param, error=error)


class EncodeFormatter:
    """One object, or a list of them for a batch."""

    def __init__(self, request: EmbeddingRequest, context: EmbeddingContext) -> None:
        self._request = request
        self._started_s = context.started_s

    def row(self, index: int, result: EmbeddingResult) -> bytes:
        """The vector (null when there is none) and `meta_info`."""
        error = result.error
        meta: dict[str, Any] = {
            "id": self._request.rows[index].rid,
            "finish_reason": {"type": "stop"} if error is None else abort_reason(error),
            "prompt_tokens": result.prompt_tokens,
            "e2e_latency": result.ended_at_s - self._started_s,
        }
        return encode_json({"embedding": None if error else result.vector, "meta_info": meta})

    def body(self, rows: Sequence[bytes], results: Sequence[EmbeddingResult]) -> bytes:
        """The answer. Raises ApiError when no text could be embedded."""
        if all(result.error is not None for result in results):
            raise next(result.error for result in results if result.error is not None)
        return b"[%b]" % b",".join(rows) if self._request.is_batch else rows[0]


def abort_reason(error: ApiError) -> dict[str, Any]:
    """Why one row of a batch has no answer."""
    return {
        "type": "abort",
        "message": encodable(error.message),
        "status_code": error.status,
        "code": error.code,
    }
