"""Host names, CORS, admin keys, websockets: who may ask, from where."""

from __future__ import annotations

import pytest

from sglmt.http.access import Access, host_name, is_websocket
from sglmt.http.auth import ADMIN_PATHS, OPEN_PATHS, ApiKeys
from sglmt.http.errors import ApiError

SITE = (b"origin", b"https://a.org")


def refusal(access: Access, host: bytes | None, path: str = "/generate") -> int | None:
    headers = [] if host is None else [(b"host", host)]
    try:
        access.check_host(path, headers)
    except ApiError as error:
        return error.status
    return None


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"api.example.com", None),
        (b"API.Example.COM:8443", None),
        (b"x.y.wild.org", None),
        (b"[::1]:30000", None),
        (b"[::1]", None),
        (b"wild.org", 421),
        (b"evilwild.org", 421),
        (b"api.example.com.evil.org", 421),
        (b"api.example.com@evil.org", 421),
        (b"", 421),
        (b"\xff", 421),
        (None, 400),
    ],
)
def test_hosts(host: bytes | None, status: int | None) -> None:
    access = Access(hosts=["api.example.com", "*.wild.org", "[::1]"])
    assert refusal(access, host) == status


def test_hosts_are_free_without_the_option_and_for_probes() -> None:
    assert refusal(Access(), b"any.thing") is None
    assert refusal(Access(hosts=["*"]), b"any.thing") is None
    assert {refusal(Access(hosts=["a"]), b"10.0.0.3:80", path) for path in OPEN_PATHS} == {None}


def test_two_different_host_headers_are_refused() -> None:
    with pytest.raises(ApiError, match="exactly one Host"):
        Access(hosts=["a"]).check_host("/x", [(b"host", b"a"), (b"host", b"b")])


@pytest.mark.parametrize(
    ("value", "name"),
    [(b"a:1", b"a"), (b" A ", b"a"), (b"[::1]:1", b"[::1]"), (b"[::1]", b"[::1]"), (b"a:b", b"a:b"), (b"a:", b"a")],
)
def test_host_names(value: bytes, name: bytes) -> None:
    assert host_name(value) == name


def test_cors_headers_only_for_listed_sites() -> None:
    access = Access(origins=["https://a.org"])
    assert (b"access-control-allow-origin", b"https://a.org") in access.answer_headers([SITE])
    assert access.answer_headers([(b"origin", b"https://b.org")]) == [(b"vary", b"origin")]
    assert access.answer_headers([]) == [(b"vary", b"origin")]
    assert Access().answer_headers([SITE]) == []
    anybody = dict(Access(origins=["*"]).answer_headers([SITE]))
    assert anybody[b"access-control-allow-origin"] == b"*"
    assert b"vary" not in anybody


def test_preflight() -> None:
    access = Access(origins=["https://a.org"])
    asked = [SITE, (b"access-control-request-method", b"POST")]
    wanted = (b"access-control-request-headers", b"authorization, X-Stainless-Os")
    answer = dict(access.preflight_headers([*asked, wanted], "POST, OPTIONS"))
    assert answer[b"access-control-allow-methods"] == b"POST, OPTIONS"
    assert answer[b"access-control-allow-headers"] == wanted[1]
    odd = (b"access-control-request-headers", b"a b\x80")
    assert b"access-control-allow-headers" not in dict(access.preflight_headers([*asked, odd], "POST"))
    assert access.preflight_headers([SITE], "POST") == []
    assert access.preflight_headers([(b"origin", b"https://b.org"), asked[1]], "POST") == []


def test_websockets_are_recognised_and_http2_offers_are_not() -> None:
    assert is_websocket([(b"upgrade", b"WebSocket")])
    assert not is_websocket([(b"upgrade", b"h2c"), (b"connection", b"upgrade")])


def status_of(keys: ApiKeys, path: str, key: bytes | None) -> int | None:
    try:
        keys.authorize("POST", path, [] if key is None else [(b"x-api-key", key)])
    except ApiError as error:
        return error.status
    return None


@pytest.mark.parametrize("path", sorted(ADMIN_PATHS))
def test_control_routes(path: str) -> None:
    both = ApiKeys(["k"], ["a"])
    assert [status_of(both, path, key) for key in (None, b"x", b"k", b"a")] == [401, 401, 403, None]
    api_only = ApiKeys(["k"])
    assert [status_of(api_only, path, key) for key in (None, b"x", b"k")] == [401, 401, None]
    admin_only = ApiKeys([], ["a"])
    assert [status_of(admin_only, path, key) for key in (None, b"k", b"a")] == [401, 401, None]
    assert status_of(ApiKeys(), path, None) is None


def test_ordinary_routes_take_either_key_and_stay_open_with_admin_keys_alone() -> None:
    both = ApiKeys(["k"], ["a"])
    assert [status_of(both, "/generate", key) for key in (None, b"x", b"k", b"a")] == [401, 401, None, None]
    assert status_of(ApiKeys([], ["a"]), "/generate", None) is None
    assert [status_of(both, path, None) for path in sorted(OPEN_PATHS)] == [None, None]
    both.authorize("OPTIONS", "/pause_generation", [])
