"""Token counts of a whole OpenAI answer, and choices that failed. Pure; runs in the tokenizer workers."""

from __future__ import annotations

from typing import Any

from sglmt.http.errors import from_finish
from sglmt.http.formatting import ChoiceResult, ChoiceUsage, is_failure, sse_error
from sglmt.messages.sampling import FinishReason


class UsageTable:
    """Usage by choice; a prompt is counted once, however many answers it gets."""

    __slots__ = ("_by_choice", "_n", "_reasoning")

    def __init__(self, n: int) -> None:
        self._n = n
        self._by_choice: dict[int, ChoiceUsage] = {}
        self._reasoning: dict[int, int] = {}

    def add(self, choice: int, usage: ChoiceUsage) -> None:
        """The final counts of one choice."""
        self._by_choice[choice] = usage

    def add_reasoning(self, choice: int, tokens: int) -> None:
        """How many of a choice's tokens are reasoning, where that can be counted."""
        self._reasoning[choice] = tokens

    def total(self) -> dict[str, Any]:
        """The `usage` object."""
        prompt_tokens = completion_tokens = cached_tokens = 0
        counted_prompt = -1
        for choice in sorted(self._by_choice):
            usage = self._by_choice[choice]
            completion_tokens += usage.completion_tokens
            if choice // self._n != counted_prompt:
                counted_prompt = choice // self._n
                prompt_tokens += usage.prompt_tokens
                cached_tokens += usage.cached_tokens
        total: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }
        if self._reasoning:
            total["completion_tokens_details"] = {"reasoning_tokens": sum(self._reasoning.values())}
        return total


def raise_failure(choices: list[ChoiceResult]) -> None:
    """Raise ApiError for the first choice that was aborted or failed."""
    for choice in choices:
        if is_failure(choice.finish):
            raise from_finish(choice.finish)


def failure_event(finish: FinishReason) -> bytes:
    """The error event of a choice that failed in mid-stream."""
    return sse_error(from_finish(finish), "openai")
