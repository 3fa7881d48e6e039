"""How `/generate` answers are written, streamed and whole. Pure; runs in the tokenizer workers.

A stream repeats the whole text (and ids, and log-probabilities) so far in every event, as this API has it, unless
the request asked for increments. Several answers are a list, and their events carry an `index`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglmt.http.errors import ApiError, from_finish
from sglmt.http.formatting import (
    SSE_DONE,
    ChoiceResult,
    ChoiceUsage,
    FormatContext,
    encode_json,
    is_failure,
    json_text,
    sse_error,
)
from sglmt.http.native.logprobs import Columns, input_columns, output_columns
from sglmt.messages.sampling import FinishReason, TokenLogprobs

if TYPE_CHECKING:
    from sglmt.http.generation import GenerationRequest


class _ChoiceState:
    """What one choice has sent: JSON of text and ids without their ends, log-probability lists, a token count."""

    __slots__ = ("columns", "ids", "meta_head", "text", "tokens")

    def __init__(self, meta_head: bytes) -> None:
        self.meta_head = meta_head
        self.text = b""
        self.ids = b""
        self.tokens = 0
        self.columns: dict[str, bytes] = {}

    def add(self, columns: Columns) -> None:
        """Append entries to the lists kept as JSON."""
        for name, entries in columns.items():
            before, new = self.columns.get(name, b""), encode_json(entries)[1:-1]
            self.columns[name] = before + b"," + new if before and new else before + new


class GenerateFormatter:
    """Events of one `/generate` request, or its whole body."""

    finishes_aborts = True

    def __init__(self, request: GenerationRequest, context: FormatContext) -> None:
        self._request = request
        self._context = context
        self._many = request.is_batch or request.n > 1
        self._token_text = context.token_text if request.text_in_logprobs else None
        choices = range(request.num_choices) if request.stream else ()
        self._states = [_ChoiceState(self._meta_head(choice)) for choice in choices]
        self._indexes = [b',"index":%d}\n\n' % choice if self._many else b"}\n\n" for choice in choices]

    def stream_start(self) -> bytes:
        """Nothing: the first event comes with the first token."""
        return b""

    def prompt_logprobs(self, choice: int, input_logprobs: TokenLogprobs) -> bytes:
        """Kept for the events that follow; sends nothing itself."""
        self._states[choice].add(self._input_columns(choice, input_logprobs))
        return b""

    def delta(self, choice: int, text: str, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> bytes:
        """One event whenever there is a new id or text."""
        if not text and not token_ids:
            return b""
        return self._event(choice, text, token_ids, logprobs, b'"finish_reason":null')

    def text_frame(self, choice: int) -> tuple[bytes, bytes] | None:
        """Events tell counts and all text so far."""
        return None

    def finish(
        self,
        choice: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: TokenLogprobs | None,
        finish: FinishReason,
        usage: ChoiceUsage,
    ) -> bytes:
        """The last event of a choice. An abort is a finish reason of this API; an error is an error event."""
        if finish.kind == "error":
            return sse_error(from_finish(finish), "native")
        meta = self._ending_meta(finish, usage)
        if self._context.prompt_ids:
            del meta["prompt_tokens"]  # every event has it already
        ending = encode_json(meta)[1:-1]
        return self._event(choice, text, token_ids, logprobs, ending)

    def stream_end(self) -> bytes:
        """The terminator."""
        return SSE_DONE

    def stream_error(self, error: ApiError) -> bytes:
        """The error event and the terminator."""
        return sse_error(error, "native") + SSE_DONE

    def result(self, choices: list[ChoiceResult]) -> bytes:
        """The whole body: one object, or a list for a batch or n > 1.

        A failed choice of a list has its reason in `finish_reason`. Raises ApiError when all failed.
        """
        ordered = sorted(choices, key=lambda each: (each.prompt_index, each.index_in_prompt))
        if all(is_failure(result.finish) for result in ordered):
            raise from_finish(ordered[0].finish)
        whole = [self._whole_choice(choice, result) for choice, result in enumerate(ordered)]
        return encode_json(whole if self._many else whole[0])

    def _event(
        self,
        choice: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: TokenLogprobs | None,
        ending: bytes,
    ) -> bytes:
        state = self._states[choice]
        state.tokens += len(token_ids)
        written, ids = json_text(text)[1:-1], b",".join([b"%d" % token_id for token_id in token_ids])
        if not self._request.incremental:
            written = state.text = state.text + written
            ids = state.ids = state.ids + b"," + ids if state.ids and ids else state.ids + ids
        return b'data: {"text":"%b","output_ids":[%b],"meta_info":{%b%d,%b%b}%b' % (
            written,
            ids,
            state.meta_head,
            state.tokens,
            self._columns(state, token_ids, logprobs),
            ending,
            self._indexes[choice],
        )

    def _columns(self, state: _ChoiceState, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> bytes:
        """The log-probability members of meta_info, each followed by a comma."""
        if self._request.logprobs is None:
            return b""
        if logprobs is not None:
            state.add(output_columns(token_ids, logprobs, self._token_text))
        shown = b"".join(b'"%b":[%b],' % (name.encode(), entries) for name, entries in state.columns.items())
        if self._request.incremental:
            state.columns.clear()
        return shown

    def _whole_choice(self, choice: int, result: ChoiceResult) -> dict[str, Any]:
        columns: Columns = {}
        if self._request.logprobs is not None:
            if result.input_logprobs is not None:
                columns.update(self._input_columns(choice, result.input_logprobs))
            own = result.logprobs or TokenLogprobs(chosen=[])
            columns.update(output_columns(result.token_ids[: len(own.chosen)], own, self._token_text))
        meta = {
            "id": self._request.choice_rid(choice),
            **self._ending_meta(result.finish, result.usage),
            "completion_tokens": result.usage.completion_tokens,
            **columns,
        }
        return {"text": result.text, "output_ids": list(result.token_ids), "meta_info": meta}

    def _ending_meta(self, finish: FinishReason, usage: ChoiceUsage) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "finish_reason": finish_reason(finish, usage),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
        }
        if self._context.started_s is not None:
            meta["e2e_latency"] = self._context.now() - self._context.started_s
        return meta

    def _meta_head(self, choice: int) -> bytes:
        """The constant beginning of a choice's meta_info, up to its number of tokens."""
        prompts = self._context.prompt_ids
        known = b'"prompt_tokens":%d,' % len(prompts[choice // self._request.n]) if prompts else b""
        return b'"id":%b,%b"completion_tokens":' % (json_text(self._request.choice_rid(choice)), known)

    def _input_columns(self, choice: int, input_logprobs: TokenLogprobs) -> Columns:
        spec = self._request.logprobs
        start = 0 if spec is None or spec.prompt_from is None else spec.prompt_from
        ids = self._context.prompt_ids[choice // self._request.n][start:]
        return input_columns(ids, input_logprobs, self._token_text)


def finish_reason(finish: FinishReason, usage: ChoiceUsage) -> dict[str, Any]:
    """The API's finish reason: what matched, how long, or why it was cut."""
    if finish.kind == "stop":
        return {"type": "stop"} if finish.matched is None else {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": usage.completion_tokens}
    error = from_finish(finish)
    return {"type": "abort", "message": error.message, "status_code": error.status, "code": error.code}
