"""Who may ask: API keys and the routes that need none. Pure; every tokenizer worker has one `ApiKeys`.

The comparison takes the same time whichever key is wrong and wherever it differs: digests of equal length are
compared, all of them, always.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from sglmt.http.errors import unauthorized

OPEN_PATHS = frozenset({"/health", "/ready"})  # probes; an OPTIONS request reaches no handler and is open everywhere

_BEARER = b"bearer "

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case, as ASGI gives them


class ApiKeys:
    """The accepted keys; with none, every request is allowed."""

    __slots__ = ("_digests",)

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple(_digest(key.encode("utf-8")) for key in keys)

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._digests)

    def authorize(self, method: str, path: str, headers: Headers) -> None:
        """Raise ApiError (401) unless the route is open or the headers carry one of the keys."""
        if not self._digests or path in OPEN_PATHS or method == "OPTIONS":
            return
        if not self.accepts(presented_key(headers)):
            raise unauthorized()

    def accepts(self, key: bytes | None) -> bool:
        """Whether this is one of the keys."""
        digest = _digest(key or b"")
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found and key is not None


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


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
