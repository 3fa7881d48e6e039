"""Who may ask: API keys, admin keys, and the routes that need none. Pure; every tokenizer worker has one `ApiKeys`.

The comparison takes the same time whichever key is wrong and wherever it differs: digests of equal length are
compared, all of them, always.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from sglmt.http.errors import forbidden, unauthorized

OPEN_PATHS = frozenset({"/health", "/ready"})  # probes; an OPTIONS request reaches no handler and is open everywhere

# What changes or shows the state of the whole instance. With admin keys these need one of them; without, an API key.
ADMIN_PATHS = frozenset(
    {
        "/abort_request", "/pause_generation", "/continue_generation", "/flush_cache", "/configure_logging",
        "/update_weights_from_disk", "/load_lora_adapter", "/unload_lora_adapter", "/get_internal_state",
        "/open_session", "/close_session",
    }
)  # fmt: skip

_BEARER = b"bearer "

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case, as ASGI gives them


class ApiKeys:
    """The accepted keys; with none, every request is allowed. An admin key is good for every route."""

    __slots__ = ("_admin", "_digests")

    def __init__(self, keys: Iterable[str] = (), admin_keys: Iterable[str] = ()) -> None:
        self._digests = tuple(_digest(key.encode("utf-8")) for key in keys)
        self._admin = tuple(_digest(key.encode("utf-8")) for key in admin_keys)

    @property
    def required(self) -> bool:
        """Whether ordinary requests need a key."""
        return bool(self._digests)

    @property
    def admin_required(self) -> bool:
        """Whether control routes need an admin key."""
        return bool(self._admin)

    def authorize(self, method: str, path: str, headers: Headers) -> None:
        """Raise ApiError unless the route is open or the headers carry a key that is good for it.

        401: no key of ours; 403: an API key where an admin key is needed.
        """
        if path in OPEN_PATHS or method == "OPTIONS":
            return
        needs_admin = bool(self._admin) and path in ADMIN_PATHS
        if not self._digests and not needs_admin:
            return
        key = presented_key(headers)
        is_admin, is_key = _is_one_of(key, self._admin), self.accepts(key)
        if is_admin or (is_key and not needs_admin):
            return
        raise forbidden() if is_key else unauthorized(admin=needs_admin)

    def accepts(self, key: bytes | None) -> bool:
        """Whether this is one of the API keys."""
        return _is_one_of(key, self._digests)


def presented_key(headers: Headers) -> bytes | None:
    """The key of `Authorization: Bearer KEY`, else of `x-api-key: KEY`, None when there is neither.

    Headers that come twice with different keys count as none.
    """
    bearers: set[bytes] = set()
    plain: set[bytes] = set()
    for name, value in headers:
        if name == b"authorization" and value[: len(_BEARER)].lower() == _BEARER:
            bearers.add(value[len(_BEARER) :].strip())
        elif name == b"x-api-key":
            plain.add(value.strip())
    for keys in (bearers, plain):
        if keys:
            return keys.pop() if len(keys) == 1 else None
    return None


def _is_one_of(key: bytes | None, digests: tuple[bytes, ...]) -> bool:
    digest = _digest(key or b"")
    found = False
    for known in digests:
        found |= hmac.compare_digest(digest, known)
    return found and key is not None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
