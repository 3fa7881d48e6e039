"""Which word of a slot counts what: the routes with their outcomes, and why requests ended early. Pure tables.

Tokenizer workers count by these tables, any worker reads all slots by them for `/metrics`. The tables are fixed, so
that every instance has the same series whatever it served and however many workers it has.
"""

from __future__ import annotations

import enum

from sglmt.ipc.state_page import SlotWord
from sglmt.status.histograms import Words


class Outcome(enum.IntEnum):
    """How an HTTP request ended."""

    OK = 0
    REFUSED = 1  # 4xx
    FAILED = 2  # 5xx, or an error event in a stream
    ABORTED = 3  # the client left, or the request was ended by request in mid-stream


class AbortCause(enum.IntEnum):
    """Why a request ended without its normal finish."""

    CLIENT_DISCONNECTED = 0
    SLOW_CLIENT = 1
    ABORT_REQUEST = 2
    DEADLINE = 3
    SHUTTING_DOWN = 4
    ENGINE_AWAY = 5
    ENGINE_ERROR = 6
    QUEUE_FULL = 7
    OTHER = 8


# Every served path, placeholders in braces; what nobody serves is counted as `other`.
ROUTES = (
    "other",
    "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models", "/v1/models/{model}",
    "/generate", "/encode", "/tokenize", "/detokenize",
    "/abort_request", "/pause_generation", "/continue_generation", "/flush_cache", "/configure_logging",
    "/update_weights_from_disk", "/load_lora_adapter", "/unload_lora_adapter", "/get_internal_state",
    "/open_session", "/close_session",
    "/get_model_info", "/get_server_info",
    "/health", "/ready", "/health_generate", "/metrics", "/openapi.json", "/docs",
)  # fmt: skip

MAX_ROUTES = (SlotWord.ENCODE_HITS - SlotWord.ROUTES) // len(Outcome)

_ROUTE_WORDS = {path: SlotWord.ROUTES + number * len(Outcome) for number, path in enumerate(ROUTES)}
_CAUSES = {
    "aborted": AbortCause.ABORT_REQUEST,
    "deadline_exceeded": AbortCause.DEADLINE,
    "shutting_down": AbortCause.SHUTTING_DOWN,
    "engine_away": AbortCause.ENGINE_AWAY,
    "engine_died": AbortCause.ENGINE_ERROR,
    "engine_error": AbortCause.ENGINE_ERROR,
    "cannot_continue": AbortCause.ENGINE_ERROR,
    "queue_full": AbortCause.QUEUE_FULL,
}


def route_word(path: str, outcome: Outcome) -> int:
    """The counter of a route (as in ROUTES; any other path is `other`) and an outcome."""
    return _ROUTE_WORDS.get(path, SlotWord.ROUTES) + outcome


def abort_word(cause: AbortCause) -> int:
    """The counter of a cause."""
    return SlotWord.ABORTS + cause


def count_early_end(slot: Words, code: str | None, status: int | None) -> None:
    """Count an abort or error finish by its code. What was refused before it ran (another 4xx) is no early end."""
    cause = _CAUSES.get(code or "")
    if cause is None and status is not None and 400 <= status < 499:
        return
    slot.add(abort_word(AbortCause.OTHER if cause is None else cause))


def outcome_of(status: int) -> Outcome:
    """The outcome of a whole answer, by its HTTP status."""
    if status < 400:
        return Outcome.OK
    if status == 499:
        return Outcome.ABORTED
    return Outcome.REFUSED if status < 500 else Outcome.FAILED
