"""How answers are written: the Formatter protocol, its data, and the bytes every stream format shares. Pure.

Runs in the tokenizer workers. A formatter belongs to one request and turns rows of output into bytes; `delta` runs
once per token and choice, so formatters keep everything constant as bytes made beforehand.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from sglmt.http.errors import ApiError, ApiName, error_object
from sglmt.messages.sampling import FinishReason, TokenLogprobs

SSE_DONE = b"data: [DONE]\n\n"
SSE_KEEP_ALIVE = b": keep-alive\n\n"
LOWEST_LOGPROB = -9999.0  # stands for minus infinity, which JSON has no word for

_LINE_SEPARATORS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))

_line_separator = re.compile("[\x85\u2028\u2029]").search

encode_json = msgspec.json.Encoder().encode


class ChoiceUsage(NamedTuple):
    """Token counts of one answer; `prompt_tokens` and `cached_tokens` are those of its prompt."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class ChoiceResult(msgspec.Struct, gc=False):
    """One finished answer. `input_logprobs` are those of the prompt's tokens, from the first one asked for."""

    prompt_index: int
    index_in_prompt: int
    text: str
    token_ids: Sequence[int]
    logprobs: TokenLogprobs | None
    input_logprobs: TokenLogprobs | None
    finish: FinishReason
    usage: ChoiceUsage


class FormatContext(msgspec.Struct, gc=False):
    """What a formatter must be told besides the request.

    `request_id` becomes the answer's id; `token_text` and `token_bytes` give a token as it is displayed and as it is
    written. `prompt_texts` and `prompt_ids` (one a prompt) are needed for echo and for log-probabilities of the
    prompt; `prompt_ids` also give /generate its prompt token counts before the end. `started_s` is `now()` at arrival.
    """

    model_name: str
    created_unix_s: int
    request_id: str
    token_text: Callable[[int], str]
    token_bytes: Callable[[int], bytes]
    prompt_texts: Sequence[str] = ()
    prompt_ids: Sequence[Sequence[int]] = ()
    started_s: float | None = None
    now: Callable[[], float] = time.monotonic


class Formatter(Protocol):
    """Writes the answer of one request, streamed or whole. Events are complete: `data: {...}` and an empty line.

    `finishes_aborts`: an abort in mid-stream is written by `finish`, as a finish reason of the API; else it is an
    error event.
    """

    finishes_aborts: bool

    def stream_start(self) -> bytes:
        """What to send as soon as the headers are out; may be empty."""
        ...

    def prompt_logprobs(self, choice: int, input_logprobs: TokenLogprobs) -> bytes:
        """Take the log-probabilities of a choice's prompt, before its first `delta`; may be empty."""
        ...

    def delta(self, choice: int, text: str, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> bytes:
        """New text and ids of a choice; empty when there is nothing to send."""
        ...

    def finish(
        self,
        choice: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: TokenLogprobs | None,
        finish: FinishReason,
        usage: ChoiceUsage,
    ) -> bytes:
        """The last text, ids and the finish reason of a choice; once a choice."""
        ...

    def text_frame(self, choice: int) -> tuple[bytes, bytes] | None:
        """What `delta` writes before and after the JSON of a text without log-probabilities; None when its events are
        not made so, or for an empty text are not left out."""
        ...

    def stream_end(self) -> bytes:
        """After the last choice: the usage chunk when asked for, and the terminator."""
        ...

    def stream_error(self, error: ApiError) -> bytes:
        """Instead of everything that would still follow: an error event and the terminator."""
        ...

    def result(self, choices: list[ChoiceResult]) -> bytes:
        """The body of an answer that is not streamed. Raises ApiError when an OpenAI choice failed."""
        ...


def json_text(text: str) -> bytes:
    """A JSON string literal that no client cuts into two lines.

    Some clients split lines where Unicode says so (U+0085, U+2028, U+2029), not only where the event stream does.
    """
    encoded = encode_json(text)
    return encoded if text.isascii() or _line_separator(text) is None else one_line(encoded)


def sse_object(value: object) -> bytes:
    """One event with a JSON value, lines kept whole as in `json_text`."""
    return b"data: " + one_line(encode_json(value)) + b"\n\n"


def sse_error(error: ApiError, api: ApiName) -> bytes:
    """The error event of a stream, without the terminator."""
    return sse_object(error_object(error, api))


def finite(logprob: float | None) -> float | None:
    """A log-probability as JSON can hold it."""
    if logprob is None or logprob != logprob:
        return None
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def is_failure(finish: FinishReason) -> bool:
    """Whether a finish is an abort or an error, which is never written as a normal end."""
    return finish.kind in ("abort", "error")


def one_line(encoded: bytes) -> bytes:
    """Encoded JSON without the line ends that only Unicode knows."""
    for separator, escaped in _LINE_SEPARATORS:
        if separator in encoded:
            encoded = encoded.replace(separator, escaped)
    return encoded
