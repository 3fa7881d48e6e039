"""Reading tool calls out of text that comes in pieces: what the formats have in common. Pure; tokenizer workers.

No character is lost: white space before a call, and behind the last one, is layout and dropped with the call's marks;
all else is text or part of a call. A call is announced as soon as its name is known and its arguments have begun to be
an object; its arguments are passed on while they are written. What is found not to be a call before that stays text.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

import msgspec

from sglmt.http.output.json_value import JsonValue
from sglmt.http.output.pieces import CallArguments, CallBroken, CallEnd, CallStart, Text
from sglmt.http.output.text_reader import Steps, TextReader, held_back

ARGUMENT_KEYS = ("arguments", "parameters")
MAX_NAME_CHARS = 256


class CallParser(TextReader):
    """The calls in one answer. `names` are the offered functions; `max_calls` as many are read, the rest is text."""

    def __init__(self, names: frozenset[str], max_calls: int | None = None) -> None:
        super().__init__()
        self._names = names
        self._max_calls = max_calls
        self._calls = 0
        self._announced = False

    @property
    def _may_call(self) -> bool:
        return self._max_calls is None or self._calls < self._max_calls

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
        call = _Call()
        while (yield from self._member(call, names)):
            char = yield from self._skip_space()
            if char == ",":
                self._take(1)
                continue
            if char == "}":
                self._take(1)
            elif not (call.has_arguments and call.name is not None and char in ("", "<")):
                return False
            if call.name is not None and not call.has_arguments:
                self._announce(call.name)
                self._pass_arguments("{}")
            return call.name is not None
        return False

    def _member(self, call: _Call, names: frozenset[str] | None) -> Generator[None, None, bool]:
        """Read one `"key": value` of a call. Whether a call may have it."""
        yield from self._skip_space()
        key = yield from self._string()
        if key is None or (yield from self._skip_space()) != ":":
            return False
        self._take(1)
        yield from self._skip_space()
        if key == "name" and call.name is None:
            return (yield from self._name(call, names))
        if key in ARGUMENT_KEYS and not call.has_arguments:
            return (yield from self._arguments(call))
        if names is not None and key not in ("id", "type"):
            return False
        return (yield from self._value(lambda _: None))

    def _name(self, call: _Call, names: frozenset[str] | None) -> Generator[None, None, bool]:
        name = yield from self._string()
        if not name or len(name) > MAX_NAME_CHARS or (names is not None and name not in names):
            return False
        call.name = name
        if call.kept is not None:
            self._announce(name)
            self._pass_arguments(call.kept)
        return True

    def _arguments(self, call: _Call) -> Generator[None, None, bool]:
        call.has_arguments = True
        if call.name is not None:
            return (yield from self._arguments_object(call.name))
        parts: list[str] = []
        if not (yield from self._value(parts.append)):
            return False
        call.kept = arguments_text("".join(parts))
        return call.kept is not None

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


class _Call:
    """What was read of a call so far. `kept`: arguments that came before the name."""

    __slots__ = ("has_arguments", "kept", "name")

    def __init__(self) -> None:
        self.name: str | None = None
        self.kept: str | None = None
        self.has_arguments = False


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
