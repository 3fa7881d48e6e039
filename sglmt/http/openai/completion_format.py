"""How `/v1/completions` answers are written, streamed and whole. Pure; runs in the tokenizer workers."""

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
from sglmt.http.openai.logprobs import TextOffsets, completion_logprobs, prompt_offsets
from sglmt.http.openai.usage import UsageTable, failure_event, raise_failure
from sglmt.messages.sampling import FinishReason, TokenLogprobs

if TYPE_CHECKING:
    from sglmt.http.generation import GenerationRequest


class CompletionFormatter:
    """Chunks of one completion request, or its whole body."""

    finishes_aborts = False

    def __init__(self, request: GenerationRequest, context: FormatContext) -> None:
        self._request = request
        self._context = context
        self._usage = UsageTable(request.n)
        self._envelope: dict[str, Any] = {
            "id": f"cmpl-{context.request_id}",
            "object": "text_completion",
            "created": context.created_unix_s,
            "model": context.model_name,
        }
        choices = range(request.num_choices) if request.stream else ()
        opening = b"data: " + encode_json(self._envelope)[:-1]
        self._heads = [b'%b,"choices":[{"index":%d,"text":' % (opening, choice) for choice in choices]
        self._ending = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        self._tail = b',"logprobs":null,"finish_reason":null}' + self._ending
        self._offsets: dict[int, TextOffsets] = {}

    def stream_start(self) -> bytes:
        """The prompts, with echo; those whose log-probabilities are asked for follow with them."""
        request = self._request
        if not request.echo or self._prompt_logprobs_wanted:
            return b""
        return b"".join(
            head + json_text(self._prompt_text(choice // request.n)) + self._tail
            for choice, head in enumerate(self._heads)
        )

    def prompt_logprobs(self, choice: int, input_logprobs: TokenLogprobs) -> bytes:
        """The prompt of a choice with its log-probabilities, when the request asks for both."""
        if not self._prompt_logprobs_wanted:
            return b""
        prompt_index = choice // self._request.n
        logprobs = self._logprobs_of_prompt(prompt_index, input_logprobs)
        return self._chunk(choice, self._prompt_text(prompt_index), logprobs, None)

    def delta(self, choice: int, text: str, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> bytes:
        """One chunk; without text, only when there are log-probabilities to send."""
        if logprobs is None:
            return self._heads[choice] + json_text(text) + self._tail if text else b""
        return self._chunk(choice, text, self._logprobs(choice, token_ids, logprobs), None)

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
        """The chunk with the finish reason and the last text. A failed choice gives an error event instead."""
        self._usage.add(choice, usage)
        if is_failure(finish):
            return failure_event(finish)
        formatted = None if logprobs is None else self._logprobs(choice, token_ids, logprobs)
        return self._chunk(choice, text, formatted, finish.kind)

    def stream_end(self) -> bytes:
        """The usage chunk when asked for, and the terminator."""
        if not self._request.include_usage:
            return SSE_DONE
        return sse_object({**self._envelope, "choices": [], "usage": self._usage.total()}) + SSE_DONE

    def stream_error(self, error: ApiError) -> bytes:
        """The error event and the terminator."""
        return sse_error(error, "openai") + SSE_DONE

    def result(self, choices: list[ChoiceResult]) -> bytes:
        """The whole body. Raises ApiError when a choice failed."""
        raise_failure(choices)
        written = []
        for result in sorted(choices, key=self._number):
            self._usage.add(self._number(result), result.usage)
            written.append(self._whole_choice(result))
        return encode_json({**self._envelope, "choices": written, "usage": self._usage.total()})

    def _whole_choice(self, result: ChoiceResult) -> dict[str, Any]:
        prompt = self._prompt_text(result.prompt_index)
        return {
            "index": self._number(result),
            "text": prompt + result.text if self._request.echo else result.text,
            "logprobs": self._whole_logprobs(result, len(prompt)),
            "finish_reason": result.finish.kind,
        }

    def _whole_logprobs(self, result: ChoiceResult, start: int) -> dict[str, list[Any] | None] | None:
        if self._request.logprobs is None:
            return None
        context = self._context
        own = result.logprobs or TokenLogprobs(chosen=[])
        formatted = completion_logprobs(result.token_ids[: len(own.chosen)], own, TextOffsets(start), context)
        if not self._prompt_logprobs_wanted or result.input_logprobs is None:
            return formatted
        of_prompt = self._logprobs_of_prompt(result.prompt_index, result.input_logprobs)
        return {name: joined(of_prompt[name], formatted[name]) for name in formatted}

    def _logprobs(self, choice: int, token_ids: Sequence[int], logprobs: TokenLogprobs) -> dict[str, list[Any] | None]:
        offsets = self._offsets.get(choice)
        if offsets is None:
            prompt_text = self._prompt_text(choice // self._request.n)
            offsets = self._offsets[choice] = TextOffsets(len(prompt_text))
        return completion_logprobs(token_ids, logprobs, offsets, self._context)

    def _logprobs_of_prompt(self, prompt_index: int, input_logprobs: TokenLogprobs) -> dict[str, list[Any] | None]:
        ids = self._context.prompt_ids[prompt_index]
        offsets = prompt_offsets(self._prompt_text(prompt_index), ids, self._context)
        return completion_logprobs(ids, input_logprobs, offsets, self._context)

    def _chunk(self, choice: int, text: str, logprobs: Any, reason: str | None) -> bytes:
        return b'%b%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._heads[choice],
            json_text(text),
            encode_json(logprobs),
            encode_json(reason),
            self._ending,
        )

    def _number(self, result: ChoiceResult) -> int:
        return result.prompt_index * self._request.n + result.index_in_prompt

    def _prompt_text(self, prompt_index: int) -> str:
        texts = self._context.prompt_texts
        return texts[prompt_index] if texts else self._request.prompts[prompt_index].text or ""

    @property
    def _prompt_logprobs_wanted(self) -> bool:
        spec = self._request.logprobs
        return self._request.echo and spec is not None and spec.prompt_from is not None


def joined(first: list[Any] | None, second: list[Any] | None) -> list[Any] | None:
    """Both lists; None only when neither is there."""
    return second if first is None else first if second is None else first + second
