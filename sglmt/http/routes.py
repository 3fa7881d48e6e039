"""Every route a worker serves, in one table. Tokenizer workers, and what describes or counts the routes."""

from __future__ import annotations

from sglmt.http.app import Handler
from sglmt.http.control_handlers import control_routes
from sglmt.http.documentation_handlers import documentation_routes
from sglmt.http.embedding_handlers import embedding_routes
from sglmt.http.generation_handlers import generation_routes
from sglmt.http.info_handlers import info_routes


def all_routes() -> dict[tuple[str, str], Handler]:
    """(method, path) → handler."""
    return {
        **generation_routes(),
        **embedding_routes(),
        **info_routes(),
        **control_routes(),
        **documentation_routes(),
    }
