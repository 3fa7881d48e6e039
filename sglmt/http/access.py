"""Which sites and host names a worker answers: CORS and the Host check. Pure; every tokenizer worker has one.

The Host check stops pages that rebind their own name to this address; CORS tells browsers which sites may read
answers. Neither replaces keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sglmt.http.auth import OPEN_PATHS, Headers
from sglmt.http.errors import bad_request, wrong_host

PREFLIGHT_LASTS_S = 600

HeaderList = list[tuple[bytes, bytes]]

_TOKENS = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")


class Access:
    """`origins` and `hosts` as the options give them; with none, no site may read and any host name is answered."""

    __slots__ = ("_any_origin", "_hosts", "_origins", "_suffixes")

    def __init__(self, origins: Iterable[str] = (), hosts: Iterable[str] = ()) -> None:
        allowed = [origin.encode() for origin in origins]
        self._any_origin = b"*" in allowed
        self._origins = frozenset(allowed)
        names = [host.lower().encode() for host in hosts]
        self._hosts = frozenset(names)
        self._suffixes = tuple(name[1:] for name in names if name.startswith(b"*."))

    def check_host(self, path: str, headers: Headers) -> None:
        """Raise ApiError (421; 400 without or with several Host headers) unless the host name is allowed.

        Probes of the open paths come by address and are answered under any name.
        """
        if not self._hosts or path in OPEN_PATHS or b"*" in self._hosts:
            return
        values = {value for name, value in headers if name == b"host"}
        if len(values) != 1:
            raise bad_request("exactly one Host header is expected", code="invalid_host")
        name = host_name(values.pop())
        if name not in self._hosts and not name.endswith(self._suffixes or (b"\n",)):
            raise wrong_host(name.decode("ascii", "replace"))

    def answer_headers(self, headers: Headers) -> HeaderList:
        """What every answer to this request carries so that the site that sent it may read it."""
        if not self._origins:
            return []
        vary = [] if self._any_origin else [(b"vary", b"origin")]
        origin = _first(headers, b"origin")
        if origin is None or not (self._any_origin or origin in self._origins):
            return vary
        allowed = b"*" if self._any_origin else origin
        return [(b"access-control-allow-origin", allowed), (b"access-control-expose-headers", b"retry-after"), *vary]

    def preflight_headers(self, headers: Headers, methods: str) -> HeaderList:
        """What the answer to an OPTIONS request adds when it is the preflight of an allowed site."""
        origin = _first(headers, b"origin")
        if origin is None or not (self._any_origin or origin in self._origins):
            return []
        if _first(headers, b"access-control-request-method") is None:
            return []
        added = [
            (b"access-control-allow-methods", methods.encode()),
            (b"access-control-max-age", b"%d" % PREFLIGHT_LASTS_S),
        ]
        wanted = _first(headers, b"access-control-request-headers")
        if wanted is not None and _TOKENS.fullmatch(wanted):
            added.append((b"access-control-allow-headers", wanted))
        return added


def host_name(value: bytes) -> bytes:
    """The name in a Host header, in lower case, without the port; an IPv6 address keeps its brackets."""
    name, colon, port = value.strip().lower().rpartition(b":")
    if not colon or not (port.isdigit() or not port) or (name.startswith(b"[") and not name.endswith(b"]")):
        return value.strip().lower()
    return name


def is_websocket(headers: Headers) -> bool:
    """Whether the request asks to become a websocket."""
    upgrades = [value for name, value in headers if name == b"upgrade"]
    return bool(upgrades) and any(b"websocket" in value.lower() for value in upgrades)


def _first(headers: Headers, wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name == wanted), None)
