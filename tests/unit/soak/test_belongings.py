"""What counts as leaked, and which load failures are explained."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from sglmt.chaos.client import Client, ConnectionFailed, Hang, HttpAnswer
from sglmt.soak.belongings import Belongings
from sglmt.soak.load import Load

BEFORE = Belongings(
    processes=9, zombies=0, supervisor_fds=46, supervisor_threads=2, segments=1, run_files=15, supervisor_rss_mib=24
)


def test_only_more_is_a_leak_and_memory_is_shown_only() -> None:
    assert BEFORE.more_than(BEFORE) == {}
    assert replace(BEFORE, supervisor_fds=40, supervisor_rss_mib=99).more_than(BEFORE) == {}
    assert replace(BEFORE, zombies=1, run_files=16).more_than(BEFORE) == {"zombies": "0 → 1", "run_files": "15 → 16"}


class FakeClient(Client):
    """Answers in turn."""

    def __init__(self, outcomes: list[HttpAnswer | Exception]) -> None:
        super().__init__("http://127.0.0.1:1")
        self._outcomes = outcomes

    async def post(self, path: str, body: dict[str, object], deadline_s: float) -> HttpAnswer:
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_a_failure_is_explained_only_by_a_killed_worker() -> None:
    ids = b"1,2,3,4,5,6,7,8"
    outcomes: list[HttpAnswer | Exception] = [
        HttpAnswer(200, {}, b'{"text": "x", "output_ids": [' + ids + b"]}"),
        HttpAnswer(200, {}, b'{"text": "x", "output_ids": [1]}'),
        HttpAnswer(503, {}, b"{}"),
        ConnectionFailed("reset", doomed=True),
        ConnectionFailed("reset"),
        Hang("silent"),
    ]

    async def scenario() -> Load:
        load = Load(FakeClient(outcomes), per_second=1.0)
        for _ in range(6):
            await load._one()
        return load

    load = asyncio.run(scenario())
    assert (load.sent, load.answers, load.explained) == (6, 3, 1)
    assert dict(load.failures) == {"wrong answer": 1, "status 503": 1, "connection": 1, "hang": 1}
    assert load.longest_s < time.monotonic()
