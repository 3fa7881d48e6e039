"""The tables about routes agree with the routes; the document is made of them."""

from __future__ import annotations

import html
import re

import msgspec

from sglmt.http.auth import ADMIN_PATHS, OPEN_PATHS
from sglmt.http.openapi import docs_page, openapi_document
from sglmt.http.operations import operations
from sglmt.http.routes import all_routes
from sglmt.status.metric_words import ROUTES


def test_every_route_is_described_counted_and_guarded() -> None:
    served = all_routes()
    assert served.keys() == operations().keys()
    paths = {path for _method, path in served}
    assert paths - set(ROUTES) == set()
    assert paths >= ADMIN_PATHS
    assert paths >= OPEN_PATHS
    control = {path for (_, path), operation in operations().items() if operation.tag == "Control"}
    assert control == ADMIN_PATHS


def test_references_lead_somewhere_and_ids_are_unique() -> None:
    document = openapi_document(operations(), "1", needs_key=False, needs_admin_key=False)
    text = msgspec.json.encode(document).decode()
    known = document["components"]["schemas"]
    assert {name for name in re.findall(r'"#/components/schemas/([^"]+)"', text)} <= known.keys()
    ids = [described["operationId"] for methods in document["paths"].values() for described in methods.values()]
    assert len(set(ids)) == len(ids) == len(operations())


def test_keys_are_told_where_they_are_needed() -> None:
    def guarded(needs_key: bool, needs_admin_key: bool) -> set[str]:
        paths = openapi_document(operations(), "1", needs_key, needs_admin_key)["paths"]
        return {path for path, methods in paths.items() for each in methods.values() if "security" in each}

    everything = {path for _method, path in operations()}
    assert guarded(False, False) == set()
    assert guarded(True, False) == guarded(True, True) == everything - OPEN_PATHS
    assert guarded(False, True) == ADMIN_PATHS


def test_the_page_names_every_route_and_loads_nothing() -> None:
    page = docs_page(openapi_document(operations(), "1<2", False, False)).decode()
    assert [path for _method, path in operations() if html.escape(path) not in page] == []
    assert "1&lt;2" in page
    assert re.findall(r"<script|<link|<img|https?://", page) == []
