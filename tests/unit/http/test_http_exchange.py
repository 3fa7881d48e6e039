"""Bytes in, bytes out of one connection: order, framing, bodies in parts, clients that leave. No sockets."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from sglmt.http.exchange import Exchange
from sglmt.http.server import Connection, HttpServer

App = Callable[[Exchange], Awaitable[None]]
DATE = b"date: today\r\n"
OK = b"HTTP/1.1 200 OK\r\n" + DATE


class Client:
    """The other end of a connection: a transport and a socket that keep what is written."""

    def __init__(self, app: App) -> None:
        self.writes: list[bytes] = []
        self.closed = False
        self.reading = True
        self.server = _server(app)
        self.connection = Connection(self.server, SimpleNamespace(send=self._send), plain=True)  # type: ignore[arg-type]
        self.connection.connection_made(self)  # type: ignore[arg-type]

    def _send(self, data: bytes) -> int:
        self.writes.append(data)
        return len(data)

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    @property
    def written(self) -> bytes:
        return b"".join(self.writes)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> Any:
        return None

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    async def send(self, *parts: bytes) -> bytes:
        """What is written after each part has been taken."""
        for part in parts:
            self.connection.data_received(part)
            await settle()
        return self.written

    async def leave(self) -> None:
        self.closed = True
        self.connection.connection_lost(ConnectionResetError())
        await settle()


def _server(app: App) -> HttpServer:
    server = object.__new__(HttpServer)  # one that accepts nothing
    server.loop = asyncio.get_running_loop()
    server.config = Config(lambda: None, http=Connection, ws="none", lifespan="off", log_config=None)
    server.config.load()
    server.state = ServerState()
    server.date_line = DATE
    server._app = app
    server._running = {}
    server._leaving_since_s = None
    server.connection_closed = lambda: None  # type: ignore[method-assign]
    server.count_refusal = lambda: None
    return server


async def settle() -> None:
    """Everything that can run has run."""
    for _ in range(10):
        await asyncio.sleep(0)


async def echo(exchange: Exchange) -> None:
    """Answers with method, path and body."""
    while not exchange.has_arrived:
        await exchange.arrival()
    body = b"%b %b %b" % (exchange.method.encode(), exchange.path.encode(), exchange.body())
    await exchange.answer(200, [(b"content-length", b"%d" % len(body))], body)


def talk(app: App, *parts: bytes) -> tuple[bytes, bool]:
    """(what is written, whether the connection was closed)."""

    async def body() -> tuple[bytes, bool]:
        client = Client(app)
        return await client.send(*parts), client.closed

    return asyncio.run(body())


def request(method: bytes, path: bytes, body: bytes = b"", *headers: bytes, version: bytes = b"1.1") -> bytes:
    lines = [b"%b %b HTTP/%b" % (method, path, version), b"host: x", *headers, b"content-length: %d" % len(body)]
    return b"\r\n".join([*lines, b"", body])


def answered(text: bytes, closing: bytes = b"") -> bytes:
    return OK + b"content-length: %d\r\n%b\r\n%b" % (len(text), closing, text)


CLOSE = b"connection: close\r\n"


@pytest.mark.parametrize(
    ("sent", "written", "closes"),
    [
        (request(b"POST", b"/a%20b?c=d", b"xyz"), answered(b"POST /a b xyz"), False),
        (request(b"POST", b"/", b"x", b"connection: close"), answered(b"POST / x", CLOSE), True),
        (request(b"POST", b"/", b"x", version=b"1.0"), answered(b"POST / x", CLOSE), True),
        (request(b"HEAD", b"/"), OK + b"content-length: 7\r\n\r\n", False),
        (
            request(b"POST", b"/1", b"a") + request(b"POST", b"/2", b"b") + request(b"POST", b"/3", b"c"),
            answered(b"POST /1 a") + answered(b"POST /2 b") + answered(b"POST /3 c"),
            False,
        ),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n0\r\n\r\n",
            answered(b"POST / abc"),
            False,
        ),
        (
            request(b"POST", b"/", b"x", b"expect: 100-continue"),
            b"HTTP/1.1 100 Continue\r\n\r\n" + answered(b"POST / x"),
            False,
        ),
    ],
)
def test_what_is_sent_is_answered_however_it_is_cut(sent: bytes, written: bytes, closes: bool) -> None:
    assert talk(echo, sent) == (written, closes)
    for cut in range(1, len(sent), 7):
        assert talk(echo, sent[:cut], sent[cut:]) == (written, closes)
    assert talk(echo, *(sent[place : place + 1] for place in range(len(sent)))) == (written, closes)


def test_as_long_as_requests_wait_no_others_are_read() -> None:
    """Each read may bring thousands, and each answer takes one away."""

    async def body() -> None:
        client = Client(echo)
        client.connection.data_received(request(b"GET", b"/") * 50)
        assert not client.reading
        while len(client.connection._waiting) > 1:
            assert not client.reading
            await asyncio.sleep(0)
        await settle()
        assert client.reading
        assert client.written.count(b"200 OK") == 50

    asyncio.run(body())


def test_trailers_are_not_headers() -> None:
    seen: list[list[tuple[bytes, bytes]]] = []

    async def app(exchange: Exchange) -> None:
        await echo(exchange)
        seen.append(exchange.headers)

    sent = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\nauthorization: b\r\n\r\n"
    assert talk(app, sent) == (answered(b"POST / a"), False)
    assert [name for name, _ in seen[0]] == [b"host", b"transfer-encoding"]


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n"


@pytest.mark.parametrize(
    ("begin", "endless"),
    [
        (CHUNKED + b"0\r\n", b"a: b\r\n" * 1000),  # trailers
        (CHUNKED + b"0\r\na: ", b"b" * 10_000),  # one trailer
        (CHUNKED + b"1;", b"x" * 10_000),  # a chunk's extension
        (b"GET / HTTP/1.1\r\nhost: x\r\n", b"a: b\r\n" * 1000),
        (request(b"GET", b"/slow") + b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 1000),  # behind a request that runs
    ],
)
def test_what_has_no_end_is_ended(begin: bytes, endless: bytes) -> None:
    async def slow(exchange: Exchange) -> None:
        if exchange.path == "/slow":
            await asyncio.Event().wait()
        await echo(exchange)

    async def body() -> None:
        client = Client(slow)
        await client.send(begin)
        for _ in range(20):
            if not client.closed:
                await client.send(endless)
        assert client.closed
        await client.leave()

    asyncio.run(body())


def test_a_long_body_that_nobody_reads_is_no_long_head() -> None:
    async def refuses(exchange: Exchange) -> None:
        await exchange.answer(401 if exchange.path == "/a" else 200, [(b"content-length", b"0")], b"")

    first = request(b"POST", b"/a", b"x" * 200_000)
    second = request(b"GET", b"/b")
    written, closed = talk(refuses, first[:100], first[100:] + second[:20], second[20:])
    assert written.count(b"HTTP/1.1 ") == 2
    assert b"200 OK" in written
    assert not closed


@pytest.mark.parametrize(
    "head",
    [
        b"POST /x HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\ncontent-length: 30\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
def test_nothing_behind_a_request_to_upgrade_is_a_request(head: bytes) -> None:
    async def refuses(exchange: Exchange) -> None:
        await exchange.answer(421, [(b"content-length", b"0")], b"")

    written, closed = talk(refuses, head, b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n")
    assert closed
    assert written.count(b"HTTP/1.1 ") <= 1


def test_a_body_is_kept_no_longer_than_it_is_needed() -> None:
    async def body() -> None:
        client = Client(echo)
        await client.send(request(b"POST", b"/", b"x" * 1000))
        assert client.connection.cycle is not None
        assert client.connection.cycle._parts == []

    asyncio.run(body())


@pytest.mark.parametrize("target", [b"http://x", b"x:1"])
def test_a_target_without_a_path_is_no_request(target: bytes) -> None:
    written, closed = talk(echo, b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % target)
    assert written.startswith(b"HTTP/1.1 400 ")
    assert closed


def test_a_stream_is_chunked_and_what_goes_with_the_headers_comes_first() -> None:
    async def stream(exchange: Exchange) -> None:
        await exchange.start(200, [(b"a", b"b")], lambda: b"1\r\nx\r\n")
        await exchange.finish(b"end")

    written, closed = talk(stream, request(b"GET", b"/"))
    assert written == OK + b"a: b\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n3\r\nend\r\n0\r\n\r\n"
    assert not closed


def test_an_answer_is_one_write() -> None:
    async def body() -> None:
        client = Client(echo)
        await client.send(request(b"POST", b"/", b"x"))
        assert client.writes == [answered(b"POST / x")]

    asyncio.run(body())


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (404, b"HTTP/1.1 404 Not Found\r\n"),
        (499, b"HTTP/1.1 499 Client Closed Request\r\n"),
        (599, b"HTTP/1.1 599 \r\n"),
    ],
)
def test_every_status_has_its_line(status: int, line: bytes) -> None:
    async def app(exchange: Exchange) -> None:
        await exchange.answer(status, [(b"content-length", b"1")], b"x")

    async def body() -> None:
        assert (await Client(app).send(b"GET / HTTP/1.1\r\n\r\n")).startswith(line)

    asyncio.run(body())


def test_the_last_answer_of_a_worker_that_leaves_closes() -> None:
    async def body() -> None:
        client = Client(echo)
        client.server._leaving_since_s = 0.0
        assert await client.send(request(b"GET", b"/")) == answered(b"GET / ", CLOSE)
        assert client.closed

    asyncio.run(body())


def test_an_app_that_ends_without_an_answer_closes_the_connection(capsys: pytest.CaptureFixture[str]) -> None:
    async def breaks(exchange: Exchange) -> None:
        raise RuntimeError("broken")

    assert talk(breaks, request(b"GET", b"/")) == (b"", True)
    assert "broken" in capsys.readouterr().err


def test_who_waits_for_the_body_hears_that_the_client_has_left() -> None:
    ends: list[str] = []

    async def waits(exchange: Exchange) -> None:
        try:
            await echo(exchange)
        except asyncio.CancelledError:
            ends.append("left")

    async def body() -> None:
        client = Client(waits)
        await client.send(request(b"POST", b"/", b"xyz")[:-1])
        assert not ends
        await client.leave()
        assert ends == ["left"]
        assert client.written == b""
        assert not client.server._running

    asyncio.run(body())


def test_answers_after_the_client_has_left_go_nowhere() -> None:
    async def body() -> None:
        go_on = asyncio.Event()

        async def late(exchange: Exchange) -> None:
            await go_on.wait()
            await exchange.start(200, [], lambda: b"x")
            await exchange.finish(b"y")

        client = Client(late)
        await client.send(request(b"GET", b"/"))
        await client.leave()
        go_on.set()
        await settle()
        assert client.written == b""

    asyncio.run(body())


def test_a_long_body_is_read_as_it_is_taken_and_a_client_that_leaves_is_heard_of_afterwards() -> None:
    async def body() -> None:
        taken = asyncio.Event()
        go_on = asyncio.Event()

        async def slow(exchange: Exchange) -> None:
            await taken.wait()
            while not exchange.has_arrived:
                await exchange.arrival()
            assert len(exchange.body()) == 200_000
            await go_on.wait()
            await exchange.answer(200, [(b"content-length", b"0")], b"")

        client = Client(slow)
        await client.send(request(b"POST", b"/", b"x" * 200_000))
        assert not client.reading
        taken.set()
        await settle()
        assert client.reading
        go_on.set()
        await settle()
        assert client.written.startswith(OK)

    asyncio.run(body())


def test_a_connection_that_is_gone_is_freed_without_the_garbage_collector() -> None:
    async def body() -> None:
        client = Client(echo)
        await client.send(request(b"POST", b"/", b"x"), request(b"POST", b"/", b"x")[:-1])
        await client.leave()
        connection = weakref.ref(client.connection)
        del client.connection  # they hold each other here
        await settle()
        assert connection() is None

    gc.disable()
    try:
        asyncio.run(body())
    finally:
        gc.enable()
