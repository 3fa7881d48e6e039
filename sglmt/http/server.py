"""The HTTP server of one worker: uvicorn's protocol over connections this process accepts itself.

The listening socket belongs to the supervisor and is inherited. A worker accepts one connection at a time, and
only while it holds no more than the mean of all workers plus two (read from the state page), so that bursts of
keep-alive connections spread. `Connection` is uvicorn's httptools protocol with requests of our own
(`Exchange`), plus what our streams need to know: that the client left, and when a full write buffer has drained.
Once a second every connection is looked at: one that has been idle for too long is closed, one whose request's
headers do not come to an end gets 408.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import select
import socket
import ssl
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from email.utils import formatdate
from typing import Any, Protocol
from urllib.parse import unquote

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from sglmt.http.access import is_websocket
from sglmt.http.errors import ApiError, bad_request, error_body, headers_too_large, slow_request
from sglmt.http.exchange import Exchange

RETRY_ACCEPT_S = 0.003
RETRY_EXHAUSTED_S = 0.1
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
HANDSHAKE_WITHIN_S = 10.0
MAX_HEADER_BYTES = 64 * 1024
ACCEPT_AHEAD_OF_MEAN = 2
RECENT_AHEAD_OF_MEAN = 3
OTHERS_CHANCE_S = 0.01


class ConnectionListener(Protocol):
    """Something that runs on a connection and must hear of its fate."""

    def connection_lost(self) -> None:
        """The client is gone."""

    def can_write(self) -> None:
        """The write buffer has drained."""


class Connection(HttpToolsProtocol):
    """One client connection. Requests on it are answered in order: those that come early wait."""

    cycle: Exchange | None  # type: ignore[assignment]

    def __init__(self, server: HttpServer, accepted: socket.socket, plain: bool) -> None:
        """`accepted` is the connection's own socket, which the transport owns and closes; `plain`: no TLS on it."""
        super().__init__(server.config, server.state, {}, server.loop)
        self._server = server
        self._waiting: deque[Exchange] = deque()
        self.send_straight = accepted.send  # for `write_straight`, and who follows its rules
        self._plain = plain
        self.listeners: set[ConnectionListener] = set()
        self.was_made = False
        self.client_left = False
        self._idle_since_s = server.loop.time()
        self._head_since_s: float | None = None  # a request's headers are on their way since
        self._heads_begun = 0
        self._head_bytes = 0
        self._head_is_over = False
        self._framing_bytes = 0  # of the body that is coming: what came since its last part

    @property
    def write_paused(self) -> bool:
        """Whether the client reads slower than we write."""
        return self.flow.write_paused

    def write_straight(self, data: bytes) -> bool:
        """Send on the socket itself, without the transport's bookkeeping; the transport takes what does not fit.

        Only for who has seen `nothing_waits` and is the only writer since. False: from now on something waits.
        """
        try:
            sent = self.send_straight(data)
        except OSError:  # full, or broken: the transport knows what to do
            sent = 0
        if sent == len(data):
            return True
        self.transport.write(data[sent:])
        return False

    @property
    def nothing_waits(self) -> bool:
        """Whether `write_straight` may be used: plain TCP, and all that was written has left."""
        return self._plain and not self.transport.get_write_buffer_size() and not self.transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send, behind whatever waits."""
        if self.nothing_waits:
            self.write_straight(data)
        else:
            self.transport.write(data)

    @property
    def is_lost(self) -> bool:
        """Whether the client is gone."""
        return self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.was_made = True

    @property
    def date_line(self) -> bytes:
        """The Date header of an answer that is sent now."""
        return self._server.date_line

    @property
    def is_leaving(self) -> bool:
        """Whether the next answer is the last on its connection: this worker takes no more requests."""
        return self._server.is_leaving

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        was_idle = self.cycle is None or not self.cycle.more_body
        begun = self._heads_begun
        self._framing_bytes += len(data)  # a part of a body makes it 0 again
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("the request is not valid HTTP/1.1")
        if self._head_since_s is not None:
            if self._heads_begun == begun or (was_idle and self._heads_begun == begun + 1):
                self._head_bytes += len(data)  # else some of it was a body, or another request
            if self._head_bytes > MAX_HEADER_BYTES:
                self._refuse(headers_too_large(MAX_HEADER_BYTES), b"431 Request Header Fields Too Large")
        elif self._framing_bytes > MAX_HEADER_BYTES and self.cycle is not None and self.cycle.more_body:
            self.send_400_response("the body's chunk extensions or trailers do not end")

    # what the parser finds

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._head_since_s = self._server.loop.time()
        self._heads_begun += 1
        self._head_bytes = 0
        self._head_is_over = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or behind the body a trailer, of which nobody here wants to know."""
        if not self._head_is_over:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer, or wait behind the request before this one."""
        self._head_since_s = None
        self._head_is_over = True
        self._framing_bytes = 0
        if self._offers_upgrade():
            return
        parser, before = self.parser, self.cycle
        self.cycle = Exchange(
            self,
            parser.get_method().decode("ascii"),
            path_of(self.url),
            self.headers,
            # What follows a request to upgrade is not HTTP, or its body: nothing is read of it as a request.
            keep_alive=parser.get_http_version() != "1.0"
            and parser.should_keep_alive()
            and not parser.should_upgrade(),
            expects=self.expect_100_continue,
        )
        if before is None or before.response_complete:
            self._server.begin(self.cycle)
        else:
            self.flow.pause_reading()
            self._waiting.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        exchange = self.cycle
        if exchange is None or exchange.response_complete:
            return
        exchange.feed(body)
        if exchange.size > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        exchange = self.cycle
        if exchange is not None and not exchange.response_complete and not self._offers_upgrade():
            exchange.feed_end()

    def on_response_complete(self) -> None:
        """The answer has been sent: the next request's turn."""
        self._idle_since_s = self._server.loop.time()
        if self.transport.is_closing():
            return
        if self._waiting:  # as long as requests wait no others are read
            self._server.begin(self._waiting.popleft())
        else:
            self.flow.resume_reading()

    def _offers_upgrade(self) -> bool:
        """Whether the request would also be content with another protocol, such as HTTP/2: it gets HTTP/1.1."""
        parser = self.parser
        return parser.should_upgrade() and parser.get_method() != b"CONNECT" and not is_websocket(self.headers)

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Read a request that offers an upgrade as if it did not: the parser takes its body for the other protocol."""
        if not self._offers_upgrade():
            return
        dropped = (b"upgrade", b"connection", b"http2-settings")
        version = self.parser.get_http_version().encode()
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in self.headers:
            if name not in dropped:
                head += [name, b": ", value, b"\r\n"]
            elif name == b"connection" and b"close" in value.lower():
                head.append(b"connection: close\r\n")
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join([*head, b"\r\n", rest]))

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def end_if_overdue(self, now_s: float) -> None:
        """Close what has been idle for too long; refuse headers that do not come to an end. `now_s`: the loop's."""
        if not self._is_between_requests or self.transport.is_closing():
            return
        if self._head_since_s is not None:
            limit_s = self._server.receive_timeout_s
            if now_s - max(self._head_since_s, self._idle_since_s) > limit_s:
                self._refuse(slow_request(limit_s, "headers"), b"408 Request Timeout")
        elif now_s - self._idle_since_s > self._server.keep_alive_s:
            self.transport.close()

    def end_if_quiet(self, now_s: float, since_s: float, quiet_s: float) -> None:
        """Close what has had no request for `quiet_s`, counted from `since_s` at the earliest. Times are the loop's."""
        is_waiting = self._is_between_requests and self._head_since_s is None and not self.transport.is_closing()
        if is_waiting and now_s - max(self._idle_since_s, since_s) >= quiet_s and not self._has_unread():
            self.transport.close()

    def _has_unread(self) -> bool:
        """Whether something has arrived that this process has not come to read: it may have stood still for long."""
        poller = select.poll()
        poller.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poller.poll(0))

    def connection_lost(self, exc: Exception | None) -> None:
        self.client_left = True
        exchange, self.cycle = self.cycle, None
        super().connection_lost(exc)
        if exchange is not None:
            exchange.wake()
        self._server.connection_closed()
        for listener in list(self.listeners):
            listener.connection_lost()

    def resume_writing(self) -> None:
        super().resume_writing()
        for listener in list(self.listeners):
            listener.can_write()

    def send_400_response(self, msg: str) -> None:
        self._refuse(bad_request(msg), b"400 Bad Request")

    def _refuse(self, error: ApiError, status_line: bytes) -> None:
        """Answer what never became a request, and close."""
        self._head_since_s = None
        self._server.count_refusal()
        body = error_body(error, "openai")
        if not self._is_between_requests:  # junk behind a request that runs: its answer cannot go on honestly
            self.transport.close()
            return
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (status_line, len(body), body)
        )
        self.transport.close()


def path_of(url: bytes) -> str:
    """The decoded path of a request's target. Raises HttpParserError for one without a path."""
    raw = httptools.parse_url(url).path
    if raw is None:
        raise httptools.HttpParserError("the request's target has no path")
    path: str = raw.decode("ascii")
    return unquote(path) if "%" in path else path


class HttpServer:
    """Accepts connections from the inherited socket while this worker's share allows."""

    def __init__(
        self,
        app: Callable[[Exchange], Awaitable[None]],
        listener: socket.socket,
        *,
        keep_alive_s: float,
        receive_timeout_s: float,
        connection_counts: Callable[[], Iterable[int]],
        count_changed: Callable[[int, int], None],
        count_refusal: Callable[[], None],
        recent_accepts: Callable[[], tuple[int, float]] = lambda: (0, 0.0),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`connection_counts` gives the open connections of all serving workers, this one included;
        `count_changed(open, accepted in all)` is told this worker's, `count_refusal` of what never became a request;
        `recent_accepts` gives this worker's accepts in the last moments and the mean of all."""
        self.loop = asyncio.get_running_loop()
        self.keep_alive_s = keep_alive_s
        self.receive_timeout_s = receive_timeout_s
        self._tls = tls
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what clients send wrongly is no news
        self.config = Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            interface="asgi3",
        )
        self.config.load()
        self.state = ServerState()
        self._app = app
        self._running: dict[Exchange, asyncio.Task[None]] = {}
        self.date_line = b""
        self._leaving_since_s: float | None = None
        self.tick()
        self._listener = listener
        self._connection_counts = connection_counts
        self._count_changed = count_changed
        self._recent_accepts = recent_accepts
        self.count_refusal = count_refusal
        self._open = 0
        self._accepted = 0
        self._accepting = False
        self._waiting = False
        self._held_back_since_s: float | None = None
        self._handovers: set[asyncio.Task[Any]] = set()

    def tick(self) -> None:
        """Once a second: the Date header, and connections that have been silent for too long."""
        self.date_line = b"date: %b\r\n" % formatdate(usegmt=True).encode()
        now_s = self.loop.time()
        for connection in list(self.state.connections):
            connection.end_if_overdue(now_s)  # type: ignore[union-attr]

    def start_accepting(self) -> None:
        """Begin to take connections (the supervisor makes the socket listen)."""
        if self._accepting:
            return
        self._listener.setblocking(False)
        self._accepting = True
        self.loop.add_reader(self._listener.fileno(), self._accept_one)

    def stop_accepting(self) -> None:
        """Take no more connections."""
        if self._accepting:
            self._accepting = False
            self.loop.remove_reader(self._listener.fileno())

    def leave(self) -> None:
        """Take no more connections and move clients over: the next answer on each connection closes it."""
        self.stop_accepting()
        if self._leaving_since_s is None:
            self._leaving_since_s = self.loop.time()

    @property
    def is_leaving(self) -> bool:
        """Whether clients are being moved over."""
        return self._leaving_since_s is not None

    def begin(self, exchange: Exchange) -> None:
        """Have a request answered."""
        self._running[exchange] = self.loop.create_task(self._answer(exchange))

    async def _answer(self, exchange: Exchange) -> None:
        """The app answers; a connection that is left without a whole answer is closed."""
        try:
            await self._app(exchange)
        except Exception:  # the app answers its own faults: this is one in doing so
            traceback.print_exc()
        finally:
            del self._running[exchange]
            if not exchange.response_complete:
                exchange.connection.transport.close()

    def close_quiet(self, quiet_s: float) -> None:
        """While leaving: close connections on which no request has come for `quiet_s`. One that has just been
        opened, or whose client is about to use it again, is not closed under its request."""
        now_s = self.loop.time()
        if self._leaving_since_s is not None:
            for connection in list(self.state.connections):
                connection.end_if_quiet(now_s, self._leaving_since_s, quiet_s)  # type: ignore[union-attr]

    def close_idle(self) -> None:
        """Close connections without a request; the others close after their answer."""
        for connection in list(self.state.connections):
            connection.shutdown()

    @property
    def open_connections(self) -> int:
        """Connections this worker holds."""
        return self._open

    def connection_closed(self) -> None:
        """A connection is gone."""
        self._open -= 1
        self._count_changed(self._open, self._accepted)

    def _accept_one(self) -> None:
        if not self._has_room():
            self._pause_accepting()
            return
        self._held_back_since_s = None
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # another worker was faster, or the client left again
            if error.errno in _EXHAUSTED:
                self._pause_accepting(RETRY_EXHAUSTED_S)
            return
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open += 1
        self._accepted += 1
        self._count_changed(self._open, self._accepted)
        task = self.loop.create_task(self._hand_over(connection))
        self._handovers.add(task)
        task.add_done_callback(self._handovers.discard)

    async def _hand_over(self, connection: socket.socket) -> None:
        """Start the protocol of an accepted connection (it is counted already), after the handshake where TLS is on."""
        protocol = Connection(self, connection, plain=self._tls is None)
        patience_s = None if self._tls is None else HANDSHAKE_WITHIN_S
        try:
            await self.loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=self._tls, ssl_handshake_timeout=patience_s
            )
        except OSError:  # the client left, or spoke something else than TLS
            if not protocol.was_made:
                connection.close()
                self.connection_closed()

    def _has_room(self) -> bool:
        """Whether this worker is not ahead of the others, in open connections and in those it has just accepted; or
        the others were given their chance and did not take it (one that is stopped or busy must hold up nobody)."""
        now_s = self.loop.time()
        if self._held_back_since_s is not None and now_s - self._held_back_since_s >= OTHERS_CHANCE_S:
            return True
        counts = list(self._connection_counts())
        if self._open * len(counts) > sum(counts) + ACCEPT_AHEAD_OF_MEAN * len(counts):
            return False
        own, mean = self._recent_accepts()
        return own <= mean + RECENT_AHEAD_OF_MEAN

    def _pause_accepting(self, for_s: float = RETRY_ACCEPT_S) -> None:
        """The others are to take this one; look again soon (the socket stays readable until someone does)."""
        if self._held_back_since_s is None:
            self._held_back_since_s = self.loop.time()
        self.loop.remove_reader(self._listener.fileno())
        self.loop.call_later(for_s, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if self._accepting:
            self.loop.add_reader(self._listener.fileno(), self._accept_one)
