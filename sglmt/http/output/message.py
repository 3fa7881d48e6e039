"""One answer taken apart: reasoning, text, calls. Pure; runs in the tokenizer workers, one for each choice."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglmt.http.output.call_formats import CALL_FORMATS
from sglmt.http.output.call_parser import CallParser
from sglmt.http.output.pieces import (
    CallArguments,
    CallBroken,
    CallEnd,
    CallStart,
    Piece,
    Reasoning,
    Text,
    merged,
)
from sglmt.http.output.reasoning import ReasoningSplitter, thinks_at_once, thinks_on
from sglmt.http.output.rules import OutputRules

PORTION_CHARS = 4096


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What one request wants of its answers.

    `tools`: names of the offered functions, None to leave calls as text. `continued`: the message that the answer
    continues, None when it is a message of its own.
    """

    rules: OutputRules
    tools: frozenset[str] | None = None
    max_calls: int | None = None
    separate_reasoning: bool = True
    continued: str | None = None


class MessageParser:
    """Takes one answer apart while it comes; the pieces do not depend on how the text was cut."""

    def __init__(self, plan: OutputPlan, prompt: str) -> None:
        """`prompt` is the rendered text the answer continues, or its end."""
        self._calls: CallParser | None = None
        if plan.tools is not None and plan.rules.calls is not None:
            self._calls = CALL_FORMATS[plan.rules.calls](plan.tools, plan.max_calls)
        self._reasoning = _splitter(plan, prompt)

    @property
    def has_reasoned(self) -> bool:
        """Whether there was reasoning so far."""
        return self._reasoning is not None and self._reasoning.found

    def feed(self, text: str) -> list[Piece]:
        """More text of the answer."""
        pieces: list[Piece] = [Text(text)] if self._reasoning is None else self._reasoning.feed(text)
        return self._with_calls(pieces)

    def close(self) -> list[Piece]:
        """The answer is complete."""
        pieces = [] if self._reasoning is None else self._with_calls(self._reasoning.close())
        return pieces if self._calls is None else merged([*pieces, *self._calls.close()])

    def _with_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return merged(pieces)
        out: list[Piece] = []
        for piece in pieces:
            out += self._calls.feed(piece.text) if isinstance(piece, Text) else [piece]
        return merged(out)


def _splitter(plan: OutputPlan, prompt: str) -> ReasoningSplitter | None:
    style, verbatim = plan.rules.reasoning, not plan.separate_reasoning
    if style is None:
        return None
    if not plan.continued:
        return ReasoningSplitter(thinks_at_once(style, prompt), verbatim)
    return ReasoningSplitter(True, verbatim, begun=True) if thinks_on(style, plan.continued) else None


def parse_whole(parser: MessageParser, text: str) -> Message:
    """One whole answer; fed in portions, so that taking it apart stays linear in its length."""
    pieces: list[Piece] = []
    for at in range(0, len(text), PORTION_CHARS):
        pieces += parser.feed(text[at : at + PORTION_CHARS])
    return whole_message(pieces + parser.close())


@dataclass(slots=True)
class Call:
    """One whole call; `arguments` is JSON text."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """One whole answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def whole_message(pieces: list[Piece]) -> Message:
    """All pieces of one answer together. What was begun as a call and is none, or was cut off, is content."""
    message = Message()
    call: Call | None = None
    for piece in pieces:
        match piece:
            case Text(text):
                message.content += text
            case Reasoning(text):
                message.reasoning += text
            case CallStart(name):
                call = Call(name)
            case CallArguments(text):
                assert call is not None
                call.arguments += text
            case CallEnd():
                assert call is not None
                message.calls.append(call)
            case CallBroken(raw):
                message.content += raw
    return message
