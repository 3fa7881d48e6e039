"""How the served model's answers are taken apart: chosen once a worker, from the options and the model. Pure.

`auto` looks at the chat template, which writes calls and reasoning of earlier turns the way the model writes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sglmt.http.output.call_formats import CALL_FORMATS, CALL_MARKS, HermesCalls, LlamaCalls, MistralCalls
from sglmt.http.output.reasoning import CLOSE, OPEN


@dataclass(frozen=True)
class OutputRules:
    """`calls` and `reasoning` are None where there is nothing to take apart.

    `special_marks` maps those marks that are special tokens to their ids; `reasoning_end_id` is the token that ends
    reasoning, None when it is not one token.
    """

    calls: str | None = None
    reasoning: str | None = None
    special_marks: dict[str, int] = field(default_factory=dict)
    reasoning_end_id: int | None = None

    def shown_ids(self, with_calls: bool, with_reasoning: bool) -> tuple[int, ...]:
        """The special tokens whose text the parsers need to see."""
        marks: list[str] = []
        if with_calls and self.calls is not None:
            marks += CALL_MARKS[self.calls]
        if with_reasoning and self.reasoning is not None:
            marks += (OPEN, CLOSE)
        return tuple(sorted({self.special_marks[mark] for mark in marks if mark in self.special_marks}))


def output_rules(
    calls: str,
    reasoning: str,
    template: str,
    token_id: Callable[[str], int | None],
    is_special: Callable[[int], bool],
) -> OutputRules:
    """The rules for a chat template's text, from `--tool-call-parser` and `--reasoning-parser`."""
    chosen_calls = calls_of(template) if calls == "auto" else calls if calls in CALL_FORMATS else None
    chosen_reasoning = reasoning_of(template) if reasoning == "auto" else None if reasoning == "none" else reasoning
    marks = (*CALL_MARKS.get(chosen_calls or "", ()), OPEN, CLOSE)
    ids = {mark: found for mark in marks if (found := token_id(mark)) is not None}
    return OutputRules(
        calls=chosen_calls,
        reasoning=chosen_reasoning,
        special_marks={mark: found for mark, found in ids.items() if is_special(found)},
        reasoning_end_id=ids.get(CLOSE),
    )


def calls_of(template: str) -> str | None:
    """The format of tool calls that a chat template is written for."""
    if HermesCalls.START in template and "<function=" not in template:
        return "hermes"
    if MistralCalls.START in template:
        return "mistral"
    return "llama3_json" if LlamaCalls.TAG in template else None


def reasoning_of(template: str) -> str | None:
    """The style of reasoning that a chat template is written for; both work alike where the prompt opens it."""
    return "qwen3" if CLOSE in template else None
