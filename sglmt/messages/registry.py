"""Which message type travels under which kind number, to which scope. Filled by `@message` at import.

A message type is declared once, with its number and scope beside it. A number used twice, or a type that
msgspec cannot decode, fails at import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from sglmt.messages.frame import PREFIX_BYTES, FrameError, Prefix, Scope

M = TypeVar("M", bound=type)

_KIND_ATTRIBUTE = "__message_kind__"
_SCOPE_ATTRIBUTE = "__message_scope__"


class Registry:
    """Kind number → type and decoder. One instance, `MESSAGES`, filled at import and constant afterwards."""

    def __init__(self) -> None:
        self._decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {}
        self._types: dict[int, type] = {}

    def message(self, kind: int, scope: Scope) -> Callable[[M], M]:
        """Class decorator: declare a message type under `kind`, sent to `scope` unless its sender says else."""

        def declare(cls: M) -> M:
            if kind in self._types:
                raise TypeError(f"message kind {kind} is taken by {self._types[kind].__name__}")
            self._decoders[kind] = msgspec.msgpack.Decoder(cls)
            self._types[kind] = cls
            setattr(cls, _KIND_ATTRIBUTE, kind)
            setattr(cls, _SCOPE_ATTRIBUTE, scope)
            return cls

        return declare

    def types(self) -> dict[int, type]:
        """All declared types by kind number."""
        return dict(self._types)

    def decode(self, prefix: Prefix, frame: bytes | memoryview) -> Any:
        """The message of a frame whose prefix was read.

        Raises FrameError with reason `kind` (unknown number) or `undecodable` (not that type).
        """
        decoder = self._decoders.get(prefix.kind)
        if decoder is None:
            raise FrameError("kind", f"unknown message kind {prefix.kind}")
        try:
            return decoder.decode(memoryview(frame)[PREFIX_BYTES:])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise FrameError("undecodable", f"{self._types[prefix.kind].__name__}: {error}") from error


MESSAGES = Registry()
message = MESSAGES.message


def kind_of(message_object: object) -> int:
    """The kind number of a declared message object."""
    kind: int = getattr(type(message_object), _KIND_ATTRIBUTE)
    return kind


def scope_of(message_object: object) -> Scope:
    """The declared scope of a message object."""
    scope: Scope = getattr(type(message_object), _SCOPE_ATTRIBUTE)
    return scope
