"""Reading tool calls out of text that comes in pieces: what the formats have in common. Pure; tokenizer workers.

A parser is a coroutine over the text so far: `_run` reads it and yields where it needs more, so that a format reads
like its description. What it emits does not depend on how the text was cut. No character is lost: white space
before a call, and behind the last one, is layout and dropped with the call's marks; all else is text or part of a call.

A call is announced as soon as its name is known and its arguments have begun to be an object, and its arguments
are passed on while they are written. What is found not to be a call before that stays text.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator

import msgspec

from sglmt.http.output.json_value import JsonValue
from sglmt.http.output.pieces import CallArguments, CallBroken, CallEnd, CallStart, Piece, Text, merged

Steps = Generator[None, None, None]

ARGUMENT_KEYS = ("arguments", "parameters")
MAX_NAME_CHARS = 256
_SPACE = " \t\r\n"


class CallParser(abc.ABC):
    """The calls in one answer. `names` are the offered functions; `max_calls` as many are read, the rest is text."""

    def __init__(self, names: frozenset[str], max_calls: int | None = None) -> None:
        self._names = names
        self._max_calls = max_calls
        self._calls = 0
        self._text = ""
        self._ended = False
        self._raw: list[str] = []  # what was read for the current call
        self._announced = False
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

    @property
    def _may_call(self) -> bool:
        return self._max_calls is None or self._calls < self._max_calls

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
            if self._ended or not self._text.isspace():
                self._pass(len(self._text))
            if self._ended:
                return
            yield

    def _pass(self, count: int) -> None:
        """These characters are text; white space that ends the answer behind a call is nothing."""
        text, self._text = self._text[:count], self._text[count:]
        if not (self._is_behind_call and (not text or text.isspace())):
            self._is_behind_call = False
            self._out.append(Text(text))

    def _find(self, mark: str) -> Generator[None, None, bool]:
        """Pass text on up to a mark and read the mark; False at the end."""
        while (at := self._text.find(mark)) < 0:
            kept = held_back(self._text, mark) if not self._ended else 0
            sure = self._text[: len(self._text) - kept]
            if kept or not self._ended:
                sure = sure.rstrip(_SPACE)
            self._pass(len(sure))
            if self._ended:
                return False
            yield
        before = self._text[:at].rstrip(_SPACE)
        self._pass(len(before))
        self._raw = []
        self._take(at - len(before) + len(mark))
        return True

    # calls

    def _announce(self, name: str) -> None:
        self._announced = True
        self._out.append(CallStart(name))

    def _pass_arguments(self, text: str) -> None:
        self._out.append(CallArguments(text))

    def _end_call(self) -> None:
        self._out.append(CallEnd())
        self._calls += 1
        self._is_behind_call = True
        self._announced = False
        self._raw = []

    def _give_up(self, mark: str | None) -> Steps:
        """This is no call. What was read is text, or part of the arguments when they are under way: then all up to
        behind `mark`, or the end, goes with them."""
        if not self._announced:
            self._out.append(Text("".join(self._raw)))
            self._raw = []
            return
        while mark is None or mark not in self._text:
            kept = held_back(self._text, mark) if mark is not None and not self._ended else 0
            self._pass_arguments(self._take(len(self._text) - kept))
            if self._ended:
                break
            yield
        else:
            self._pass_arguments(self._take(self._text.index(mark)))
            self._take(len(mark))
        self._out.append(CallBroken("".join(self._raw)))
        self._announced = False
        self._raw = []

    def _value(self, pass_on: Callable[[str], None]) -> Generator[None, None, bool]:
        """Read one JSON value, passing it on as it comes. Whether it is complete."""
        value = JsonValue()
        while True:
            used, written = value.feed(self._text)
            self._take(used)
            if written:
                pass_on(written)
            if value.done or value.broken:
                return value.done
            if self._ended:
                return value.close()
            yield

    def _arguments_object(self, name: str) -> Generator[None, None, bool]:
        """Read the arguments, which begin here, as those of a call of `name`. Whether they are a JSON object."""
        parts: list[str] = []
        if (yield from self._peek()) == "{":
            self._announce(name)

            def pass_on(text: str) -> None:
                parts.append(text)
                self._pass_arguments(text)

            return (yield from self._value(pass_on)) and is_object("".join(parts))
        if not (yield from self._value(parts.append)):
            return False
        text = arguments_text("".join(parts))
        if text is None:
            return False
        self._announce(name)
        self._pass_arguments(text)
        return True

    def _call_object(self, names: frozenset[str] | None = None) -> Generator[None, None, bool]:
        """Read `{"name": …, "arguments": {…}}`, in any order of keys. Whether it is a call (of one of `names`).

        When it is not, the caller gives up. The last brace may be missing.
        """
        if not (yield from self._accept("{")):
            return False
        name: str | None = None
        kept: str | None = None  # arguments that came before the name
        has_arguments = False
        separator = '"'
        while True:
            char = yield from self._skip_space()
            if separator == "," and char == ",":
                self._take(1)
                char = yield from self._skip_space()
            elif separator == ",":
                if char == "}":
                    self._take(1)
                elif not (has_arguments and name is not None and char in ("", "<")):
                    return False
                break
            separator = ","
            key = yield from self._string()
            if key is None or (yield from self._skip_space()) != ":":
                return False
            self._take(1)
            yield from self._skip_space()
            if key == "name" and name is None:
                name = yield from self._string()
                if not name or len(name) > MAX_NAME_CHARS or (names is not None and name not in names):
                    return False
                if kept is not None:
                    self._announce(name)
                    self._pass_arguments(kept)
            elif key in ARGUMENT_KEYS and not has_arguments:
                has_arguments = True
                if name is not None:
                    if not (yield from self._arguments_object(name)):
                        return False
                    continue
                parts: list[str] = []
                if not (yield from self._value(parts.append)):
                    return False
                kept = arguments_text("".join(parts))
                if kept is None:
                    return False
            elif (names is not None and key not in ("id", "type")) or not (yield from self._value(lambda _: None)):
                return False
        if name is None:
            return False
        if not has_arguments:
            self._announce(name)
            self._pass_arguments("{}")
        return True

    def _string(self) -> Generator[None, None, str | None]:
        """Read one JSON string, None when there is none."""
        parts: list[str] = []
        if (yield from self._peek()) != '"' or not (yield from self._value(parts.append)):
            return None
        try:
            value = msgspec.json.decode("".join(parts))
        except msgspec.DecodeError:
            return None
        return value if isinstance(value, str) else None


def held_back(text: str, mark: str) -> int:
    """How many characters at the end may be the beginning of a mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


def is_object(text: str) -> bool:
    """Whether this is the JSON of an object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False


def arguments_text(text: str) -> str | None:
    """Arguments as the JSON of an object: given as one, as a string that holds one, or as null. None otherwise."""
    if is_object(text):
        return text
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    if value is None or (isinstance(value, str) and not value.strip()):
        return "{}"
    return value if isinstance(value, str) and is_object(value) else None
