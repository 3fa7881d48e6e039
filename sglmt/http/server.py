"""The HTTP server of one worker: uvicorn's protocol over connections this process accepts itself.

The listening socket belongs to the supervisor and is inherited. A worker accepts one connection at a time, and
only while it holds no more than the mean of all workers plus two (read from the state page), so that bursts of
keep-alive connections spread. `Connection` is uvicorn's httptools protocol plus what our streams need to know:
that the client left, and when a full write buffer has drained.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable
from email.utils import formatdate
from typing import Any, Protocol

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from sglmt.http.errors import bad_request, error_body

RETRY_ACCEPT_S = 0.003
ACCEPT_AHEAD_OF_MEAN = 2


class ConnectionListener(Protocol):
    """Something that runs on a connection and must hear of its fate."""

    def connection_lost(self) -> None:
        """The client is gone."""

    def can_write(self) -> None:
        """The write buffer has drained."""


class Connection(HttpToolsProtocol):
    """One client connection. `scope["state"]["connection"]` of every request on it."""

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server.config, server.state, {"connection": self}, server.loop)
        self._server = server
        self.listeners: set[ConnectionListener] = set()

    @property
    def write_paused(self) -> bool:
        """Whether the client reads slower than we write."""
        return self.flow.write_paused

    @property
    def is_lost(self) -> bool:
        """Whether the client is gone."""
        return self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._server.connection_opened()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server.connection_closed()
        for listener in list(self.listeners):
            listener.connection_lost()

    def resume_writing(self) -> None:
        super().resume_writing()
        for listener in list(self.listeners):
            listener.can_write()

    def send_400_response(self, msg: str) -> None:
        body = error_body(bad_request(msg), "openai")
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()


class HttpServer:
    """Accepts connections from the inherited socket while this worker's share allows."""

    def __init__(
        self,
        app: Callable[..., Any],
        listener: socket.socket,
        *,
        keep_alive_s: int,
        connection_counts: Callable[[], Iterable[int]],
        count_changed: Callable[[int, int], None],
    ) -> None:
        """`connection_counts` gives the open connections of all serving workers, this one included;
        `count_changed(open, accepted in all)` is told this worker's."""
        self.loop = asyncio.get_running_loop()
        self.config = Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=keep_alive_s,
            interface="asgi3",
        )
        self.config.load()
        self.state = ServerState()
        self.tick()
        self._listener = listener
        self._connection_counts = connection_counts
        self._count_changed = count_changed
        self._open = 0
        self._accepted = 0
        self._accepting = False
        self._waiting = False
        self._handovers: set[asyncio.Task[Any]] = set()

    def tick(self) -> None:
        """Once a second: the Date header."""
        self.state.default_headers = [(b"date", formatdate(usegmt=True).encode())]

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

    def close_idle(self) -> None:
        """Close connections without a request; the others close after their answer."""
        for connection in list(self.state.connections):
            connection.shutdown()

    @property
    def open_connections(self) -> int:
        """Connections this worker holds."""
        return self._open

    def connection_opened(self) -> None:
        """A connection's protocol has started (it was counted when it was accepted)."""

    def connection_closed(self) -> None:
        """A connection is gone."""
        self._open -= 1
        self._count_changed(self._open, self._accepted)

    def _accept_one(self) -> None:
        if not self._has_room():
            self._pause_accepting()
            return
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # another worker was faster, or the client left again
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
        try:
            await self.loop.connect_accepted_socket(lambda: Connection(self), connection)
        except OSError:
            connection.close()
            self.connection_closed()

    def _has_room(self) -> bool:
        counts = list(self._connection_counts())
        return not counts or self._open * len(counts) <= sum(counts) + ACCEPT_AHEAD_OF_MEAN * len(counts)

    def _pause_accepting(self) -> None:
        """The others are to take this one; look again soon (the socket stays readable until someone does)."""
        self.loop.remove_reader(self._listener.fileno())
        self.loop.call_later(RETRY_ACCEPT_S, self._resume_accepting)

    def _resume_accepting(self) -> None:
        if self._accepting:
            self.loop.add_reader(self._listener.fileno(), self._accept_one)
