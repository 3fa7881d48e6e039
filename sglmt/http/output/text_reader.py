"""Reading text that comes in pieces, as a coroutine over what is there so far. Pure; runs in the tokenizer workers.

`_run` reads and yields where it needs more text, so that a format reads like its description. What is emitted does
not depend on how the text was cut.
"""

from __future__ import annotations

import abc
from collections.abc import Generator

from sglmt.http.output.pieces import Piece, Text, merged

Steps = Generator[None, None, None]

_SPACE = " \t\r\n"
MAX_LAYOUT_CHARS = 256  # more white space than that is text: it cannot be held back for ever


class TextReader(abc.ABC):
    """The text of one answer: what was read for the current call (`_raw`), what is not read yet (`_text`)."""

    def __init__(self) -> None:
        self._text = ""
        self._ended = False
        self._raw: list[str] = []
        self._is_behind_call = False
        self._out: list[Piece] = []
        self._steps = self._read()

    def feed(self, text: str) -> list[Piece]:
        """More text of the answer."""
        self._text += text
        return self._advance()

    def close(self) -> list[Piece]:
        """The answer is complete."""
        self._ended = True
        return self._advance()

    def _advance(self) -> list[Piece]:
        next(self._steps, None)
        out, self._out = merged(self._out), []
        return out

    def _read(self) -> Steps:
        yield from self._run()
        yield from self._pass_text()

    @abc.abstractmethod
    def _run(self) -> Steps:
        """Read until the end, or until everything that follows is text."""

    # what formats are made of

    def _take(self, count: int) -> str:
        """Read characters into the current call."""
        taken, self._text = self._text[:count], self._text[count:]
        self._raw.append(taken)
        return taken

    def _put_back(self) -> None:
        """What was read since the last call is no part of one."""
        self._text, self._raw = "".join(self._raw) + self._text, []

    def _peek(self) -> Generator[None, None, str]:
        """The next character, "" at the end."""
        while not self._text:
            if self._ended:
                return ""
            yield
        return self._text[0]

    def _skip_space(self) -> Generator[None, None, str]:
        """Read white space; returns the character behind it, "" at the end."""
        while (char := (yield from self._peek())) and char in _SPACE:
            self._take(len(self._text) - len(self._text.lstrip(_SPACE)))
        return char

    def _accept(self, mark: str) -> Generator[None, None, bool]:
        """Read `mark` if it is what comes next."""
        while len(self._text) < len(mark) and mark.startswith(self._text) and not self._ended:
            yield
        if not self._text.startswith(mark):
            return False
        self._take(len(mark))
        return True

    def _pass_text(self) -> Steps:
        """All that follows is text."""
        while True:
            if self._ended or not (self._is_behind_call and is_layout(self._text)):
                self._pass(len(self._text))
            if self._ended:
                return
            yield

    def _pass(self, count: int) -> None:
        """These characters are text; layout that ends the answer behind a call is nothing."""
        text, self._text = self._text[:count], self._text[count:]
        if text and not (self._ended and self._is_behind_call and is_layout(text)):
            self._is_behind_call = False
            self._out.append(Text(text))

    def _find(self, mark: str) -> Generator[None, None, bool]:
        """Pass text on up to a mark and read the mark; False at the end."""
        while (at := self._text.find(mark)) < 0:
            kept = held_back(self._text, mark) if not self._ended else 0
            sure = len(self._text) - kept
            if not self._ended:
                sure = layout_start(self._text[:sure])
            self._pass(sure)
            if self._ended:
                return False
            yield
        before = self._text[: layout_start(self._text[:at])]
        self._pass(len(before))
        self._raw = []
        self._take(at - len(before) + len(mark))
        return True


def held_back(text: str, mark: str) -> int:
    """How many characters at the end may be the beginning of a mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


def layout_start(text: str) -> int:
    """Where the white space at the end of a text begins that may be layout."""
    return max(len(text) - MAX_LAYOUT_CHARS, len(text.rstrip(_SPACE)))


def is_layout(text: str) -> bool:
    """Whether this is nothing but white space, and not too much of it."""
    return len(text) <= MAX_LAYOUT_CHARS and not text.strip(_SPACE)
