"""Bounded queues between processes over ZMQ PUSH/PULL on unix sockets. Used by every child; threads: none.

Receivers bind, senders connect. What the transport does was measured, and shapes this file: messages queued at
a dead peer vanish silently, so a successful send proves nothing (delivery/ recovers); a send to a peer that is
gone, stopped or full returns EAGAIN at once, which is an event here and never a wait. Each `Outbox` keeps a
bounded backlog of its own, because a fresh connection takes a moment to become writable and a stopped peer
must cost its own messages only.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import zmq

from sglmt.messages.frame import MAX_FRAME_BYTES

RECEIVE_HIGH_WATER = 256  # messages; a message is one step's rows, not one token
SEND_HIGH_WATER = 64


class Inbox:
    """The receiving end: binds one socket, hands out frames without waiting."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._path = Path(address.removeprefix("ipc://"))
        self._socket.bind(address)
        self._path.chmod(0o600)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """For a poller."""
        return self._socket

    @property
    def fd(self) -> int:
        """Edge-triggered: after it wakes, call `receive` until it returns None."""
        return int(self._socket.getsockopt(zmq.FD))

    def receive(self) -> bytes | None:
        """The next frame, or None when there is none now."""
        if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # cheaper than the exception
            return None
        try:
            return self._socket.recv(zmq.DONTWAIT)
        except zmq.Again:
            return None

    def close(self) -> None:
        """Close the socket and remove its file."""
        self._socket.close(linger=0)
        self._path.unlink(missing_ok=True)


class Outbox:
    """The sending end to one process life. Never waits, never grows beyond its bounds."""

    __slots__ = ("_backlog", "_backlog_bytes", "_max_backlog_bytes", "_socket", "address", "dropped")

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        max_backlog_bytes: int = 16 * 1024 * 1024,
    ) -> None:
        self.address = address
        self.dropped = 0
        self._backlog: deque[bytes | bytearray] = deque()
        self._backlog_bytes = 0
        self._max_backlog_bytes = max_backlog_bytes
        self._socket = context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        self._socket.connect(address)

    def send(self, frame: bytes | bytearray) -> bool:
        """Send, or keep for `flush`. False when the backlog is full and the frame was dropped (and counted)."""
        if self._backlog:
            self.flush()
        if not self._backlog:
            try:
                self._socket.send(frame, zmq.DONTWAIT)
                return True
            except zmq.Again:
                pass
        if self._backlog_bytes + len(frame) > self._max_backlog_bytes:
            self.dropped += 1
            return False
        self._backlog.append(frame)
        self._backlog_bytes += len(frame)
        return True

    def flush(self) -> bool:
        """Send what was kept. True when nothing is left."""
        backlog = self._backlog
        while backlog:
            try:
                self._socket.send(backlog[0], zmq.DONTWAIT)
            except zmq.Again:
                return False
            self._backlog_bytes -= len(backlog.popleft())
        return True

    @property
    def backlog_bytes(self) -> int:
        """Bytes kept back because the peer does not take them now."""
        return self._backlog_bytes

    def close(self) -> None:
        """Close; what was kept is discarded and counted as dropped."""
        self.dropped += len(self._backlog)
        self._backlog.clear()
        self._backlog_bytes = 0
        self._socket.close(linger=0)


class Transport:
    """Makes the queues of one process. Tests put a network of their own in its place."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)

    def inbox(self, address: str) -> Inbox:
        """Bind the receiving end at `address`."""
        return Inbox(self._context, address)

    def outbox(self, address: str) -> Outbox:
        """Connect a sending end to `address`."""
        return Outbox(self._context, address)
