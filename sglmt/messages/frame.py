"""The fixed prefix of every frame that crosses a process. Runs everywhere; owns nothing.

A frame is `prefix ‖ msgpack payload`, sent as one message. The router and the forwarding side of a detokenizer
read the prefix and nothing else. Layout, little endian, 26 bytes:

    u16 protocol version | u16 kind | u8 scope | u8 sender role
    u16 sender index | u32 sender generation | u16 target index | u32 target generation | u64 instance id

`FrameWriter` is the one send door; `read_prefix` the one check on the way in.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple

import msgspec

from sglmt.errors import MessageError

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 128 * 1024 * 1024

_PREFIX = struct.Struct("<HHBBHIHIQ")
PREFIX_BYTES = _PREFIX.size


class Role(enum.IntEnum):
    """Which kind of process; the number is what crosses the wire and the state page."""

    SUPERVISOR = 0
    ROUTER = 1
    SCHEDULER = 2
    DETOKENIZER = 3
    TOKENIZER_WORKER = 4

    @property
    def label(self) -> str:
        """The name users see: `tokenizer_worker`, `scheduler`, …"""
        return self.name.lower()


class Scope(enum.IntEnum):
    """Who a frame is for. Only SCHEDULER, WORKER and ALL_WORKERS frames pass a router."""

    PEER = 0  # whoever owns the socket it was sent to
    SCHEDULER = 1
    WORKER = 2  # the worker life named by target index and generation
    ALL_WORKERS = 3


class Prefix(NamedTuple):
    """The decoded prefix; `life` and `target_life` are worker lives as in `sglmt.delivery.keys`."""

    version: int
    kind: int
    scope: int
    sender_role: int
    sender_index: int
    sender_generation: int
    target_index: int
    target_generation: int
    instance_id: int


class FrameError(MessageError):
    """A frame is refused; `reason` is the counter it is filed under."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"frame refused ({reason}): {detail}")
        self.reason = reason


def read_prefix(frame: bytes | memoryview, instance_id: int) -> Prefix:
    """Decode and check the prefix of `frame`.

    Raises FrameError with reason `short`, `oversized`, `version` or `instance`.
    """
    if len(frame) < PREFIX_BYTES:
        raise FrameError("short", f"{len(frame)} bytes, a prefix has {PREFIX_BYTES}")
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameError("oversized", f"{len(frame)} bytes, the limit is {MAX_FRAME_BYTES}")
    prefix = Prefix(*_PREFIX.unpack_from(frame))
    if prefix.version != PROTOCOL_VERSION:
        raise FrameError("version", f"protocol {prefix.version}, this process speaks {PROTOCOL_VERSION}")
    if prefix.instance_id != instance_id:
        raise FrameError("instance", f"from instance {prefix.instance_id:016x}, this is {instance_id:016x}")
    return prefix


class FrameWriter:
    """The one send door of a process life: stamps who sends, of which instance, to whom."""

    __slots__ = ("_encoder", "_generation", "_index", "_instance_id", "_role")

    def __init__(self, instance_id: int, role: Role, index: int, generation: int) -> None:
        self._instance_id = instance_id
        self._role = int(role)
        self._index = index
        self._generation = generation
        self._encoder = msgspec.msgpack.Encoder()

    def frame(
        self, kind: int, scope: Scope, message: Any, target_index: int = 0, target_generation: int = 0
    ) -> bytearray:
        """One frame ready to send. Raises FrameError (`oversized`) rather than send what peers refuse."""
        buffer = bytearray(PREFIX_BYTES)
        self._encoder.encode_into(message, buffer, PREFIX_BYTES)
        if len(buffer) > MAX_FRAME_BYTES:
            raise FrameError("oversized", f"{len(buffer)} bytes of kind {kind}, the limit is {MAX_FRAME_BYTES}")
        _PREFIX.pack_into(
            buffer, 0, PROTOCOL_VERSION, kind, scope, self._role, self._index, self._generation,
            target_index, target_generation, self._instance_id,
        )  # fmt: skip
        return buffer
