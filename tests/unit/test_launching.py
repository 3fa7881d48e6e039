"""What a launch decides before it starts anything."""

from __future__ import annotations

import asyncio

import pytest

from sglmt.launching import session as session_module
from sglmt.launching.check import describe
from sglmt.launching.foreground import wants_live_view
from sglmt.launching.session import Digest
from sglmt.server_args import ServerArgs
from sglmt.status.snapshot import InstanceSnapshot, TotalsSnapshot
from sglmt.supervisor.logs import LogSink
from tests.unit.status.samples import instance


@pytest.mark.parametrize(
    ("live", "environment", "is_terminal", "wanted"),
    [
        (None, {"TERM": "xterm"}, True, True),
        (None, {"TERM": "xterm"}, False, False),
        (None, {"TERM": "dumb"}, True, False),
        (None, {}, True, False),
        (None, {"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, True, True),
        (True, {"TERM": "xterm"}, False, False),
        (False, {"TERM": "xterm"}, True, False),
    ],
)
def test_when_the_view_is_live(live: bool | None, environment: dict[str, str], is_terminal: bool, wanted: bool) -> None:
    assert wants_live_view(live, environment, is_terminal) is wanted


def test_what_check_says() -> None:
    model = {"model_path": "/m/x.gguf", "context_length": 8192, "vocab_size": 49152}
    text = "\n".join(describe(ServerArgs(workers=3, port=31000), "http://127.0.0.1:31000", model))
    for words in ("'default' in multi mode", "http://127.0.0.1:31000 (free)", "/m/x.gguf, context 8192 tokens",
                  "engine     openvino", "1 supervisor", "1 router", "3 tokenizer_workers"):  # fmt: skip
        assert words in text
    single = "\n".join(describe(ServerArgs(workers=1, port=0, engine="simulator"), "http://127.0.0.1:1", model))
    assert "any free port" in single
    assert "router" not in single
    assert "makes up tokens" in single


class Busy:
    """An instance with a given number of requests so far."""

    requests = 0

    def snapshot(self) -> InstanceSnapshot:
        return instance(totals=TotalsSnapshot(requests_total=self.requests, requests_per_s=1.5))

    def request_stop(self, drain_s: float | None, now: bool) -> None:
        raise AssertionError("not asked for")


def test_a_digest_is_told_only_when_something_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "DIGEST_EVERY_S", 0.001)
    busy, sink = Busy(), LogSink("info")

    async def told(times: int) -> None:
        digest, line_came = Digest(busy, sink), asyncio.Event()
        unsubscribe = sink.subscribe(lambda _line: line_came.set())
        digest.start()
        for requests in range(1, times):
            busy.requests = requests
            await line_came.wait()
            line_came.clear()
        digest.stop()
        unsubscribe()

    asyncio.run(asyncio.wait_for(told(3), 10))
    assert [line.text for line in sink.recent()] == [
        f"1.5 req/s, 0 tok/s, first token -, 0 running, 0 queued, {requests} requests so far" for requests in (1, 2)
    ]
