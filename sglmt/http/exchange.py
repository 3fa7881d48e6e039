"""One request and its answer on a connection. Worker process; made by `Connection`, used by the app's `Call`.

It takes the place of uvicorn's request cycle: uvicorn's protocol feeds it, and asks it whether the answer is
complete. What it spares is ASGI's: a message for every step, events and timers that a request whose body came with its
headers has no use for, and checks of header values, which are all made here. An answer is one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglmt.http.server import Connection

HeaderList = list[tuple[bytes, bytes]]

_PHRASES = {status.value: status.phrase for status in HTTPStatus} | {499: "Client Closed Request"}
_STATUS_LINES = {status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode() for status in range(100, 600)}
_BODILESS = (204, 304)
_LAST_CHUNK = b"0\r\n\r\n"


def chunk_of(data: bytes) -> bytes:
    """`data` as one chunk of a body; nothing for no data, which would be the end of it."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


class Exchange:
    """A request as it arrives, and what was sent of its answer.

    `headers` have lower-case names; `size` is how many bytes of the body are here, `more_body` whether others may
    follow; `response_complete`: nothing more is to be sent. When the client has left, whatever is sent goes nowhere,
    silently.
    """

    __slots__ = (
        "_arrival",
        "_expects_continue",
        "_is_chunked",
        "_parts",
        "connection",
        "headers",
        "keep_alive",
        "method",
        "more_body",
        "path",
        "response_complete",
        "size",
    )

    def __init__(
        self, connection: Connection, method: str, path: str, headers: HeaderList, keep_alive: bool, expects: bool
    ) -> None:
        """`expects`: the client waits for `100 Continue` before it sends the body."""
        self.connection = connection
        self.method = method
        self.path = path
        self.headers = headers
        self.keep_alive = keep_alive
        self._expects_continue = expects
        self._parts: list[bytes] = []
        self._arrival: asyncio.Future[None] | None = None
        self._is_chunked = False
        self.size = 0
        self.more_body = True
        self.response_complete = False

    # the body comes in

    def feed(self, part: bytes) -> None:
        """Some of the body."""
        self._parts.append(part)
        self.size += len(part)
        self.wake()

    def feed_end(self) -> None:
        """The body is whole."""
        self.more_body = False
        self.wake()

    def wake(self) -> None:
        """Something has changed for who waits for the body."""
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    @property
    def has_arrived(self) -> bool:
        """Whether the whole body is here, and the client waits for the answer and nothing else."""
        return not (self.more_body or self._expects_continue or self.connection.client_left)

    async def arrival(self) -> None:
        """Wait until there is more of the body, or its end. Raises CancelledError when the client has left."""
        connection = self.connection
        if self._expects_continue and not connection.is_lost:
            connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._expects_continue = False
        connection.flow.resume_reading()
        if self.more_body and not connection.client_left:
            self._arrival = connection.loop.create_future()
            try:
                await self._arrival
            finally:
                self._arrival = None
        if connection.client_left:
            raise asyncio.CancelledError

    def body(self) -> bytes:
        """What is here of the body; it is kept no longer. The connection is read on, to hear of a client that leaves,
        unless other requests wait behind this one."""
        if self.connection.cycle is self:
            self.connection.flow.resume_reading()
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    # the answer goes out

    async def start(self, status: int, headers: HeaderList, first: Callable[[], bytes]) -> None:
        """Send status and headers, and with them what `first` returns, framed as the body is. It is called when they
        can be sent: what it lets go on writes behind them."""
        await self._until_writable()
        if not self.connection.client_left:
            self.connection.write(self._head(status, headers) + first())

    async def finish(self, body: bytes) -> None:
        """Send the last of the body (chunked: or its only part)."""
        await self._until_writable()
        if self.connection.client_left:
            return
        if self._is_chunked:
            body = chunk_of(body) + _LAST_CHUNK
        if body and self.method != "HEAD":
            self.connection.write(body)
        self._complete()

    async def answer(self, status: int, headers: HeaderList, body: bytes) -> None:
        """Send a whole answer in one write; `headers` have its content length."""
        await self._until_writable()
        if self.connection.client_left:
            return
        head = self._head(status, headers)
        self.connection.write(head if self.method == "HEAD" else head + body)
        self._complete()

    async def _until_writable(self) -> None:
        connection = self.connection
        if connection.write_paused and not connection.client_left:
            await connection.flow.drain()

    def _head(self, status: int, headers: HeaderList) -> bytes:
        """Status line and headers. Decides how the body is delimited and whether the connection stays open."""
        lines = [_STATUS_LINES[status], self.connection.date_line]
        is_chunked = self.method != "HEAD" and status not in _BODILESS
        for name, value in headers:
            if name == b"connection":
                self.keep_alive = False  # `close` is all that is ever said of it
                continue
            if name == b"content-length":
                is_chunked = False
            lines.append(b"%b: %b\r\n" % (name, value))
        if is_chunked:
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n" if self.keep_alive and not self.connection.is_leaving else self._closing_line())
        return b"".join(lines)

    def _closing_line(self) -> bytes:
        self.keep_alive = False
        return b"connection: close\r\n\r\n"

    def _complete(self) -> None:
        self.response_complete = True
        if not self.keep_alive:
            self.connection.transport.close()
        self.connection.on_response_complete()
