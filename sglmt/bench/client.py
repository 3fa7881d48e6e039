"""An asyncio client of OpenAI-compatible servers that notes when every token arrives. Runs in the benchmarks.

One `Connection` is one keep-alive connection with one request at a time; it opens itself on the first request and
again after the server closed it. Bytes are parsed as they arrive (httptools), events as they are complete.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from sglmt.errors import ConfigError, SglmtError

CONNECT_WITHIN_S = 10.0


@dataclass(frozen=True)
class Target:
    """A server: where it listens, the path its API begins with, and what every request carries."""

    host: str
    port: int
    tls: bool = False
    base_path: str = ""
    api_key: str | None = None

    @classmethod
    def of_url(cls, url: str, api_key: str | None = None) -> Target:
        """The target of `http(s)://host[:port][/path]`; a path ending in /v1 is taken for the API's own.

        Raises ConfigError for any other URL.
        """
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"{url!r} is not the URL of a server; give something like http://127.0.0.1:30000")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, path, api_key)

    def head(self, method: str, path: str, length: int) -> bytes:
        """Request line and headers."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"{method} {self.base_path}{path} HTTP/1.1",
            f"host: {host}:{self.port}",
            "content-type: application/json",
            "accept: */*",
            f"content-length: {length}",
        ]
        if self.api_key is not None:
            lines.append(f"authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode()


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None

    def content(self) -> str:
        """Whatever text this choice brings."""
        part = self.delta or self.message
        return self.text or (part and (part.content or part.reasoning_content)) or ""


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass
class Answer:
    """One answer and its times, in seconds after the request was sent."""

    status: int = 0
    error: str | None = None
    first_token_s: float = 0.0  # 0: not a stream, or no text came
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    events: int = 0
    text: str = ""
    body: bytes = b""  # of an answer that is not a stream
    prompt_tokens: int | None = None
    completion_tokens: int | None = None

    @property
    def tokens(self) -> int:
        """Output tokens: what the server says, else one an event."""
        return self.completion_tokens if self.completion_tokens is not None else self.events

    def raise_for_failure(self) -> None:
        """Raise SglmtError unless the answer is whole and good."""
        if self.error is not None:
            raise SglmtError(f"a request failed: {self.error}")


class _Reader(asyncio.Protocol):
    """Takes the answer of the request under way."""

    def __init__(self) -> None:
        self._parser: Any = None
        self._done: asyncio.Future[None] | None = None
        self._ends_with_connection = False
        self.answer = Answer()
        self.lost = False
        self.reusable = True

    def begin(self, answer: Answer, stream: bool) -> asyncio.Future[None]:
        """Expect one answer; the future completes with its last byte."""
        self.answer = answer
        self._stream = stream
        self._sent_s = time.perf_counter()
        self._last_s = 0.0
        self._body = bytearray()
        self._texts: list[str] = []
        self._events = False
        self._ends_with_connection = True
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        return self._done

    def data_received(self, data: bytes) -> None:
        """From the transport."""
        self._now_s = time.perf_counter() - self._sent_s
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, AttributeError) as error:
            self._finish(f"not an HTTP answer: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        """From the parser."""
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        """From the parser."""
        self.answer.status = self._parser.get_status_code()
        self.reusable = self._parser.should_keep_alive()
        self._events = self._stream and self.answer.status == 200

    def on_body(self, body: bytes) -> None:
        """From the parser: a part of the body."""
        self._body += body
        if not self._events:
            return
        *complete, rest = bytes(self._body).split(b"\n\n")
        self._body[:] = rest
        for event in complete:
            self._take_event(event)

    def _take_event(self, event: bytes) -> None:
        data = event.lstrip().removeprefix(b"data:").strip()
        if not event.lstrip().startswith(b"data:") or data == b"[DONE]":
            return
        self._take(data)

    def _take(self, data: bytes) -> None:
        answer = self.answer
        try:
            decoded = _decode_event(data)
        except msgspec.MsgspecError as error:
            answer.error = answer.error or f"not an answer of this API: {error}"
            return
        if decoded.error:
            answer.error = f"{decoded.error}"
        if decoded.usage is not None:
            answer.prompt_tokens = decoded.usage.prompt_tokens
            answer.completion_tokens = decoded.usage.completion_tokens
        text = "".join([choice.content() for choice in decoded.choices])
        if not text:
            return
        self._texts.append(text)
        answer.events += 1
        if answer.events == 1:
            answer.first_token_s = self._now_s
        else:
            answer.gaps_s.append(self._now_s - self._last_s)
        self._last_s = self._now_s

    def on_message_complete(self) -> None:
        """From the parser."""
        if self.answer.status != 200:
            self._finish(f"HTTP {self.answer.status}: {bytes(self._body[:300]).decode(errors='replace')}")
            return
        if not self._stream:
            self.answer.body = bytes(self._body)
            self._take(self.answer.body)
            self.answer.first_token_s = 0.0  # nobody can tell when it was made
        self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """From the transport."""
        self.lost = True
        if exc is None and self.answer.status and self._ends_with_connection:
            self.on_message_complete()
        self._finish("the connection broke before the answer was complete")

    def _finish(self, error: str | None) -> None:
        if self._done is None or self._done.done():
            return
        answer = self.answer
        answer.error = answer.error or error
        answer.total_s = time.perf_counter() - self._sent_s
        answer.text = "".join(self._texts)
        self._done.set_result(None)


class Connection:
    """One keep-alive connection, opened when it is needed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._reader: _Reader | None = None
        self._transport: asyncio.WriteTransport | None = None

    async def request(self, path: str, body: bytes, stream: bool, method: str = "POST") -> Answer:
        """Send one request and wait for the end of its answer. Failures are told in the answer."""
        answer = Answer()
        try:
            reader, transport = await self._open()
        except (OSError, TimeoutError) as error:
            answer.error = f"cannot connect to {self._target.host}:{self._target.port}: {error or 'timed out'}"
            return answer
        done = reader.begin(answer, stream)
        transport.write(self._target.head(method, path, len(body)) + body)
        try:
            await done
        except asyncio.CancelledError:
            self.close()
            raise
        if reader.lost or not reader.reusable:
            self.close()
        return answer

    async def get(self, path: str) -> bytes:
        """The body of a GET. Raises SglmtError, naming the path, when it is not answered with 200."""
        answer = await self.request(path, b"", stream=False, method="GET")
        if answer.status != 200:
            raise SglmtError(f"GET {path}: {answer.error}")
        return answer.body

    async def _open(self) -> tuple[_Reader, asyncio.WriteTransport]:
        if self._reader is not None and self._transport is not None and not self._reader.lost:
            return self._reader, self._transport
        target = self._target
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_WITHIN_S):
            transport, reader = await loop.create_connection(
                _Reader, target.host, target.port, ssl=ssl.create_default_context() if target.tls else None
            )
        self._transport, self._reader = transport, reader
        return reader, transport

    def close(self) -> None:
        """Close; the next request opens it again."""
        if self._transport is not None:
            self._transport.close()
        self._reader = self._transport = None
