"""One JSON value, followed while it is written: where it ends, without waiting for its end. Pure.

Follows strings and nesting only; whether all of it is JSON is for a decoder to say at the end. Control characters
inside strings, which models write as they are and JSON forbids, come out escaped.
"""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_OUTSIDE = re.compile(r'["{}\[\]]|[^\s0-9A-Za-z+\-.,:]')
_SCALAR_END = re.compile(r"[\s,\]}]")
_WHITE = " \t\r\n"
_SCALAR_START = frozenset("-0123456789tfn")


class JsonValue:
    """Feed it text until it is `done` (the value is complete) or `broken` (this is no JSON)."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_is_scalar", "broken", "done", "started")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._is_scalar = False
        self.started = False
        self.done = False
        self.broken = False

    def feed(self, text: str) -> tuple[int, str]:
        """(how much of the text belongs to the value, that part as JSON has it). Leading white space does not."""
        at = 0
        if not self.started and text:
            self._start(text[0])
        out: list[str] = []
        while at < len(text) and not self.done and not self.broken:
            if self._is_scalar:
                found = _SCALAR_END.search(text, at)
                end = found.start() if found else len(text)
                self.done = found is not None
            elif self._in_string:
                end = self._string(text, at, out)
                at = end
                continue
            else:
                end = self._structure(text, at)
            out.append(text[at:end])
            at = end
        return at, "".join(out)

    def close(self) -> bool:
        """Nothing follows. Whether the value is complete."""
        self.done = self.done or self._is_scalar
        return self.done and not self.broken

    def _start(self, char: str) -> None:
        self.started = True
        self._is_scalar = char in _SCALAR_START
        self.broken = not self._is_scalar and char not in '{["'

    def _string(self, text: str, at: int, out: list[str]) -> int:
        """Up to the next character that matters in a string, and behind it."""
        if self._escaped:
            self._escaped = False
            out.append(text[at])
            return at + 1
        found = _IN_STRING.search(text, at)
        if found is None:
            out.append(text[at:])
            return len(text)
        end, char = found.end(), found.group()
        out.append(text[at : found.start()])
        if char == '"':
            self._in_string = False
            self.done = self._depth == 0
        elif char == "\\":
            self._escaped = True
        else:
            char = _ESCAPES.get(char) or f"\\u{ord(char):04x}"
        out.append(char)
        return end

    def _structure(self, text: str, at: int) -> int:
        """Up to the next character that matters outside strings, and behind it unless it has no place there."""
        found = _OUTSIDE.search(text, at)
        if found is None:
            return len(text)
        char = found.group()
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            self.done = self._depth == 0
        else:
            self.broken = True
            return found.start()
        return found.end()


_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
