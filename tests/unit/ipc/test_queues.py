"""Queues over real sockets: a peer that is gone, new, full or not reading costs its own frames, never a wait."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglmt.delivery.keys import make_life
from sglmt.ipc.addresses import (
    LONGEST_NAME_BYTES,
    MAX_SOCKET_PATH_BYTES,
    http_worker_ipc,
    ipc_address,
    socket_path,
)
from sglmt.ipc.queues import READ_BYTES, SEND_BUFFER_BYTES, Inbox, Outbox, Transport
from sglmt.ipc.socket_mapping import SocketMapping
from sglmt.messages.frame import MAX_FRAME_BYTES, Role
from tests.support.wait import wait_until

DEADLINE_S = 10.0


def received(transport: Transport, inbox: Inbox, count: int, *flushed: Outbox | SocketMapping) -> list[bytes]:
    """The next `count` frames; what senders keep back is flushed meanwhile, as the processes do it now and then."""
    frames: list[bytes] = []

    def enough() -> bool:
        for sender in flushed:
            sender.sweep() if isinstance(sender, SocketMapping) else sender.flush()
        transport.wait(0.0)
        while len(frames) < count and (frame := inbox.receive()) is not None:
            frames.append(frame)
        return len(frames) == count

    wait_until(enough, DEADLINE_S, f"{count} frames arrive")
    return frames


class Dead:
    """Which worker lives the state page would show as gone."""

    def __init__(self) -> None:
        self.lives: set[tuple[int, int]] = set()

    def __call__(self, index: int, generation: int) -> bool:
        return (index, generation) in self.lives


def address_of(run_dir: Path, index: int = 0, generation: int = 1) -> str:
    return ipc_address(run_dir, Role.TOKENIZER_WORKER, index, generation)


def test_frames_arrive_in_order(run_dir: Path, transport: Transport) -> None:
    inbox, outbox = transport.inbox(address_of(run_dir)), transport.outbox(address_of(run_dir))
    sent = [b"%d" % number for number in range(1000)]
    for frame in sent:
        assert outbox.send(frame)
    assert received(transport, inbox, 1000, outbox) == sent
    assert inbox.receive() is None
    assert (outbox.dropped, outbox.backlog_bytes) == (0, 0)
    outbox.close()
    inbox.close()


def test_the_socket_file_is_private_and_goes_with_the_inbox(run_dir: Path, transport: Transport) -> None:
    inbox = transport.inbox(address_of(run_dir))
    path = socket_path(run_dir, Role.TOKENIZER_WORKER, 0, 1)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_ISSOCK(os.stat(path).st_mode)
    inbox.close()
    assert not path.exists()


def test_frames_sent_before_the_peer_is_there_are_kept(run_dir: Path, transport: Transport) -> None:
    outbox = transport.outbox(address_of(run_dir))
    assert outbox.send(b"early")
    assert outbox.send(b"too")
    assert outbox.backlog_bytes == 8
    assert not outbox.flush()
    inbox = transport.inbox(address_of(run_dir))
    assert received(transport, inbox, 2, outbox) == [b"early", b"too"]
    assert outbox.backlog_bytes == 0
    outbox.close()
    inbox.close()


def test_what_is_kept_for_an_absent_peer_is_bounded_and_the_rest_counted(run_dir: Path, transport: Transport) -> None:
    outbox = Outbox(transport.poller, address_of(run_dir), max_backlog_bytes=100)
    assert [outbox.send(b"x" * 30) for _ in range(5)] == [True, True, True, False, False]
    assert (outbox.backlog_bytes, outbox.dropped) == (90, 2)
    assert outbox.send(b"x" * 10)
    outbox.close()
    assert (outbox.backlog_bytes, outbox.dropped) == (0, 6)


def test_a_peer_that_does_not_read_costs_its_own_frames_only(run_dir: Path, transport: Transport) -> None:
    own = Transport()  # of the process that does not read
    stopped, other = own.inbox(address_of(run_dir, 0)), transport.inbox(address_of(run_dir, 1))
    to_stopped = Outbox(transport.poller, address_of(run_dir, 0), max_backlog_bytes=20_000)
    to_other = transport.outbox(address_of(run_dir, 1))
    frame = b"x" * 1000
    accepted = 0
    for number in range(4 * SEND_BUFFER_BYTES // len(frame)):
        accepted += to_stopped.send(frame)
        if number % 100 == 0:
            assert to_other.send(b"%d" % number)
            assert received(transport, other, 1) == [b"%d" % number]
    assert to_stopped.dropped > 0
    assert 0 < to_stopped.backlog_bytes <= 20_000
    taken: list[bytes] = []

    def all_arrived() -> bool:
        own.wait(0.0)
        transport.wait(0.0)  # sends on as the peer reads; nobody calls flush
        while (frame := stopped.receive()) is not None:
            taken.append(frame)
        return len(taken) == accepted

    wait_until(all_arrived, DEADLINE_S, "what was accepted arrives")
    assert taken == [frame] * accepted
    assert to_stopped.backlog_bytes == 0
    for queue in (to_stopped, to_other, stopped, other):
        queue.close()
    own.poller.close()


def test_frames_of_any_size_arrive_whole(run_dir: Path, transport: Transport) -> None:
    inbox, outbox = transport.inbox(address_of(run_dir)), transport.outbox(address_of(run_dir))
    sizes = [0, 1, 3, READ_BYTES - 5, READ_BYTES - 4, READ_BYTES, 5_000_000, 2, 1_000_000, 4]
    frames = [bytes([number]) * size for number, size in enumerate(sizes)]
    for frame in frames:
        assert outbox.send(frame)
    assert received(transport, inbox, len(frames)) == frames
    assert (outbox.backlog_bytes, outbox.dropped) == (0, 0)
    outbox.close()
    inbox.close()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=20), st.lists(st.integers(0, 1300), max_size=8))
def test_a_frame_arrives_the_same_however_its_bytes_are_cut(frames: list[bytes], places: list[int]) -> None:
    run_dir = Path(tempfile.mkdtemp(prefix="q"))
    transport = Transport()
    inbox = transport.inbox(address_of(run_dir))
    stream = b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)
    cuts = sorted(min(place, len(stream)) for place in places)
    with socket.socket(socket.AF_UNIX) as sender:
        sender.connect(str(socket_path(run_dir, Role.TOKENIZER_WORKER, 0, 1)))
        for begin, end in pairwise([0, *cuts, len(stream)]):
            sender.sendall(stream[begin:end])
            transport.wait(0.0)
            transport.wait(0.0)
        assert received(transport, inbox, len(frames)) == frames
    inbox.close()
    transport.poller.close()
    run_dir.rmdir()


def test_a_frame_that_was_begun_is_sent_on_or_begun_anew(run_dir: Path, transport: Transport) -> None:
    big = b"b" * (8 * SEND_BUFFER_BYTES)
    first = transport.inbox(address_of(run_dir))
    outbox = Outbox(transport.poller, address_of(run_dir), max_backlog_bytes=100)
    assert outbox.send(big)  # begun: it is kept although it is longer than the bound
    assert not outbox.send(b"x")
    first.close()
    second = transport.inbox(address_of(run_dir))
    assert received(transport, second, 1, outbox) == [big]
    outbox.close()
    second.close()


def test_a_length_that_cannot_be_ends_the_connection_and_is_seen(run_dir: Path, transport: Transport) -> None:
    inbox = transport.inbox(address_of(run_dir))
    with socket.socket(socket.AF_UNIX) as sender:
        sender.connect(str(socket_path(run_dir, Role.TOKENIZER_WORKER, 0, 1)))
        sender.sendall(struct.pack("<I", MAX_FRAME_BYTES + 1) + b"x" * 100)
        assert received(transport, inbox, 1) == [b""]  # counted by the receiver as too short
        sender.settimeout(DEADLINE_S)
        with contextlib.suppress(ConnectionResetError):
            assert sender.recv(1) == b""
    inbox.close()


def test_a_sender_that_dies_inside_a_frame_leaves_nothing(run_dir: Path, transport: Transport) -> None:
    inbox = transport.inbox(address_of(run_dir))
    with socket.socket(socket.AF_UNIX) as sender:
        sender.connect(str(socket_path(run_dir, Role.TOKENIZER_WORKER, 0, 1)))
        sender.sendall(struct.pack("<I", 10) + b"half")
        transport.wait(0.0)
        transport.wait(0.0)
    wait_until(lambda: transport.wait(0.0) or not inbox._senders, DEADLINE_S, "the connection is forgotten")
    outbox = transport.outbox(address_of(run_dir))
    assert outbox.send(b"whole")
    assert received(transport, inbox, 1) == [b"whole"]
    outbox.close()
    inbox.close()


def test_a_successor_never_receives_its_predecessors_traffic(run_dir: Path, transport: Transport) -> None:
    first = transport.inbox(address_of(run_dir, 0, 1))
    outbox = transport.outbox(address_of(run_dir, 0, 1))
    outbox.send(b"first")
    assert received(transport, first, 1, outbox) == [b"first"]
    first.close()
    second = transport.inbox(address_of(run_dir, 0, 2))
    to_second = transport.outbox(address_of(run_dir, 0, 2))
    for _ in range(50):
        outbox.send(b"late")
    to_second.send(b"second")
    assert received(transport, second, 1, to_second) == [b"second"]
    outbox.flush()
    transport.wait(0.0)
    assert second.receive() is None
    for queue in (outbox, to_second, second):
        queue.close()


def test_addresses_name_role_index_and_generation(run_dir: Path) -> None:
    addresses = {
        ipc_address(run_dir, role, index, generation)
        for role in (Role.ROUTER, Role.SCHEDULER, Role.DETOKENIZER, Role.TOKENIZER_WORKER)
        for index in (0, 1, 11)
        for generation in (1, 2, 11)
    }
    assert len(addresses) == 36
    assert http_worker_ipc(run_dir, make_life(3, 7)) == ipc_address(run_dir, Role.TOKENIZER_WORKER, 3, 7)


def test_the_longest_name_is_known() -> None:
    longest = socket_path(Path("/"), Role.TOKENIZER_WORKER, 4095, 2**20 - 1).name
    assert len(longest) == LONGEST_NAME_BYTES
    assert len(longest) < MAX_SOCKET_PATH_BYTES


# the socket mapping


@pytest.fixture
def dead() -> Dead:
    return Dead()


@pytest.fixture
def mapping(run_dir: Path, transport: Transport, dead: Dead) -> SocketMapping:
    return SocketMapping(transport, run_dir, dead)


def test_a_life_is_registered_on_first_sight(run_dir: Path, transport: Transport, mapping: SocketMapping) -> None:
    assert mapping.lives() == []
    inboxes = {life: transport.inbox(http_worker_ipc(run_dir, life)) for life in (make_life(0, 1), make_life(3, 2))}
    for life, inbox in inboxes.items():
        assert mapping.send(life, b"for %d" % life)
        assert received(transport, inbox, 1, mapping) == [b"for %d" % life]
    assert mapping.lives() == list(inboxes)
    mapping.close()
    for inbox in inboxes.values():
        inbox.close()


def test_two_lives_of_one_index_coexist_until_the_old_one_is_gone(
    run_dir: Path, transport: Transport, mapping: SocketMapping, dead: Dead
) -> None:
    old, new = make_life(0, 1), make_life(0, 2)
    inboxes = {life: transport.inbox(http_worker_ipc(run_dir, life)) for life in (old, new)}
    for life, inbox in inboxes.items():
        mapping.send(life, b"%d" % life)
        assert received(transport, inbox, 1, mapping) == [b"%d" % life]
    dead.lives.add((0, 1))
    assert mapping.sweep() == [old]
    assert mapping.lives() == [new]
    assert not mapping.send(old, b"late")
    assert mapping.send(new, b"on")
    assert received(transport, inboxes[new], 1, mapping) == [b"on"]
    assert inboxes[old].receive() is None
    mapping.close()
    for inbox in inboxes.values():
        inbox.close()


def test_late_frames_for_a_dead_life_are_dropped_and_counted(mapping: SocketMapping, dead: Dead) -> None:
    dead.lives.add((0, 1))
    assert not any(mapping.send(make_life(0, 1), b"late") for _ in range(3))
    assert (mapping.late, mapping.dropped, mapping.lives()) == (3, 0, [])
    mapping.close()


def test_what_was_kept_for_a_life_that_dies_is_counted_as_dropped(mapping: SocketMapping, dead: Dead) -> None:
    life = make_life(0, 1)
    assert mapping.send(life, b"never read")
    assert mapping.backlog_bytes == 10
    dead.lives.add((0, 1))
    mapping.sweep()
    assert (mapping.backlog_bytes, mapping.dropped, mapping.late) == (0, 1, 0)
    dead.lives.clear()  # a life once closed stays closed, whatever the page says
    assert not mapping.send(life, b"late")
    assert mapping.late == 1
    mapping.close()


def test_a_life_that_cannot_be_is_unroutable(mapping: SocketMapping) -> None:
    assert not mapping.send(make_life(5, 0), b"x")
    assert mapping.take_unroutable() == 1
    assert mapping.take_unroutable() == 0
    mapping.close()
