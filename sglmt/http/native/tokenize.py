"""`POST /tokenize` and `POST /detokenize`: bodies to checked requests, results to bodies. Pure.

Runs in the tokenizer workers; the worker encodes and decodes in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from sglmt.http import checks
from sglmt.http.errors import bad_field
from sglmt.http.formatting import encode_json
from sglmt.http.json_body import BodyDecoder
from sglmt.http.limits import ModelLimits
from sglmt.http.openai.fields import check_model

IDS_AT_A_TIME = 32768


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The fields that count; others are ignored. `text` is another name of `prompt`."""

    model: str | None = None
    prompt: str | list[str] | None = None
    text: str | list[str] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The fields that count; others are ignored."""

    model: str | None = None
    tokens: list[Any] | None = None
    skip_special_tokens: bool | None = None


@dataclass(slots=True)
class TokenizeRequest:
    """Texts to encode; `is_batch`: they came as a list and are answered as one. Texts may be empty."""

    texts: list[str]
    is_batch: bool
    add_special_tokens: bool


@dataclass(slots=True)
class DetokenizeRequest:
    """Rows of ids to decode; `is_batch` as above. Rows may be empty."""

    rows: list[list[int]]
    is_batch: bool
    skip_special_tokens: bool


_TOKENIZE = BodyDecoder(TokenizeBody)
_DETOKENIZE = BodyDecoder(DetokenizeBody)


def parse_tokenize(body: bytes, limits: ModelLimits) -> TokenizeRequest:
    """The request of a body. Raises ApiError naming the field."""
    fields = _TOKENIZE.decode(body)
    check_model(fields.model, limits)
    if fields.prompt is not None and fields.text is not None:
        raise bad_field("text", "cannot be combined with prompt; send one of them")
    value = fields.text if fields.prompt is None else fields.prompt
    if value is None:
        raise bad_field("prompt", "this field is required")
    texts = [value] if isinstance(value, str) else value
    _check_count(texts, limits, "prompt")
    return TokenizeRequest(texts, not isinstance(value, str), fields.add_special_tokens is not False)


def parse_detokenize(body: bytes, limits: ModelLimits) -> DetokenizeRequest:
    """The request of a body. Raises ApiError naming the field and the id outside the vocabulary."""
    fields = _DETOKENIZE.decode(body)
    check_model(fields.model, limits)
    tokens = fields.tokens
    if tokens is None:
        raise bad_field("tokens", "this field is required")
    skip = fields.skip_special_tokens is not False
    if not any(isinstance(item, list) for item in tokens):
        return DetokenizeRequest([checks.token_ids(tokens, limits.vocab_size, "tokens")], False, skip)
    _check_count(tokens, limits, "tokens")
    for index, row in enumerate(tokens):
        if not isinstance(row, list):
            raise bad_field(f"tokens[{index}]", "a list of token ids is expected, as in the other rows")
        checks.token_ids(row, limits.vocab_size, f"tokens[{index}]")
    return DetokenizeRequest(tokens, True, skip)


def tokenize_body(request: TokenizeRequest, rows: Sequence[Sequence[int]], limits: ModelLimits) -> bytes:
    """The answer: the ids and their count, or lists of both."""
    tokens = [_ids_json(row) for row in rows]
    counts = [len(row) for row in rows]
    return encode_json(
        {
            "tokens": tokens if request.is_batch else tokens[0],
            "count": counts if request.is_batch else counts[0],
            "max_model_len": limits.context_length,
        }
    )


def _ids_json(ids: Sequence[int]) -> msgspec.Raw:
    """A list of ids, written in portions: a thread that does so lets others go on in between."""
    starts = range(0, len(ids), IDS_AT_A_TIME)
    return msgspec.Raw(b"[%b]" % b",".join(encode_json(list(ids[at : at + IDS_AT_A_TIME]))[1:-1] for at in starts))


def detokenize_body(request: DetokenizeRequest, texts: Sequence[str]) -> bytes:
    """The answer: the text, or a list of texts."""
    return encode_json({"text": list(texts) if request.is_batch else texts[0]})


def _check_count(rows: Sequence[object], limits: ModelLimits, param: str) -> None:
    if not rows:
        raise bad_field(param, "must not be empty")
    if len(rows) > limits.max_prompts_per_request:
        raise bad_field(param, f"at most {limits.max_prompts_per_request} in one request, got {len(rows)}")
