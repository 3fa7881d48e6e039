"""The other end of the control socket: a plain blocking client with deadlines. Runs in every command.

No event loop, no threads, few imports: `sglmt status` has to answer in a blink.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec

from sglmt.control.commands import Command, Subscribe
from sglmt.control.protocol import MAX_REPLY_BYTES, ControlError, Event, RawReply, ServerSideError
from sglmt.errors import DeadlineError, NotRunningError


class ControlClient:
    """One connection to an instance's control socket."""

    def __init__(self, path: Path, deadline_s: float) -> None:
        """Connect. Raises NotRunningError when nobody listens, DeadlineError when nobody accepts."""
        self._path = path
        self._buffer = bytearray()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_left_s(deadline_s))
        try:
            self._connect(os.fspath(path))
        except (TimeoutError, BlockingIOError):
            self._socket.close()
            raise DeadlineError(f"{path}: the supervisor does not answer") from None
        except OSError as error:
            self._socket.close()
            raise NotRunningError(f"{path}: nobody answers ({error.strerror or error})") from None

    def _connect(self, path: str) -> None:
        self._socket.connect(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def call(self, command: Command, deadline_s: float) -> Any:
        """Send one command and return its result, decoded to the command's `result_type`.

        Raises ServerSideError (refused), DeadlineError, NotRunningError (the other side went away) or
        ControlError (it does not speak this protocol).
        """
        self._send(command, deadline_s)
        line = self._line(deadline_s)
        if line is None:
            raise NotRunningError(f"{self._path}: the supervisor ended the connection")
        try:
            reply = msgspec.json.decode(line, type=RawReply)
            if reply.ok:
                return msgspec.json.decode(reply.result, type=command.result_type)
        except msgspec.MsgspecError as error:
            raise ControlError(f"{self._path}: not a reply of this version of sglmt: {error}") from error
        raise ServerSideError(reply.error or "refused without a reason", reply.exit_code)

    def events(self, wanted: Subscribe, deadline_s: float, until_s: float | None = None) -> Iterator[Event]:
        """Subscribe (sent by the deadline) and yield events until the instance ends or the caller stops.

        Raises DeadlineError at `until_s`, if one is given.
        """
        self._send(wanted, deadline_s)
        while (line := self._line(until_s)) is not None:
            try:
                yield msgspec.json.decode(line, type=Event)
            except msgspec.MsgspecError as error:
                raise ControlError(f"{self._path}: not an event of this version of sglmt: {error}") from error

    def _send(self, command: Command, deadline_s: float) -> None:
        line = msgspec.json.encode({"command": command.name, "args": command}) + b"\n"
        self._socket.settimeout(_left_s(deadline_s))
        try:
            self._socket.sendall(line)
        except TimeoutError:
            raise DeadlineError(f"{self._path}: the supervisor does not read") from None
        except OSError as error:
            raise NotRunningError(f"{self._path}: the supervisor went away ({error.strerror})") from None

    def _line(self, deadline_s: float | None) -> bytes | None:
        """The next line, without its newline; None at the end. `deadline_s` None: wait as long as it takes."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > MAX_REPLY_BYTES:
                raise ControlError(f"{self._path}: a line of more than {MAX_REPLY_BYTES} bytes")
            self._socket.settimeout(None if deadline_s is None else _left_s(deadline_s))
            try:
                part = self._socket.recv(256 * 1024)
            except TimeoutError:
                raise DeadlineError(f"{self._path}: the supervisor does not answer") from None
            except OSError:
                part = b""
            if not part:
                return None
            self._buffer += part
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line


def call(path: Path, command: Command, deadline_s: float) -> Any:
    """One command on a connection of its own. Raises what ControlClient raises."""
    with contextlib.closing(ControlClient(path, deadline_s)) as client:
        return client.call(command, deadline_s)


def _left_s(deadline_s: float) -> float:
    """Seconds until the deadline, never zero (which would mean non-blocking)."""
    return max(0.001, deadline_s - time.monotonic())
