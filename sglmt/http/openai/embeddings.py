"""`POST /v1/embeddings`: the body to a checked request, results to the answer. Pure; runs in the tokenizer workers.

`encoding_format` base64 is the vector as little-endian 32-bit floats. `dimensions` keeps the first numbers of a vector
and scales what is left to length 1 again.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from sglmt.http import checks
from sglmt.http.embedding import EmbeddingContext, EmbeddingRequest, EmbeddingResult, EmbeddingRow
from sglmt.http.errors import bad_field
from sglmt.http.formatting import encode_json
from sglmt.http.json_body import BodyDecoder
from sglmt.http.limits import ModelLimits
from sglmt.http.openai.fields import check_model, priority_of, refuse, timeout_of

MAX_ROWS = 2048  # the API's own

_UNSUPPORTED = {
    "messages": "send texts as input",
    "truncate_prompt_tokens": "shorten the texts before sending them",
    "lora_path": "leave it out",
}


class EmbeddingBody(msgspec.Struct, kw_only=True):
    """The fields that count; others are ignored."""

    model: str | None = None
    input: str | list[Any] | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: Any = None
    rid: str | list[str] | None = None
    priority: int | None = None
    timeout_s: float | None = None
    add_special_tokens: bool | None = None
    # refused when set
    messages: Any = None
    truncate_prompt_tokens: Any = None
    lora_path: Any = None


_BODY = BodyDecoder(EmbeddingBody)


def parse_embedding(body: bytes, limits: ModelLimits) -> EmbeddingRequest:
    """The request of a body. Raises ApiError naming the field that cannot be used."""
    fields = _BODY.decode(body)
    check_model(fields.model, limits)
    refuse(fields, _UNSUPPORTED)
    if isinstance(fields.input, list):
        check_row_count(fields.input, limits, "input")
    rows, is_batch = checks.prompt_rows(fields.input, limits, "input")
    rids = checks.request_ids(fields.rid, len(rows), 1)
    return EmbeddingRequest(
        rows=[
            EmbeddingRow(rid, f"input[{index}]" if is_batch else "input", *row)
            for index, (row, rid) in enumerate(zip(rows, rids, strict=True))
        ],
        one_fails_all=True,
        formatter_type=OpenAIEmbeddingFormatter,
        is_batch=is_batch,
        add_special_tokens=fields.add_special_tokens is not False,
        as_base64=_is_base64(fields.encoding_format),
        dimensions=_dimensions(fields.dimensions, limits),
        priority=priority_of(fields.priority),
        timeout_s=timeout_of(fields.timeout_s),
        model=fields.model,
    )


def check_row_count(rows: list[Any], limits: ModelLimits, param: str) -> None:
    """Raise ApiError (400) for more texts than one request may have. A list of ids only is one text."""
    most = max(MAX_ROWS, limits.max_prompts_per_request)
    if len(rows) > most and any(isinstance(row, str | list) for row in rows):
        raise bad_field(param, f"at most {most} texts in one request, got {len(rows)}")


def _is_base64(encoding_format: str | None) -> bool:
    if encoding_format in (None, "float"):
        return False
    if encoding_format == "base64":
        return True
    raise bad_field("encoding_format", "float or base64 is expected")


def _dimensions(value: int | None, limits: ModelLimits) -> int | None:
    """How many numbers of each vector are wanted; None: all."""
    if value is None:
        return None
    most = limits.embedding_dimensions or checks.MAX_INT64
    if 1 <= value <= most:
        return value
    raise bad_field(
        "dimensions", f"the model's embeddings have {most} numbers; 1 to {most} can be asked for, got {value}"
    )


class OpenAIEmbeddingFormatter:
    """The list object of one request."""

    def __init__(self, request: EmbeddingRequest, context: EmbeddingContext) -> None:
        self._request = request
        self._model = encode_json(context.model_name)

    def row(self, index: int, result: EmbeddingResult) -> bytes:
        """One `embedding` object."""
        vector = shortened(result.vector, self._request.dimensions)
        written = _base64(vector) if self._request.as_base64 else encode_json(vector)
        return b'{"object":"embedding","index":%d,"embedding":%b}' % (index, written)

    def body(self, rows: Sequence[bytes], results: Sequence[EmbeddingResult]) -> bytes:
        """The list, the model as it was called, and the tokens of all texts."""
        tokens = sum(result.prompt_tokens for result in results)
        return b'{"object":"list","data":[%b],"model":%b,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (
            b",".join(rows),
            self._model,
            tokens,
            tokens,
        )


def shortened(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """The first `dimensions` numbers, scaled to length 1; the whole vector as it is without a wish for fewer."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    kept = vector[:dimensions]
    norm = math.sqrt(math.fsum(number * number for number in kept))
    return kept if norm == 0.0 else [number / norm for number in kept]


def _base64(vector: Sequence[float]) -> bytes:
    return b'"' + base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)) + b'"'
