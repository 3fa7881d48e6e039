"""Log-probabilities as the OpenAI endpoints write them. Pure; runs in the tokenizer workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglmt.http.formatting import LOWEST_LOGPROB, FormatContext, finite
from sglmt.messages.sampling import TokenLogprobs


class TextOffsets:
    """`text_offset` of consecutive tokens: characters from the start of the prompt's text, 0 without one.

    Counted on the tokens' bytes, so that it does not depend on how a stream was cut: a token that continues a
    character points at that character. A negative start is for tokens that stand before the text (BOS): they are
    at 0.
    """

    __slots__ = ("_characters",)

    def __init__(self, start: int) -> None:
        self._characters = start

    def take(self, token_bytes: bytes) -> int:
        """Where this token begins; moves behind it."""
        start = self._characters
        self._characters += _characters(token_bytes)
        inside = bool(token_bytes) and token_bytes[0] & 0xC0 == 0x80
        return max(0, start - inside)


def prompt_offsets(text: str, ids: Sequence[int], context: FormatContext) -> TextOffsets:
    """Offsets of a prompt's own tokens, so that the last one ends where the text ends."""
    return TextOffsets(len(text) - sum(_characters(context.token_bytes(token_id)) for token_id in ids))


def _characters(token_bytes: bytes) -> int:
    """How many characters begin in these bytes."""
    return len(token_bytes) if token_bytes.isascii() else sum(byte & 0xC0 != 0x80 for byte in token_bytes)


def completion_logprobs(
    ids: Sequence[int], logprobs: TokenLogprobs, offsets: TextOffsets, context: FormatContext
) -> dict[str, list[Any] | None]:
    """The `logprobs` object of a completion choice; `top_logprobs` holds the chosen token too."""
    token_bytes = context.token_bytes
    tops: list[dict[str, float | None] | None] | None = None if logprobs.top is None else []
    for index, token_id in enumerate(ids):
        if tops is None or logprobs.top is None:
            break
        chosen = logprobs.chosen[index]
        tops.append(None if chosen is None else _alternatives(token_id, chosen, logprobs.top[index], context))
    return {
        "tokens": [_token_name(token_id, context) for token_id in ids],
        "token_logprobs": [finite(value) for value in logprobs.chosen[: len(ids)]],
        "top_logprobs": tops,
        "text_offset": [offsets.take(token_bytes(token_id)) for token_id in ids],
    }


def _alternatives(
    token_id: int, chosen: float, top: list[tuple[int, float]], context: FormatContext
) -> dict[str, float | None]:
    entries: dict[str, float | None] = {}
    for other, logprob in top:
        entries.setdefault(_token_name(other, context), finite(logprob))
    entries.setdefault(_token_name(token_id, context), finite(chosen))
    return entries


def _token_name(token_id: int, context: FormatContext) -> str:
    """A token's text; one that is no text by itself is `bytes:\\xe6\\x9d`, as this API has it."""
    text = context.token_text(token_id)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in context.token_bytes(token_id))


def chat_logprobs(ids: Sequence[int], logprobs: TokenLogprobs, context: FormatContext) -> dict[str, list[Any] | None]:
    """The `logprobs` object of a chat choice."""
    content = []
    for index, token_id in enumerate(ids):
        top = [] if logprobs.top is None else logprobs.top[index]
        entry = _chat_entry(token_id, logprobs.chosen[index], context)
        entry["top_logprobs"] = [_chat_entry(other, logprob, context) for other, logprob in top]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, logprob: float | None, context: FormatContext) -> dict[str, Any]:
    value = finite(logprob)
    return {
        "token": context.token_text(token_id),
        "logprob": LOWEST_LOGPROB if value is None else value,
        "bytes": list(context.token_bytes(token_id)),
    }
