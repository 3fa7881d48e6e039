"""A client that sends any bytes and reads one answer, strictly. No HTTP library: none would send what we send."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from tests.support.fuzz.requests import Request


@dataclass(frozen=True)
class Answer:
    """One answer; `status` 0: the connection ended without one. `took_s` is until its last byte."""

    status: int
    headers: dict[str, str]
    body: bytes
    took_s: float
    problem: str | None = None


class Client:
    """One keep-alive connection at a time, reopened when it was closed."""

    def __init__(self, host: str, port: int, within_s: float) -> None:
        self._address = (host, port)
        self._within_s = within_s
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, request: Request) -> Answer:
        """Send and read. What goes wrong is in `problem`."""
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self._within_s):
                status, headers, body = await self._exchange(request)
        except TimeoutError:
            self.close()
            return Answer(0, {}, b"", time.monotonic() - started_s, "no complete answer in time")
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            self.close()
            return Answer(0, {}, b"", time.monotonic() - started_s, f"{type(error).__name__}: {error}")
        if headers.get("connection") == "close":
            self.close()
        return Answer(status, headers, body, time.monotonic() - started_s)

    async def leave(self, request: Request, share: float) -> None:
        """Send that share of a request and close the connection without reading."""
        self.close()
        data = request.encode()
        try:
            async with asyncio.timeout(self._within_s):
                _, writer = await asyncio.open_connection(*self._address)
                writer.write(data[: int(len(data) * share)])
                await writer.drain()
                writer.close()
        except (OSError, TimeoutError):
            return

    def close(self) -> None:
        """Drop the connection."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def _exchange(self, request: Request) -> tuple[int, dict[str, str], bytes]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._address, limit=2**22)
        self._writer.write(request.encode())
        head = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        version, status = first.split(" ", 2)[:2]
        if version != "HTTP/1.1":
            raise ValueError(f"status line {first!r}")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = b"" if request.method == "HEAD" or status == "204" else await self._body(self._reader, headers)
        return int(status), headers, body

    async def _body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") != "chunked":
            return await reader.readexactly(int(headers["content-length"]))
        parts: list[bytes] = []
        while size := int(await reader.readuntil(b"\r\n"), 16):
            parts.append(await reader.readexactly(size))
            if await reader.readexactly(2) != b"\r\n":
                raise ValueError("a chunk does not end with a line break")
        await reader.readexactly(2)
        return b"".join(parts)
