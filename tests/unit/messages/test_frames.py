"""Frames: every declared message survives the way, and any bytes are a message or a named refusal."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sglmt.messages.frame as frame_module
import sglmt.messages.to_detokenizer
import sglmt.messages.to_scheduler
import sglmt.messages.to_worker  # noqa: F401 - all fill the registry
from sglmt.messages.frame import (
    PREFIX_BYTES,
    PROTOCOL_VERSION,
    FrameError,
    FrameWriter,
    Prefix,
    Role,
    Scope,
    read_prefix,
)
from sglmt.messages.registry import MESSAGES, Registry, kind_of, scope_of
from tests.unit.messages.instances import filled, instances, is_batch

INSTANCE = 0x1122334455667788
TYPES = MESSAGES.types()
any_type = pytest.mark.parametrize("cls", TYPES.values(), ids=lambda cls: cls.__name__)
WRITER = FrameWriter(INSTANCE, Role.SCHEDULER, 3, 70000)


def framed(message: Any) -> bytes:
    return bytes(WRITER.frame(kind_of(message), scope_of(message), message, 5, 9))


def decoded(frame: bytes) -> Any:
    return MESSAGES.decode(read_prefix(frame, INSTANCE), frame)


@any_type
@given(data=st.data())
@settings(max_examples=30)
def test_every_message_survives_the_way(cls: type, data: st.DataObject) -> None:
    message = data.draw(instances(cls))
    frame = framed(message)
    assert decoded(frame) == message
    assert read_prefix(frame, INSTANCE) == Prefix(
        version=PROTOCOL_VERSION,
        kind=kind_of(message),
        scope=scope_of(message),
        sender_role=Role.SCHEDULER,
        sender_index=3,
        sender_generation=70000,
        target_index=5,
        target_generation=9,
        instance_id=INSTANCE,
    )


@any_type
@given(data=st.data())
@settings(max_examples=10)
def test_fields_of_a_newer_peer_are_ignored(cls: type, data: st.DataObject) -> None:
    message = data.draw(instances(cls))
    fields = {name: getattr(message, name) for name in cls.__struct_fields__}
    newer = WRITER.frame(kind_of(message), Scope.PEER, {**fields, "from_the_future": [1, {"a": None}]})
    assert decoded(bytes(newer)) == message


@any_type
@given(data=st.data())
@settings(max_examples=10)
def test_fields_an_older_peer_does_not_send_have_their_default(cls: type, data: st.DataObject) -> None:
    message = data.draw(instances(cls))
    required = {
        field.encode_name: getattr(message, field.name) for field in msgspec.structs.fields(cls) if field.required
    }
    older = decoded(bytes(WRITER.frame(kind_of(message), Scope.PEER, required)))
    for field in msgspec.structs.fields(cls):
        value = getattr(older, field.name)
        if field.required:
            assert value == getattr(message, field.name)
        elif field.default is not msgspec.NODEFAULT:
            assert value == field.default
        else:
            assert value == field.default_factory()


@any_type
@given(data=st.data())
@settings(max_examples=10)
def test_a_missing_required_field_is_a_refusal(cls: type, data: st.DataObject) -> None:
    required = [field for field in msgspec.structs.fields(cls) if field.required]
    if not required:
        return
    message = data.draw(instances(cls))
    fields = {field.encode_name: getattr(message, field.name) for field in required[1:]}
    with pytest.raises(FrameError) as caught:
        decoded(bytes(WRITER.frame(kind_of(message), Scope.PEER, fields)))
    assert caught.value.reason == "undecodable"


@given(st.binary(max_size=80))
@example(b"")
def test_any_bytes_are_a_message_or_a_refusal(data: bytes) -> None:
    _message_or_refusal(data)


PREFIXES = [bytes(WRITER.frame(kind, Scope.PEER, None))[:PREFIX_BYTES] for kind in TYPES]
DEEP = b"\x91" * 100_000 + b"\xc0"
HUGE = (
    b"\xdd\xff\xff\xff\xff",  # an array of 4 billion, then nothing
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdd\xff\xff\xff\xff" * 40,
    b"\x81\xa4keys\xdd\xff\xff\xff\xff",
    b"\x81\xafcustomized_info\x81\xa1a" + b"\xdd\xff\xff\xff\xff" * 20,
    b"\x81\xafcustomized_info\x81\xa1a\x91" + DEEP,
    b"\x81\xafcustomized_info\x81\xa1a\x91\x81\x81\x01\x02\x03",  # a map as the key of a map
    b"\x81\xafcustomized_info\x81\xa1a\x91\xd7\xff" + b"\xff" * 8,  # a time stamp out of range
    b"\x81\xa3rid\xa2\xff\xfe",  # text that is no UTF-8
)


@given(st.sampled_from(PREFIXES), st.binary(max_size=60))
@settings(max_examples=300)
def test_any_content_of_any_kind_is_a_message_or_a_refusal(prefix: bytes, payload: bytes) -> None:
    _message_or_refusal(prefix + payload)


@any_type
@given(data=st.data())
@settings(max_examples=30)
def test_a_message_with_some_bytes_changed_is_a_message_or_a_refusal(cls: type, data: st.DataObject) -> None:
    frame = bytearray(framed(data.draw(instances(cls))))
    for at, byte in data.draw(st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=4)):
        frame[at % len(frame)] = byte
    _message_or_refusal(bytes(frame[: data.draw(st.integers(0, len(frame)))]))


@pytest.mark.parametrize("payload", HUGE, ids=range(len(HUGE)))
def test_claims_of_great_size_cost_no_memory(payload: bytes) -> None:
    tracemalloc.start()
    try:
        for prefix in PREFIXES:
            _message_or_refusal(prefix + payload)
        assert tracemalloc.get_traced_memory()[1] < 8 * 1024 * 1024
    finally:
        tracemalloc.stop()


def _message_or_refusal(frame: bytes) -> None:
    """Nothing but a message or a FrameError; a batch that passes its check can be taken apart."""
    try:
        message = decoded(frame)
    except FrameError as error:
        if error.reason not in {"short", "oversized", "version", "instance", "kind", "undecodable"}:
            raise
        return
    assert type(message) in TYPES.values()
    if is_batch(type(message)):
        try:
            message.check()
        except ValueError:
            return
        for row in range(min(message.rows(), 3)):
            message.take([row]).check()


def test_what_is_wrong_with_a_prefix_is_named() -> None:
    good = framed(filled(next(cls for cls in TYPES.values() if is_batch(cls)), 1))
    version, kind, rest = good[:2], good[2:4], good[4:]
    other_version = struct.pack("<H", PROTOCOL_VERSION + 1)
    for frame, instance, reason in (
        (good[: PREFIX_BYTES - 1], INSTANCE, "short"),
        (other_version + kind + rest, INSTANCE, "version"),
        (good, INSTANCE + 1, "instance"),
        (version + struct.pack("<H", 65535) + rest, INSTANCE, "kind"),
    ):
        with pytest.raises(FrameError) as caught:
            MESSAGES.decode(read_prefix(frame, instance), frame)
        assert caught.value.reason == reason


def test_oversized_frames_are_neither_sent_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_module, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(FrameError) as caught:
        WRITER.frame(1, Scope.PEER, b"x" * 1000)
    assert caught.value.reason == "oversized"
    with pytest.raises(FrameError) as caught:
        read_prefix(b"x" * 1001, INSTANCE)
    assert caught.value.reason == "oversized"


def test_a_kind_number_can_be_declared_once() -> None:
    registry = Registry()

    @registry.message(1, Scope.PEER)
    class First(msgspec.Struct):
        pass

    with pytest.raises(TypeError, match="message kind 1 is taken by First"):

        @registry.message(1, Scope.PEER)
        class Second(msgspec.Struct):
            pass


def test_a_type_that_cannot_be_decoded_fails_where_it_is_declared() -> None:
    registry = Registry()
    with pytest.raises(TypeError):

        @registry.message(1, Scope.PEER)
        class Impossible(msgspec.Struct):
            value: int | float | str | list[int] | tuple[str, ...]
