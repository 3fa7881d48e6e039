"""The ASGI application of a worker: routes, body, access, and errors in each API's shape.

One table of exact paths; a handler gets a `Call` and answers through it. Whatever a handler raises as
`ApiError` becomes that answer; anything else is logged and becomes a 500 that says nothing of our insides.
Each request is counted once, by route and outcome, just before its last byte is sent.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from sglmt.http.access import Access, HeaderList, is_websocket
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
    unsupported_media_type,
    websocket_refused,
)
from sglmt.http.server import Connection
from sglmt.http.service import Service
from sglmt.ipc.state_page import Slot, SlotWord
from sglmt.status.metric_words import AbortCause, Outcome, abort_word, outcome_of, route_word

Handler = Callable[["Call"], Awaitable[None]]

OTHER_ROUTE = "other"
_JSON = (b"content-type", b"application/json")


class Call:
    """One HTTP request on its way through a handler."""

    __slots__ = (
        "_counted",
        "_send",
        "_slot",
        "connection",
        "extra_headers",
        "outcome",
        "path",
        "receive",
        "route",
        "scope",
        "service",
        "started_s",
        "status",
    )

    def __init__(self, service: Service, slot: Slot, scope: Any, receive: Any, send: Any) -> None:
        self.service = service
        self._slot = slot
        self.scope = scope
        self.path: str = scope["path"]
        self.receive = receive
        self._send = send
        self.connection: Connection = scope["state"]["connection"]
        self.started_s = time.monotonic()
        self.status = 0
        self.route = OTHER_ROUTE
        self.extra_headers: HeaderList = []
        self.outcome: Outcome | None = None  # when the status does not tell it: a stream that failed
        self._counted = False

    async def body(self) -> bytes:
        """The whole body. Raises ApiError 413 and 415, or 408 when it does not arrive in time."""
        self._check_content_type()
        limit = self.service.args.max_request_bytes
        declared = self.header(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit:
            raise body_too_large(limit)
        allowed_s = self.service.args.receive_timeout
        try:
            async with asyncio.timeout(allowed_s):
                return await self._receive_body(limit)
        except TimeoutError:
            raise slow_request(allowed_s) from None

    async def _receive_body(self, limit: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise asyncio.CancelledError
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise body_too_large(limit)
            more = message.get("more_body", False)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check_content_type(self) -> None:
        """A body that says it is something else than JSON is refused; one that says nothing is read as JSON."""
        declared = self.header(b"content-type")
        if declared is None:
            return
        kind = declared.partition(b";")[0].strip().lower()
        if kind and kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
            raise unsupported_media_type(declared.decode("latin-1"))

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        for header, value in self.scope["headers"]:
            if header == name:
                return bytes(value)
        return None

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send status and headers."""
        self.status = status
        if self.extra_headers:
            headers = [*headers, *self.extra_headers]
        if self.service.is_draining:
            headers = [*headers, (b"connection", b"close")]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def finish(self, body: bytes) -> None:
        """Send the end of the body."""
        self.count()
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def count(self) -> None:
        """Count this request as ended; only the first call does."""
        if self._counted:
            return
        self._counted = True
        outcome = outcome_of(self.status) if self.outcome is None else self.outcome
        self._slot.add(route_word(self.route, outcome))
        if outcome is not Outcome.ABORTED:
            self._slot.add(_OUTCOME_WORDS[outcome])

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
        if error.status in (408, 413, 431):
            out.append((b"connection", b"close"))
        await self.start(error.status, out)
        await self.finish(body)


_OUTCOME_WORDS = {
    Outcome.OK: SlotWord.REQUESTS_OK,
    Outcome.REFUSED: SlotWord.REQUESTS_REFUSED,
    Outcome.FAILED: SlotWord.REQUESTS_FAILED,
}


class App:
    """Routes of one worker. Paths ending in `/{name}` take any last segment."""

    def __init__(
        self, service: Service, access: Access, routes: dict[tuple[str, str], Handler], slot: Slot, log: Any
    ) -> None:
        self._service = service
        self._access = access
        self._routes = routes
        self._methods: dict[str, list[str]] = {}
        for method, path in sorted(routes):
            self._methods.setdefault(path, []).append(method)
        self._patterns = {path.rpartition("/")[0]: path for path in self._methods if path.endswith("}")}
        self._slot = slot
        self._log: Callable[[str, str], None] = log

    def count_refusal(self) -> None:
        """Count bytes that were refused before they were a request: junk, headers that are too large or too slow."""
        for word in (SlotWord.REQUESTS_TOTAL, SlotWord.REQUESTS_REFUSED, route_word(OTHER_ROUTE, Outcome.REFUSED)):
            self._slot.add(word)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI entry."""
        call = Call(self._service, self._slot, scope, receive, send)
        slot = self._slot
        slot.add(SlotWord.REQUESTS_TOTAL)
        try:
            await self._dispatch(call, scope["method"])
        except ApiError as error:
            await self._answer_error(call, error)
        except asyncio.CancelledError:
            if call.outcome is None:
                slot.add(SlotWord.CLIENT_ABORTS)
                slot.add(abort_word(AbortCause.CLIENT_DISCONNECTED))
                call.outcome = Outcome.ABORTED
            self._end_connection(call)
        except Exception:
            self._log("error", f"{call.path}: {traceback.format_exc()}")
            await self._answer_error(call, internal_error())
        call.count()

    async def _dispatch(self, call: Call, method: str) -> None:
        headers, path = call.scope["headers"], call.path
        call.route = route = self._route_of(path)
        call.extra_headers = self._access.answer_headers(headers)
        self._access.check_host(path, headers)
        if is_websocket(headers):
            call.extra_headers.append((b"connection", b"close"))
            raise websocket_refused()
        call.service.keys.authorize(method, path, headers)
        handler = self._routes.get((method, route))
        if handler is not None:
            await handler(call)
        elif method == "HEAD" and ("GET", route) in self._routes:
            await self._routes["GET", route](call)
        elif route == OTHER_ROUTE:
            raise unknown_route(path)
        elif method == "OPTIONS":
            await self._answer_options(call, route)
        else:
            raise method_not_allowed(method, path, ", ".join(self._methods[route]))

    def _route_of(self, path: str) -> str:
        if path in self._methods and not path.endswith("}"):
            return path
        prefix, _, last = path.rpartition("/")
        return self._patterns.get(prefix, OTHER_ROUTE) if last else OTHER_ROUTE

    async def _answer_options(self, call: Call, route: str) -> None:
        methods = ", ".join([*self._methods[route], "OPTIONS"])
        headers = [(b"allow", methods.encode())]
        await call.start(204, headers + self._access.preflight_headers(call.scope["headers"], methods))
        await call.finish(b"")

    async def _answer_error(self, call: Call, error: ApiError) -> None:
        if call.status:  # headers are out: nothing honest can follow
            call.outcome = Outcome.FAILED
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
