"""The HTTP application of a worker: routes, body, access, and errors in each API's shape.

One table of exact paths; a handler gets a `Call` and answers through it. Whatever a handler raises as
`ApiError` becomes that answer; anything else is logged and becomes a 500 that says nothing of our insides.
Each request is counted once, by route and outcome, just before its last byte is sent.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

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
from sglmt.http.exchange import Exchange
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
        "_slot",
        "connection",
        "exchange",
        "extra_headers",
        "outcome",
        "path",
        "route",
        "service",
        "started_s",
        "status",
    )

    def __init__(self, service: Service, slot: Slot, exchange: Exchange) -> None:
        self.service = service
        self._slot = slot
        self.exchange = exchange
        self.path = exchange.path
        self.connection = exchange.connection
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
        exchange = self.exchange
        if not exchange.has_arrived:
            await self._arrival(exchange, limit)
        if exchange.size > limit:
            raise body_too_large(limit)
        return exchange.body()

    async def _arrival(self, exchange: Exchange, limit: int) -> None:
        """Wait until the body is here, or has more bytes than it may."""
        allowed_s = self.service.args.receive_timeout
        try:
            async with asyncio.timeout(allowed_s):
                while not exchange.has_arrived and exchange.size <= limit:
                    await exchange.arrival()
        except TimeoutError:
            raise slow_request(allowed_s) from None

    def _check_content_type(self) -> None:
        """A body that says it is something else than JSON is refused; one that says nothing is read as JSON."""
        declared = self.header(b"content-type")
        if declared is None or declared == b"application/json":
            return
        kind = declared.partition(b";")[0].strip().lower()
        if kind and kind != b"application/json" and not (kind.startswith(b"application/") and kind.endswith(b"+json")):
            raise unsupported_media_type(declared.decode("latin-1"))

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        for header, value in self.exchange.headers:
            if header == name:
                return value
        return None

    async def start(self, status: int, headers: HeaderList, first: Callable[[], bytes] = bytes) -> None:
        """Send status and headers, and with them what `first` returns; see `Exchange.start`."""
        self.status = status
        await self.exchange.start(status, self._all_headers(headers), first)

    def _all_headers(self, headers: HeaderList) -> HeaderList:
        if self.extra_headers:
            headers = [*headers, *self.extra_headers]
        if self.service.is_draining:
            headers = [*headers, (b"connection", b"close")]
        return headers

    async def finish(self, body: bytes) -> None:
        """Send the end of the body."""
        self.count()
        await self.exchange.finish(body)

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
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        await self._answer(status, headers, body)

    async def _answer(self, status: int, headers: HeaderList, body: bytes) -> None:
        self.status = status
        self.count()
        await self.exchange.answer(status, self._all_headers(headers), body)

    async def answer_error(self, error: ApiError, api: ApiName, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Send an error in the shape of `api`."""
        body = error_body(error, api)
        out = [_JSON, (b"content-length", b"%d" % len(body)), *headers]
        if error.retry_after_s is not None:
            out.append((b"retry-after", b"%d" % error.retry_after_s))
        if error.status in (408, 413, 431):
            out.append((b"connection", b"close"))
        await self._answer(error.status, out, body)


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

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        call = Call(self._service, self._slot, exchange)
        slot = self._slot
        slot.add(SlotWord.REQUESTS_TOTAL)
        try:
            await self._dispatch(call, exchange.method)
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
        headers, path = call.exchange.headers, call.path
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
        await call.start(204, headers + self._access.preflight_headers(call.exchange.headers, methods))
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


P = TypeVar("P")


async def let_in(call: Call, serve: Callable[[Call, P], Awaitable[None]], parse: P) -> None:
    """Serve a request for the engine: refused with ApiError 503 during a drain, which waits for those let in before."""
    service = call.service
    if service.is_draining:
        raise unavailable("the server is shutting down; send the request elsewhere", code="draining")
    frontend = service.frontend
    frontend.let_in += 1
    try:
        await serve(call, parse)
    finally:
        frontend.let_in -= 1
