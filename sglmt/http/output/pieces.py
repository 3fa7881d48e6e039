"""The pieces that the text of an answer is taken apart into. Pure data; tokenizer workers.

A call is one `CallStart`, any number of `CallArguments`, then `CallEnd`, or `CallBroken` when what was written turned
out not to be a call after all. Joined, the arguments of a call that ended are a JSON object.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Prose: the content of the message."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of this function begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the arguments' JSON text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete."""


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The call that was begun is none. `raw` is everything the model wrote for it, marks included."""

    raw: str


Piece = Text | Reasoning | CallStart | CallArguments | CallEnd | CallBroken


def merged(pieces: list[Piece]) -> list[Piece]:
    """The same with neighbours of one kind joined, and without empty ones."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, Text | Reasoning | CallArguments):
            if not piece.text:
                continue
            if type(last) is type(piece):
                out[-1] = type(piece)(last.text + piece.text)
                continue
        out.append(piece)
    return out
