"""The formats in which models write tool calls, from the models' own descriptions and chat templates. Pure.

There is no maintained Python library for this that streams: serving engines keep such parsers inside themselves. So
these are small, each as its format's description reads.
"""

from __future__ import annotations

from collections.abc import Generator

from sglmt.http.output.call_parser import CallParser
from sglmt.http.output.text_reader import Steps

_NAME_END = "[{"


class HermesCalls(CallParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number, prose around them (Hermes 2, Qwen 2.5 and 3).

    The last closing mark may be missing.
    """

    START = "<tool_call>"
    END = "</tool_call>"

    def _run(self) -> Steps:
        while self._may_call and (yield from self._find(self.START)):
            yield from self._skip_space()
            if not (yield from self._call_object()):
                yield from self._give_up(self.END)
                continue
            self._end_call()
            yield from self._skip_space()
            if not (yield from self._accept(self.END)):
                self._put_back()


class LlamaCalls(CallParser):
    """The answer is nothing but `{"name": …, "parameters": {…}}` (Llama 3.1 to 3.3), several separated by `;`.

    `<|python_tag|>` may stand before a call. Without it only an object that names an offered function is a call:
    answers in JSON are no calls.
    """

    TAG = "<|python_tag|>"

    def _run(self) -> Steps:
        while self._may_call and (yield from self._skip_space()):
            marked = yield from self._accept(self.TAG)
            if marked:
                yield from self._skip_space()
            if not (yield from self._call_object(None if marked else self._names)):
                yield from self._give_up(None)
                return
            self._end_call()
            if (yield from self._skip_space()) == ";":
                self._take(1)
                self._raw = []
        self._put_back()


class MistralCalls(CallParser):
    """Calls behind `[TOOL_CALLS]`: a JSON list of objects with name and arguments, or `name[ARGS]{…}` (newer models;
    `[CALL_ID]…` may stand between, `[ARGS]` may be missing). Prose may stand before."""

    START = "[TOOL_CALLS]"
    CALL_ID = "[CALL_ID]"
    ARGUMENTS = "[ARGS]"

    def _run(self) -> Steps:
        while self._may_call and (yield from self._find(self.START)):
            char = yield from self._skip_space()
            if char == "[":
                yield from self._list()
            elif (yield from (self._call_object() if char == "{" else self._named_call())):
                self._end_call()
            else:
                yield from self._give_up(None)

    def _list(self) -> Steps:
        self._take(1)
        while self._may_call:
            yield from self._skip_space()
            if not (yield from self._call_object()):
                yield from self._give_up(None)
                return
            self._end_call()
            char = yield from self._skip_space()
            if char:
                self._take(1)
            if char != ",":
                if char not in ("]", ""):
                    self._put_back()
                return
        self._put_back()

    def _named_call(self) -> Generator[None, None, bool]:
        name = (yield from self._until(_NAME_END)).strip()
        if not name or not all(char.isalnum() or char in "_.-" for char in name):
            return False
        if (yield from self._accept(self.CALL_ID)):
            yield from self._until(_NAME_END)
        yield from self._accept(self.ARGUMENTS)
        if (yield from self._skip_space()) != "{":
            return False
        return (yield from self._arguments_object(name))

    def _until(self, ends: str) -> Generator[None, None, str]:
        """Read up to one of these characters, a name's length at most."""
        taken: list[str] = []
        while len(taken) < 256 and (char := (yield from self._peek())) and char not in ends:
            taken.append(self._take(1))
        return "".join(taken)


CALL_FORMATS: dict[str, type[CallParser]] = {
    "hermes": HermesCalls,
    "qwen": HermesCalls,
    "llama3_json": LlamaCalls,
    "mistral": MistralCalls,
}

# marks that may be special tokens, which are shown to the parser and nobody else
CALL_MARKS: dict[str, tuple[str, ...]] = {
    "hermes": (HermesCalls.START, HermesCalls.END),
    "qwen": (HermesCalls.START, HermesCalls.END),
    "llama3_json": (LlamaCalls.TAG,),
    "mistral": (MistralCalls.START, MistralCalls.CALL_ID, MistralCalls.ARGUMENTS),
}
