"""One HTTP request on a connection of its own, as cheap as a client can be. Runs in the chaos command.

What arrives is only collected; it is looked at when the server has closed the connection. So 256 streams cost
their client little more than the kernel's part, and a connection that ends early is told from one that ended well.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import msgspec


class ExchangeError(Exception):
    """The server's answer did not arrive whole."""


class ConnectionFailed(ExchangeError):
    """Refused, reset, or closed before the end of the answer; `doomed`: by the worker that was killed on purpose."""

    def __init__(self, message: str, doomed: bool = False) -> None:
        super().__init__(message)
        self.doomed = doomed


class Hang(ExchangeError):
    """No end of the answer by the deadline."""


@dataclass(frozen=True)
class HttpAnswer:
    """Status and whole body; when its first and its last byte came (monotonic)."""

    status: int
    headers: dict[str, str]
    body: bytes
    first_byte_s: float = 0.0
    last_byte_s: float = 0.0


class Exchange(asyncio.Protocol):
    """Sends one request, collects everything until the connection ends."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: asyncio.Transport | None = None
        self.received = bytearray()
        self.local_port = 0
        self.doomed = False  # the worker at the other end is about to be killed
        self.first_data_s = 0.0
        self.last_data_s = time.monotonic()
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.local_port = int(transport.get_extra_info("sockname")[1])
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.last_data_s = time.monotonic()
        self.first_data_s = self.first_data_s or self.last_data_s

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(exc)

    def abort(self, reset: bool = False) -> None:
        """Drop the connection at once; with `reset` the other side is told by RST."""
        if self._transport is None:
            return
        if reset and not self._transport.is_closing():
            connection = self._transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


class Client:
    """Requests to one server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._host, self._port = parts.hostname, parts.port
        self._open: set[Exchange] = set()
        self._doomed_ports: dict[int, float] = {}

    def doom(self, local_ports: set[int]) -> int:
        """The worker that holds these connections is about to be killed; how many of them are under way."""
        now_s = time.monotonic()
        self._doomed_ports = {port: at_s for port, at_s in self._doomed_ports.items() if now_s - at_s < 1.0}
        self._doomed_ports.update(dict.fromkeys(local_ports, now_s))
        held = [exchange for exchange in self._open if exchange.local_port in local_ports]
        for exchange in held:
            exchange.doomed = True
        return len(held)

    async def post(self, path: str, body: dict[str, object], deadline_s: float) -> HttpAnswer:
        """The answer, by monotonic `deadline_s`. Raises ConnectionFailed or Hang, naming how much had come."""
        return await self.send(self.request("POST", path, msgspec.json.encode(body)), path, deadline_s)

    def request(self, method: str, path: str, payload: bytes, content_type: str = "application/json") -> bytes:
        """The bytes of one request."""
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: {self._host}:{self._port}\r\ncontent-type: {content_type}\r\n"
            f"content-length: {len(payload)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + payload

    async def send(self, request: bytes, what: str, deadline_s: float) -> HttpAnswer:
        """`post`, for the bytes of any request; errors name it by `what`."""
        loop = asyncio.get_running_loop()
        exchange: Exchange | None = None
        try:
            async with asyncio.timeout_at(loop.time() + deadline_s - time.monotonic()):
                _, exchange = await loop.create_connection(lambda: Exchange(request), self._host, self._port)
                self._open.add(exchange)
                # Accepted over there before this loop came to know that it is connected.
                doomed_at_s = self._doomed_ports.get(exchange.local_port)
                exchange.doomed |= doomed_at_s is not None and time.monotonic() - doomed_at_s < 1.0
                error = await exchange.ended
        except TimeoutError:  # an OSError too: it has to come first
            raise Hang(_hang(what, exchange)) from None
        except OSError as failed:
            raise ConnectionFailed(f"{what}: cannot connect: {failed}") from failed
        finally:
            if exchange is not None:
                self._open.discard(exchange)
                exchange.abort()
        answer = parse_answer(bytes(exchange.received), exchange.doomed, error)
        return replace(answer, first_byte_s=exchange.first_data_s, last_byte_s=exchange.last_data_s)

    async def leave(self, request: bytes, after_s: float, reset: bool) -> bytes:
        """Send a request, close the connection after so long; what had come by then. `reset`: with RST, not FIN.

        Raises ConnectionFailed.
        """
        loop = asyncio.get_running_loop()
        try:
            _, exchange = await loop.create_connection(lambda: Exchange(request), self._host, self._port)
        except OSError as failed:
            raise ConnectionFailed(f"cannot connect: {failed}") from failed
        try:
            await asyncio.wait([exchange.ended], timeout=after_s)
        finally:
            exchange.abort(reset)
        return bytes(exchange.received)


def _hang(path: str, exchange: Exchange | None) -> str:
    if exchange is None:
        return f"{path}: no connection by the deadline"
    silent_s = time.monotonic() - exchange.last_data_s
    return f"{path}: no end by the deadline; {len(exchange.received)} bytes came, the last {silent_s:.1f} s ago"


def parse_beginning(data: bytes) -> HttpAnswer | None:
    """What a client that left had of its answer; None when the headers had not come yet."""
    head, separator, rest = data.partition(b"\r\n\r\n")
    if not separator:
        return None
    status, headers = _parse_head(head)
    body = _dechunk(rest)[0] if headers.get("transfer-encoding") == "chunked" else rest
    return HttpAnswer(status, headers, body)


def parse_answer(data: bytes, doomed: bool = False, error: Exception | None = None) -> HttpAnswer:
    """The answer in everything a connection brought. Raises ConnectionFailed when it is cut."""
    head, separator, rest = data.partition(b"\r\n\r\n")
    if not separator:
        raise ConnectionFailed(f"closed after {len(data)} bytes, before the headers ({error})", doomed)
    status, headers = _parse_head(head)
    if headers.get("transfer-encoding") == "chunked":
        body, whole = _dechunk(rest)
    else:
        body, whole = rest, len(rest) == int(headers.get("content-length", len(rest)))
    if not whole:
        raise ConnectionFailed(f"cut after {len(data)} bytes, in the body ({error})", doomed)
    return HttpAnswer(status, headers, body)


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return int(status_line.split()[1]), headers


def _dechunk(data: bytes) -> tuple[bytes, bool]:
    """(body, whether its end was there) of a chunked body."""
    parts: list[bytes] = []
    at = 0
    while (end := data.find(b"\r\n", at)) >= 0:
        size = int(data[at:end], 16)
        if size == 0:
            return b"".join(parts), True
        part = data[end + 2 : end + 2 + size]
        parts.append(part)
        at = end + 2 + size + 2
        if len(part) < size:
            break
    return b"".join(parts), False
