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
        prompts: dict[int, ChoiceUsage] = {}
        for choice in sorted(self._by_choice):
            prompts.setdefault(choice // self._n, self._by_choice[choice])
        prompt_tokens = sum(usage.prompt_tokens for usage in prompts.values())
        completion_tokens = sum(usage.completion_tokens for usage in self._by_choice.values())
        total: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompts.values())},
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
