"""The control socket of one instance. Runs in the supervisor's event loop; owns the socket and its clients.

Clients are commands of the same user (or root): the socket is created under a umask that lets nobody else in,
and the kernel's word on the peer's uid is checked besides. A client that sends garbage, never reads or never
asks costs itself only: lines, connections and buffers are bounded and every read and write has a limit in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import socket
import struct
from pathlib import Path

import msgspec

from sglmt.control.commands import Context, Subscribe, decode_command
from sglmt.control.protocol import (
    MAX_REQUEST_BYTES,
    ControlError,
    Event,
    Reply,
    Request,
    encode_line,
)
from sglmt.errors import ResourceError, SglmtError
from sglmt.supervisor.logs import LogLine, matches_source

MAX_CLIENTS = 64
IDLE_LIMIT_S = 30.0
WRITE_LIMIT_S = 10.0
SUBSCRIBER_BUFFER_BYTES = 1024 * 1024
MAX_SOCKET_PATH_BYTES = 107
_MIN_SNAPSHOT_EVERY_S = 0.1
TRUSTED_UIDS = frozenset({0})  # besides our own
_UCRED = struct.Struct("3i")


class ControlServer:
    """Listens on `path` from `start` to `close`."""

    def __init__(self, path: Path, context: Context) -> None:
        self._path = path
        self._context = context
        self._server: asyncio.Server | None = None
        self.clients: set[asyncio.Task[None]] = set()
        self.subscriptions = 0  # ever taken

    async def start(self) -> None:
        """Create the socket and answer from now on. Raises ResourceError, naming the path."""
        listener = _bind(self._path)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=MAX_REQUEST_BYTES)

    async def close(self) -> None:
        """Stop listening, remove the socket file, end every connection."""
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)
        for client in list(self.clients):
            client.cancel()
        await asyncio.gather(*self.clients, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self.clients) >= MAX_CLIENTS or not _is_allowed(writer):
            writer.transport.abort()
            return
        self.clients.add(task)
        try:
            await self._answer(reader, writer)
        except (OSError, TimeoutError):
            pass  # the client left, or does not read: its loss
        except asyncio.CancelledError:
            pass  # close() ends this connection
        finally:
            self.clients.discard(task)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                async with asyncio.timeout(IDLE_LIMIT_S):
                    line = await reader.readline()
            except ValueError:  # StreamReader's word for a line beyond its limit
                error = f"a request line may have {MAX_REQUEST_BYTES} bytes"
                await _send(writer, encode_line(Reply(ok=False, error=error, exit_code=1)))
                return
            if not line.endswith(b"\n"):
                return
            reply = await self._execute(line)
            if isinstance(reply, Subscribe):
                await self._stream(reply, reader, writer)
                return
            await _send(writer, encode_line(reply))

    async def _execute(self, line: bytes) -> Reply | Subscribe:
        try:
            request = msgspec.json.decode(line, type=Request)
            command = decode_command(request.command, request.args)
            if isinstance(command, Subscribe):
                return command
            result = command.execute(self._context)
            return self._reply(await result if inspect.isawaitable(result) else result)
        except msgspec.MsgspecError as error:
            refusal: SglmtError = ControlError(f"not a request: {error}")
        except SglmtError as error:
            refusal = error
        return Reply(ok=False, error=str(refusal), exit_code=int(refusal.exit_code))

    @staticmethod
    def _reply(result: object) -> Reply:
        return Reply(ok=True, result=result)

    async def _stream(self, wanted: Subscribe, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send events until the client closes its end. A slow reader loses lines, never makes others wait."""
        self.subscriptions += 1
        feed = _Feed(writer, wanted.source)
        if wanted.logs:
            for line in self._context.logs.recent(max(0, wanted.backlog), wanted.source):
                feed.log(line)
        unsubscribe = self._context.logs.subscribe(feed.log) if wanted.logs else None
        every_s = max(wanted.snapshot_every_s, _MIN_SNAPSHOT_EVERY_S) if wanted.snapshot_every_s else None
        closed = asyncio.ensure_future(reader.read(1))
        try:
            while not closed.done():
                if every_s is not None:
                    feed.send(Event(snapshot=self._context.instance.snapshot()))
                await asyncio.wait({closed}, timeout=every_s)
        finally:
            closed.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await closed
            if unsubscribe is not None:
                unsubscribe()


class _Feed:
    """One subscriber's end: never waits, counts what its reader was too slow for."""

    def __init__(self, writer: asyncio.StreamWriter, source: str | None) -> None:
        self._writer = writer
        self._source = source
        self._lost = 0

    def log(self, line: LogLine) -> None:
        """Send a line of the wanted source."""
        if matches_source(line.source, self._source) and not self.send(Event(log=line)):
            self._lost += 1

    def send(self, event: Event) -> bool:
        """False when the buffer is full and the event was dropped."""
        transport = self._writer.transport
        if transport.is_closing() or transport.get_write_buffer_size() > SUBSCRIBER_BUFFER_BYTES:
            return False
        if self._lost:
            self._writer.write(encode_line(Event(lost=self._lost)))
            self._lost = 0
        self._writer.write(encode_line(event))
        return True


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    async with asyncio.timeout(WRITE_LIMIT_S):
        await writer.drain()


def _bind(path: Path) -> socket.socket:
    """A listening-to-be socket at `path`, mode 0600 from its first moment; a file of an earlier life is replaced."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ResourceError(
            f"control socket {path}: {len(os.fsencode(path))} bytes, a socket path may have "
            f"{MAX_SOCKET_PATH_BYTES}; choose a shorter --runtime-dir"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    umask = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        listener.bind(os.fspath(path))
    except OSError as error:
        listener.close()
        raise ResourceError(f"control socket {path}: {error.strerror}") from error
    finally:
        os.umask(umask)
    listener.setblocking(False)
    return listener


def _is_allowed(writer: asyncio.StreamWriter) -> bool:
    """The kernel's word on who is at the other end: ourselves or root."""
    connection = writer.get_extra_info("socket")
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _pid, uid, _gid = _UCRED.unpack(packed)
    return uid == os.getuid() or uid in TRUSTED_UIDS
