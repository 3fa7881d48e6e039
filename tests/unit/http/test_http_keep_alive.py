"""An idle connection is not closed under its client's feet: proxies keep theirs for up to a minute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglmt.http.server import Connection
from sglmt.server_args import ServerArgs

LONGEST_PROXY_S = 65.0


def idle(between_requests: bool = True, **options: Any) -> Any:
    """A connection that has been idle since 0."""
    closed: list[bool] = []
    transport = SimpleNamespace(is_closing=lambda: bool(closed), close=lambda: closed.append(True))
    args = ServerArgs(**options)
    server = SimpleNamespace(keep_alive_s=args.keep_alive_timeout, receive_timeout_s=args.receive_timeout)
    return SimpleNamespace(
        _is_between_requests=between_requests, _head_since_s=None, _idle_since_s=0.0, _server=server,
        transport=transport, closed=closed,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "kept_s", "closed_s"), [({}, LONGEST_PROXY_S, 76.0), ({"keep_alive_timeout": 5.0}, 4.9, 5.1)]
)
def test_it_is_kept_for_as_long_as_promised(options: dict[str, Any], kept_s: float, closed_s: float) -> None:
    connection = idle(**options)
    Connection.end_if_overdue(connection, kept_s)
    assert not connection.closed
    Connection.end_if_overdue(connection, closed_s)
    assert connection.closed == [True]


def test_a_running_request_is_not_idle() -> None:
    connection = idle(between_requests=False)
    Connection.end_if_overdue(connection, 10_000.0)
    assert not connection.closed
