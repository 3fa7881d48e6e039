"""Bounded queues between processes: frames over unix stream sockets, no thread, never a wait. Used by every child.

Receivers bind, senders connect. A frame on the wire is its length (u32, little endian) and its bytes. What shapes
this file was measured: frames queued at a dead peer vanish silently, so a successful send proves nothing
(delivery/ recovers), and a peer that is gone, stopped or full must cost its own frames only. So each `Outbox` keeps
what the peer does not take now in a bounded backlog, sends it on when the peer reads again, and refuses the rest.

`Transport` holds the queues of one process and the one `Poller` they share: `Transport.wait` reads what has arrived
into the inbox and sends on what was kept.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from pathlib import Path

from sglmt.ipc.poller import Poller
from sglmt.messages.frame import MAX_FRAME_BYTES

SEND_BUFFER_BYTES = 512 * 1024  # asked of the kernel, which may give less
READ_BYTES = 256 * 1024  # from one sender at a time, so that none keeps the others waiting
MAX_BACKLOG_BYTES = 16 * 1024 * 1024
_PENDING_CONNECTIONS = 1024
_LENGTH = struct.Struct("<I")
_REFUSED = b""  # too short to be a frame: stands for one that was refused, so that it is counted with the others


class Inbox:
    """The receiving end: one listening socket and the connections of all senders."""

    def __init__(self, poller: Poller, address: str) -> None:
        self._poller = poller
        self._path = _path_of(address)
        self._frames: deque[bytes] = deque()
        self._senders: set[_Sender] = set()
        self._chunk = memoryview(bytearray(READ_BYTES))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(self._path))
        self._path.chmod(0o600)  # before it listens: nobody has connected by now
        self._listener.listen(_PENDING_CONNECTIONS)
        poller.watch(self._listener.fileno(), self._accept)

    def receive(self) -> bytes | None:
        """The next frame of those that `Transport.wait` has read, or None."""
        return self._frames.popleft() if self._frames else None

    @property
    def has_more(self) -> bool:
        """Whether `receive` has a frame."""
        return bool(self._frames)

    def _accept(self) -> None:
        try:
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._senders.add(_Sender(self, connection))
        except OSError:  # nobody else, or no descriptor is left: then it is tried again
            pass

    def _forget(self, sender: _Sender) -> None:
        self._senders.discard(sender)

    def close(self) -> None:
        """Close everything and remove the socket's file; what was not read is lost."""
        self._poller.forget(self._listener.fileno())
        self._listener.close()
        for sender in list(self._senders):
            sender.close()
        self._path.unlink(missing_ok=True)


class _Sender:
    """One connection of an inbox, and the beginning of a frame that has not arrived whole."""

    __slots__ = ("_inbox", "_rest", "_socket")

    def __init__(self, inbox: Inbox, connection: socket.socket) -> None:
        self._inbox = inbox
        self._socket = connection
        self._rest = bytearray()
        inbox._poller.watch(connection.fileno(), self._read)

    def _read(self) -> None:
        """Take what has arrived, up to `READ_BYTES`."""
        inbox = self._inbox
        try:
            count = self._socket.recv_into(inbox._chunk)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self.close()  # the peer is gone; the beginning of a frame is of no use
        elif not self._rest:
            chunk = inbox._chunk[:count]
            used = self._take_frames(chunk)
            if used < count:
                self._rest += chunk[used:]
        else:
            self._rest += inbox._chunk[:count]
            with memoryview(self._rest) as rest:
                used = self._take_frames(rest)
            del self._rest[:used]

    def _take_frames(self, data: memoryview) -> int:
        """Hand over the whole frames in `data`; returns how many bytes they are."""
        frames = self._inbox._frames
        begin, size = 0, len(data)
        while size - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, begin)
            if length > MAX_FRAME_BYTES:
                frames.append(_REFUSED)
                self.close()
                return size
            end = begin + _LENGTH.size + length
            if end > size:
                break
            frames.append(bytes(data[begin + _LENGTH.size : end]))
            begin = end
        return begin

    def close(self) -> None:
        """End the connection. Harmless when it has ended."""
        if self._socket.fileno() >= 0:
            self._inbox._poller.forget(self._socket.fileno())
            self._socket.close()
            self._inbox._forget(self)


class Outbox:
    """The sending end to one process life. Never waits, never grows beyond its bounds."""

    __slots__ = (
        "_backlog",
        "_backlog_bytes",
        "_is_watched",
        "_max_backlog_bytes",
        "_path",
        "_poller",
        "_socket",
        "_written",
        "address",
        "dropped",
    )

    def __init__(self, poller: Poller, address: str, max_backlog_bytes: int = MAX_BACKLOG_BYTES) -> None:
        self.address = address
        self.dropped = 0
        self._poller = poller
        self._path = str(_path_of(address))
        self._max_backlog_bytes = max_backlog_bytes
        self._socket: socket.socket | None = None
        self._is_watched = False
        self._written = 0  # bytes of the frame whose turn it is, its length included
        self._backlog: deque[bytes | bytearray] = deque()
        self._backlog_bytes = 0

    def send(self, frame: bytes | bytearray) -> bool:
        """Send, or keep until the peer takes it. False when the backlog is full and the frame was dropped (and
        counted)."""
        if (not self._backlog or self.flush()) and self._write(frame):
            return True
        has_begun = self._written and not self._backlog  # then it must go on, whatever the bound says
        if self._backlog_bytes + len(frame) > self._max_backlog_bytes and not has_begun:
            self.dropped += 1
            return False
        self._backlog.append(frame)
        self._backlog_bytes += len(frame)
        return True

    def flush(self) -> bool:
        """Send what was kept; tries to connect where there is no connection. True when nothing is left."""
        backlog = self._backlog
        while backlog:
            if not self._write(backlog[0]):
                return False
            self._backlog_bytes -= len(backlog.popleft())
        if self._is_watched and self._socket is not None:
            self._is_watched = False
            self._poller.forget(self._socket.fileno())
        return True

    def _write(self, frame: bytes | bytearray) -> bool:
        """Write what is missing of the frame whose turn it is. True when it has left as a whole."""
        connection = self._socket or self._connect()
        if connection is None:
            return False
        try:
            if self._written < _LENGTH.size:
                head = _LENGTH.pack(len(frame))[self._written :]
                self._written += connection.sendmsg((head, frame), (), socket.MSG_NOSIGNAL)
            else:
                with memoryview(frame) as whole:
                    rest = whole[self._written - _LENGTH.size :]
                    self._written += connection.send(rest, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            pass
        except OSError:  # the peer is gone. Should it be there again, the frame begins anew
            self._disconnect()
            return False
        if self._written == _LENGTH.size + len(frame):
            self._written = 0
            return True
        if not self._is_watched:
            self._is_watched = True
            self._poller.watch(connection.fileno(), self.flush, for_writing=True)
        return False

    def _connect(self) -> socket.socket | None:
        connection: socket.socket | None = None
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            connection.connect(self._path)
        except OSError:  # not there yet, or not any more, or no descriptor is left: the next `flush` tries again
            if connection is not None:
                connection.close()
            self._poller.retrying.add(self)
            return None
        self._poller.retrying.discard(self)
        self._socket = connection
        return connection

    def _disconnect(self) -> None:
        if self._socket is not None:
            if self._is_watched:
                self._poller.forget(self._socket.fileno())
            self._socket.close()
        self._socket = None
        self._is_watched = False
        self._written = 0

    @property
    def backlog_bytes(self) -> int:
        """Bytes kept back because the peer does not take them now."""
        return self._backlog_bytes

    def close(self) -> None:
        """Close; what was kept is discarded and counted as dropped."""
        self.dropped += len(self._backlog)
        self._backlog.clear()
        self._backlog_bytes = 0
        self._poller.retrying.discard(self)
        self._disconnect()


class Transport:
    """Makes the queues of one process. Tests put a network of their own in its place."""

    def __init__(self) -> None:
        self.poller = Poller()

    def wait(self, within_s: float) -> None:
        """Sleep until something has arrived or can be sent on, `within_s` seconds at most; then do that."""
        self.poller.wait(within_s)

    def inbox(self, address: str) -> Inbox:
        """Bind the receiving end at `address`. Raises OSError."""
        return Inbox(self.poller, address)

    def outbox(self, address: str) -> Outbox:
        """The sending end to `address`, whether or not anybody is there yet."""
        return Outbox(self.poller, address)


def _path_of(address: str) -> Path:
    return Path(address.removeprefix("ipc://"))
