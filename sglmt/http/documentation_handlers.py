"""`/openapi.json` and `/docs`: what this worker serves, as it serves it. Worker process."""

from __future__ import annotations

import msgspec

from sglmt import __version__
from sglmt.http.app import Call, Handler
from sglmt.http.service import Service


def documentation_routes() -> dict[tuple[str, str], Handler]:
    """The routes of this module."""
    documentation = Documentation()
    return {("GET", "/openapi.json"): documentation.document, ("GET", "/docs"): documentation.page}


class Documentation:
    """The document, made when somebody first asks for it."""

    def __init__(self) -> None:
        self._document: bytes | None = None
        self._page = b""

    async def document(self, call: Call) -> None:
        """As JSON."""
        await call.answer(self._made(call.service))

    async def page(self, call: Call) -> None:
        """As a page."""
        self._made(call.service)
        await call.answer(self._page, content_type=b"text/html; charset=utf-8")

    def _made(self, service: Service) -> bytes:
        if self._document is None:
            from sglmt.http.openapi import docs_page, openapi_document
            from sglmt.http.operations import operations

            keys = service.keys
            document = openapi_document(operations(), __version__, keys.required, keys.admin_required)
            self._document, self._page = msgspec.json.encode(document), docs_page(document)
        return self._document
