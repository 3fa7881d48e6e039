"""How chat answers are written whose text is taken apart: tool calls and reasoning. Pure; tokenizer workers.

Chats without tools, of models that do not reason, never come here: see `chat_format`.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglmt.http.formatting import ChoiceResult, ChoiceUsage, FormatContext, encode_json, is_failure, one_line
from sglmt.http.openai.chat_format import ChatFormatter
from sglmt.http.openai.logprobs import chat_logprobs
from sglmt.http.openai.usage import failure_event
from sglmt.http.output.message import Message, MessageParser, OutputPlan, parse_whole
from sglmt.http.output.pieces import CallArguments, CallStart, Piece, Reasoning, Text
from sglmt.messages.sampling import FinishReason, TokenLogprobs

if TYPE_CHECKING:
    from sglmt.http.generation import GenerationRequest

_ALPHANUMERIC = string.ascii_letters + string.digits


class ParsedChatFormatter(ChatFormatter):
    """Chunks of one chat request, or its whole body, taken apart as the request's `output` says."""

    def __init__(self, request: GenerationRequest, context: FormatContext) -> None:
        super().__init__(request, context)
        assert request.output is not None
        self._plan: OutputPlan = request.output
        prompt = context.prompt_texts[0] if context.prompt_texts else ""
        self._choices = [_Choice(self._plan, prompt) for _ in range(request.num_choices)]

    def delta(self, choice: int, text: str, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> bytes:
        """A chunk for each piece that is certain now; the first has the log-probabilities."""
        state = self._choices[choice]
        state.count(token_ids)
        return self._chunks(choice, state.parser.feed(text), token_ids, logprobs)

    def text_frame(self, choice: int) -> tuple[bytes, bytes] | None:
        """The text is looked at for calls and reasoning first."""
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
        """The last pieces, then the chunk with the finish reason. A failed choice gives an error event instead."""
        state = self._choices[choice]
        state.count(token_ids)
        self._add_usage(choice, usage)
        if is_failure(finish):
            return failure_event(finish)
        last = self._chunks(choice, [*state.parser.feed(text), *state.parser.close()], token_ids, logprobs)
        return b'%b%b{},"logprobs":null,"finish_reason":%b}%b' % (
            last,
            self._openings[choice],
            encode_json(finish_reason(finish, state.calls > 0)),
            self._ending,
        )

    def _chunks(
        self, choice: int, pieces: list[Piece], token_ids: Sequence[int], logprobs: TokenLogprobs | None
    ) -> bytes:
        state = self._choices[choice]
        deltas = [delta for piece in pieces if (delta := self._delta_of(state, piece)) is not None]
        if logprobs is None:
            return b"".join(self._openings[choice] + _json(delta) + self._tail[1:] for delta in deltas)
        formatted = encode_json(chat_logprobs(token_ids, logprobs, self._context))
        out = []
        for delta in deltas or [{}]:
            out.append(
                b'%b%b,"logprobs":%b,"finish_reason":null}%b'
                % (self._openings[choice], _json(delta), formatted, self._ending)
            )
            formatted = b"null"
        return b"".join(out)

    def _delta_of(self, state: _Choice, piece: Piece) -> dict[str, Any] | None:
        match piece:
            case Text(text):
                return {"content": text}
            case Reasoning(text):
                return {"reasoning_content" if self._plan.separate_reasoning else "content": text}
            case CallStart(name):
                state.calls += 1
                call = {"index": state.calls - 1, **self._call(name, "")}
                return {"tool_calls": [call]}
            case CallArguments(text):
                return {"tool_calls": [{"index": state.calls - 1, "function": {"arguments": text}}]}
        return None

    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        return {
            "id": call_id(self._plan.rules.calls),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _whole_choice(self, result: ChoiceResult) -> dict[str, Any]:
        state = self._choices[result.index_in_prompt]
        state.count(result.token_ids)
        message = parse_whole(state.parser, result.text)
        self._add_usage(result.index_in_prompt, result.usage)
        return {
            "index": result.index_in_prompt,
            "message": self._message(message),
            "logprobs": self._whole_logprobs(result),
            "finish_reason": finish_reason(result.finish, bool(message.calls)),
        }

    def _message(self, message: Message) -> dict[str, Any]:
        content, reasoning = message.content, message.reasoning
        if not self._plan.separate_reasoning:
            content, reasoning = reasoning + content, ""
        written: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not message.calls else None,
            "refusal": None,
        }
        if reasoning:
            written["reasoning_content"] = reasoning
        if message.calls:
            written["tool_calls"] = [self._call(call.name, call.arguments) for call in message.calls]
        return written

    def _add_usage(self, choice: int, usage: ChoiceUsage) -> None:
        self._usage.add(choice, usage)
        tokens = self._choices[choice].reasoning_tokens
        if tokens is not None:
            self._usage.add_reasoning(choice, tokens)


class _Choice:
    """One answer while it is written: its parser, its calls, its tokens up to the one that ends the reasoning."""

    __slots__ = ("_end_id", "_tokens", "_tokens_to_end", "calls", "parser")

    def __init__(self, plan: OutputPlan, prompt: str) -> None:
        self.parser = MessageParser(plan, prompt)
        self.calls = 0
        self._end_id = plan.rules.reasoning_end_id if plan.rules.reasoning is not None else None
        self._tokens = 0
        self._tokens_to_end: int | None = None

    def count(self, token_ids: Sequence[int]) -> None:
        """These tokens are part of the answer."""
        if self._end_id is None or self._tokens_to_end is not None:
            return
        for token_id in token_ids:
            self._tokens += 1
            if token_id == self._end_id:
                self._tokens_to_end = self._tokens
                return

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning, its tags included; None when they cannot be counted."""
        if self._end_id is None:
            return None
        if not self.parser.has_reasoned:
            return 0
        return self._tokens if self._tokens_to_end is None else self._tokens_to_end


def finish_reason(finish: FinishReason, has_calls: bool) -> str:
    """The API's word: an answer that ended by itself with calls ended for them."""
    return "tool_calls" if has_calls and finish.kind == "stop" else finish.kind


def call_id(call_format: str | None) -> str:
    """A fresh id; Mistral's templates take nine letters and digits and nothing else."""
    if call_format == "mistral":
        return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def _json(delta: dict[str, Any]) -> bytes:
    return one_line(encode_json(delta))
