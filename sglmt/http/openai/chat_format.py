"""How `/v1/chat/completions` answers are written, streamed and whole. Pure; runs in the tokenizer workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglmt.http.errors import ApiError
from sglmt.http.formatting import (
    SSE_DONE,
    ChoiceResult,
    ChoiceUsage,
    FormatContext,
    encode_json,
    is_failure,
    json_text,
    sse_error,
    sse_object,
)
from sglmt.http.openai.logprobs import chat_logprobs
from sglmt.http.openai.usage import UsageTable, failure_event, raise_failure
from sglmt.messages.sampling import FinishReason, TokenLogprobs

if TYPE_CHECKING:
    from sglmt.http.generation import GenerationRequest


class ChatFormatter:
    """Chunks of one chat request, or its whole body."""

    finishes_aborts = False

    def __init__(self, request: GenerationRequest, context: FormatContext) -> None:
        self._request = request
        self._context = context
        self._usage = UsageTable(request.n)
        self._common: dict[str, Any] = {"created": context.created_unix_s, "model": context.model_name}
        self._id = f"chatcmpl-{context.request_id}"
        choices = range(request.num_choices) if request.stream else ()
        opening = b"data: " + encode_json(self._envelope("chat.completion.chunk"))[:-1]
        self._openings = [b'%b,"choices":[{"index":%d,"delta":' % (opening, choice) for choice in choices]
        self._heads = [head + b'{"content":' for head in self._openings]
        self._ending = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        self._tail = b'},"logprobs":null,"finish_reason":null}' + self._ending

    def stream_start(self) -> bytes:
        """The role chunk of each choice."""
        role = b'{"role":"assistant","content":""'
        return b"".join(opening + role + self._tail for opening in self._openings)

    def prompt_logprobs(self, choice: int, input_logprobs: TokenLogprobs) -> bytes:
        """Chats have none."""
        return b""

    def delta(self, choice: int, text: str, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> bytes:
        """One chunk; without text, only when there are log-probabilities to send."""
        if logprobs is None:
            return self._heads[choice] + json_text(text) + self._tail if text else b""
        formatted = encode_json(chat_logprobs(token_ids, logprobs, self._context))
        return b'%b%b},"logprobs":%b,"finish_reason":null}%b' % (
            self._heads[choice],
            json_text(text),
            formatted,
            self._ending,
        )

    def text_frame(self, choice: int) -> tuple[bytes, bytes] | None:
        """Every plain chunk is the same around its text."""
        return self._heads[choice], self._tail

    def finish(
        self,
        choice: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: TokenLogprobs | None,
        finish: FinishReason,
        usage: ChoiceUsage,
    ) -> bytes:
        """The last text, then the chunk with the finish reason. A failed choice gives an error event instead."""
        self._usage.add(choice, usage)
        if is_failure(finish):
            return failure_event(finish)
        last = self.delta(choice, text, token_ids, logprobs) if text or token_ids else b""
        return b'%b%b{},"logprobs":null,"finish_reason":%b}%b' % (
            last,
            self._openings[choice],
            encode_json(finish.kind),
            self._ending,
        )

    def stream_end(self) -> bytes:
        """The usage chunk when asked for, and the terminator."""
        if not self._request.include_usage:
            return SSE_DONE
        chunk = {**self._envelope("chat.completion.chunk"), "choices": [], "usage": self._usage.total()}
        return sse_object(chunk) + SSE_DONE

    def stream_error(self, error: ApiError) -> bytes:
        """The error event and the terminator."""
        return sse_error(error, "openai") + SSE_DONE

    def result(self, choices: list[ChoiceResult]) -> bytes:
        """The whole body. Raises ApiError when a choice failed."""
        raise_failure(choices)
        written = []
        for result in sorted(choices, key=lambda each: each.index_in_prompt):
            written.append(self._whole_choice(result))
        body = {**self._envelope("chat.completion"), "choices": written, "usage": self._usage.total()}
        return encode_json(body)

    def _whole_choice(self, result: ChoiceResult) -> dict[str, Any]:
        self._usage.add(result.index_in_prompt, result.usage)
        return {
            "index": result.index_in_prompt,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": self._whole_logprobs(result),
            "finish_reason": result.finish.kind,
        }

    def _whole_logprobs(self, result: ChoiceResult) -> dict[str, list[Any] | None] | None:
        if self._request.logprobs is None or result.logprobs is None:
            return None
        ids = result.token_ids[: len(result.logprobs.chosen)]
        return chat_logprobs(ids, result.logprobs, self._context)

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, **self._common}
