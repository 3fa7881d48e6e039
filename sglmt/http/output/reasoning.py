"""Telling what a model thought from what it answers: `<think>…</think>` before the answer. Pure; tokenizer workers."""

from __future__ import annotations

from sglmt.http.output.pieces import Piece, Reasoning, Text, merged
from sglmt.http.output.text_reader import MAX_LAYOUT_CHARS, held_back, layout_start

OPEN = "<think>"
CLOSE = "</think>"
_SPACE = " \t\r\n"


def thinks_at_once(style: str, prompt: str) -> bool:
    """Whether the answer begins inside the reasoning: the prompt has opened it, or models of this style always do.

    `deepseek-r1` models think first, whether the tag is in the prompt, in the answer or nowhere, unless the prompt
    has closed it already; `qwen3` models where a tag opens it.
    """
    end = prompt.rstrip(_SPACE)
    if end.endswith(OPEN):
        return True
    return style == "deepseek-r1" and not end.endswith(CLOSE)


def thinks_on(style: str, continued: str) -> bool:
    """Whether an answer that continues this text continues the reasoning in it."""
    opened, closed = continued.rfind(OPEN), continued.rfind(CLOSE)
    return opened > closed or (style == "deepseek-r1" and closed < 0)


class ReasoningSplitter:
    """Splits one answer. White space around the tags is layout and dropped, with the tags.

    `opened`: it begins inside the reasoning, `begun`: in the middle of it. `verbatim`: nothing is dropped, tags and
    white space belong to the reasoning. `found` tells whether there was any.
    """

    __slots__ = ("_begun", "_buffer", "_is_tag_read", "_state", "_verbatim", "found")

    def __init__(self, opened: bool, verbatim: bool = False, begun: bool = False) -> None:
        self._state = "inside" if opened else "start"
        self._verbatim = verbatim
        self._buffer = ""
        self._begun = begun  # inside, behind the opening tag and white space
        self._is_tag_read = False
        self.found = opened

    def feed(self, text: str) -> list[Piece]:
        """More text of the answer."""
        if self._state == "answer":
            return [Text(text)]
        return self._advance(text, False)

    def close(self) -> list[Piece]:
        """The answer is complete."""
        return self._advance("", True)

    def _advance(self, text: str, ended: bool) -> list[Piece]:
        self._buffer += text
        out: list[Piece] = []
        if self._state == "start":
            self._look_for_start(out, ended)
        if self._state == "inside":
            self._read_inside(out, ended)
        if self._state == "behind":
            self._skip_behind(out)
        return merged(out)

    def _look_for_start(self, out: list[Piece], ended: bool) -> None:
        begin = self._buffer.lstrip(_SPACE)
        may_open = len(self._buffer) - len(begin) <= MAX_LAYOUT_CHARS
        if may_open and begin.startswith(OPEN):
            self._state, self.found = "inside", True
        elif ended or not OPEN.startswith(begin) or not may_open:
            self._state = "answer"
            out.append(Text(self._take(len(self._buffer))))

    def _read_inside(self, out: list[Piece], ended: bool) -> None:
        if not self._begun and not self._skip_opening(out, ended):
            return
        at = self._buffer.find(CLOSE)
        if at < 0:
            if ended:
                out.append(Reasoning(self._take(len(self._buffer))))
                return
            sure = self._buffer[: len(self._buffer) - held_back(self._buffer, CLOSE)]
            out.append(Reasoning(self._take(len(sure) if self._verbatim else layout_start(sure))))
            return
        out.append(Reasoning(self._take(layout_start(self._buffer[:at]))))
        self._drop(self._buffer.index(CLOSE) + len(CLOSE), out)
        self._state = "behind"

    def _skip_opening(self, out: list[Piece], ended: bool) -> bool:
        """Drop white space, an opening tag and white space. Whether more than that is there."""
        self._drop_space(out)
        if not self._is_tag_read and self._buffer.startswith(OPEN):
            self._drop(len(OPEN), out)
            self._drop_space(out)
            self._is_tag_read = True
        elif not self._is_tag_read and not ended and OPEN.startswith(self._buffer):  # it may still become one
            return False
        self._begun = ended or bool(self._buffer)
        return self._begun

    def _skip_behind(self, out: list[Piece]) -> None:
        self._drop_space(out)
        if self._buffer:
            self._state = "answer"
            out.append(Text(self._take(len(self._buffer))))

    def _drop_space(self, out: list[Piece]) -> None:
        self._drop(len(self._buffer) - len(self._buffer.lstrip(_SPACE)), out)

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _drop(self, count: int, out: list[Piece]) -> None:
        dropped = self._take(count)
        if self._verbatim:
            out.append(Reasoning(dropped))
