"""The ASGI application of a worker: routes, body, keys, and errors in each API's shape.

One table of exact paths; a handler gets a `Call` and answers through it. Whatever a handler raises as
`ApiError` becomes that answer; anything else is logged and becomes a 500 that says nothing of our insides.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from sglmt.http.errors import (
    ApiError,
    ApiName,
    body_too_large,
    error_body,
    internal_error,
    method_not_allowed,
    slow_request,
    unavailable,
    unknown_route,
)
from sglmt.http.server import Connection
from sglmt.http.service import Service
from sglmt.ipc.state_page import Slot, SlotWord

Handler = Callable[["Call"], Awaitable[None]]

BODY_TIMEOUT_S = 60.0
_JSON = (b"content-type", b"application/json")


class Call:
    """One HTTP request on its way through a handler."""

    __slots__ = ("_send", "connection", "path", "receive", "scope", "service", "started_s", "status")

    def __init__(self, service: Service, scope: Any, receive: Any, send: Any) -> None:
        self.service = service
        self.scope = scope
        self.path: str = scope["path"]
        self.receive = receive
        self._send = send
        self.connection: Connection = scope["state"]["connection"]
        self.started_s = time.monotonic()
        self.status = 0

    async def body(self) -> bytes:
        """The whole body. Raises ApiError 413, or 408 when it does not arrive in time."""
        limit = self.service.args.max_request_bytes
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit:
            raise body_too_large(limit)
        message = await self.receive()
        if not message.get("more_body"):
            body: bytes = message.get("body", b"")
            if len(body) > limit:
                raise body_too_large(limit)
            return body
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._rest_of_body(message, limit)
        except TimeoutError:
            raise slow_request(BODY_TIMEOUT_S) from None

    async def _rest_of_body(self, message: Any, limit: int) -> bytes:
        parts = [message["body"]]
        size = len(parts[0])
        while message.get("more_body"):
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise body_too_large(limit)
        return b"".join(parts)

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        for header, value in self.scope["headers"]:
            if header == name:
                return bytes(value)
        return None

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send status and headers."""
        self.status = status
        if self.service.is_draining:
            headers = [*headers, (b"connection", b"close")]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def finish(self, body: bytes) -> None:
        """Send the end of the body."""
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def answer(self, body: bytes, status: int = 200, content_type: bytes = b"application/json") -> None:
        """Send a whole answer."""
        await self.start(status, [(b"content-type", content_type), (b"content-length", b"%d" % len(body))])
        await self.finish(body)

    async def answer_error(self, error: ApiError, api: ApiName, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Send an error in the shape of `api`."""
        body = error_body(error, api)
        out = [_JSON, (b"content-length", b"%d" % len(body)), *headers]
        if error.retry_after_s is not None:
            out.append((b"retry-after", b"%d" % error.retry_after_s))
        if error.status in (408, 413):
            out.append((b"connection", b"close"))
        await self.start(error.status, out)
        await self.finish(body)


class App:
    """Routes of one worker. Paths ending in `/*` take one more segment."""

    def __init__(self, service: Service, routes: dict[tuple[str, str], Handler], slot: Slot, log: Any) -> None:
        self._service = service
        self._routes = routes
        self._slot = slot
        self._log: Callable[[str, str], None] = log

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI entry."""
        call = Call(self._service, scope, receive, send)
        slot = self._slot
        slot.add(SlotWord.REQUESTS_TOTAL)
        try:
            await self._dispatch(call, scope["method"])
        except ApiError as error:
            await self._answer_error(call, error)
        except asyncio.CancelledError:
            slot.add(SlotWord.CLIENT_ABORTS)
            self._end_connection(call)
            return
        except Exception:
            self._log("error", f"{call.path}: {traceback.format_exc()}")
            await self._answer_error(call, internal_error())
        if call.status < 400:
            slot.add(SlotWord.REQUESTS_OK)
        else:
            slot.add(SlotWord.REQUESTS_FAILED if call.status >= 500 else SlotWord.REQUESTS_REFUSED)

    async def _dispatch(self, call: Call, method: str) -> None:
        call.service.keys.authorize(method, call.path, call.scope["headers"])
        handler = self._routes.get((method, call.path)) or self._find_handler(call.path, method)
        await handler(call)

    def _find_handler(self, path: str, method: str) -> Handler:
        pattern = path.rpartition("/")[0] + "/*"
        allowed = sorted({verb for verb, known in self._routes if known in (path, pattern)})
        handler = self._routes.get((method, pattern))
        if handler is not None and path.rpartition("/")[2]:
            return handler
        if method == "HEAD" and ("GET", path) in self._routes:
            return self._routes["GET", path]
        if allowed:
            raise method_not_allowed(method, path, ", ".join(allowed))
        raise unknown_route(path)

    async def _answer_error(self, call: Call, error: ApiError) -> None:
        if call.status:  # headers are out: nothing honest can follow
            self._end_connection(call)
            return
        api: ApiName = "openai" if call.path.startswith("/v1/") else "native"
        headers: tuple[tuple[bytes, bytes], ...] = ()
        if error.status == 405:
            headers = ((b"allow", error.message.rpartition("use ")[2].encode()),)
        elif error.status == 401:
            headers = ((b"www-authenticate", b"Bearer"),)
        await call.answer_error(error, api, headers)

    def _end_connection(self, call: Call) -> None:
        if not call.connection.is_lost:
            call.connection.transport.abort()


def refuse_when_draining(service: Service) -> None:
    """Raise ApiError 503 for a new request during the drain."""
    if service.is_draining:
        raise unavailable("the server is shutting down; send the request elsewhere", code="draining")
