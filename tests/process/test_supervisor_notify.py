"""What a service manager hears from a supervisor: READY when requests can be served, STOPPING, the watchdog."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglmt.server_args import ServerArgs
from tests.support.supervised import Supervised, run_to_end, supervised

MakeArgs = Callable[..., ServerArgs]


@pytest.fixture
def make_args(tmp_path_factory: pytest.TempPathFactory) -> MakeArgs:
    base = tmp_path_factory.mktemp("r")

    def make(**options: Any) -> ServerArgs:
        return ServerArgs(**({"workers": 2, "port": 0, "name": "t", "runtime_dir": str(base)} | options))

    return make


class Heard:
    """The service manager's end of the socket."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.setblocking(False)
        self.all: list[str] = []

    def messages(self) -> list[str]:
        """Everything so far but the watchdog's signs of life."""
        while True:
            try:
                self.all.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return [message for message in self.all if message != "WATCHDOG=1"]

    def states(self) -> list[str]:
        """Without the words for people."""
        return [message.partition("\n")[0] for message in self.messages() if not message.startswith("STATUS=")]


@pytest.fixture
def heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heard]:
    made = Heard(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "400000")
    with made.socket:
        yield made


def test_ready_when_requests_can_be_served_and_stopping_when_not(make_args: MakeArgs, heard: Heard) -> None:
    async def scenario() -> Supervised:
        async with supervised(make_args(), {"tokenizer_worker": {"ignore_probe": True, "until": 1}}) as running:
            worker = await running.until(lambda: running.pids() and running.process("tokenizer_worker:0"), 20, "spawn")
            await running.until(lambda: worker.life.ready_at_s is not None, 20, "the worker is ready, but not probed")
            await running.until(lambda: any("not probed" in text for text in heard.messages()), 5, "its status")
            assert heard.states() == []
            for name in ("tokenizer_worker:0", "tokenizer_worker:1"):
                pid = running.process(name).life.pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            await running.until(lambda: heard.states() and running.ready, 20, "ready, and told so")
            assert heard.states() == ["READY=1"]
            await running.until(lambda: heard.messages()[-1].startswith("STATUS=running"), 5, "status")
            signs = heard.all.count("WATCHDOG=1")
            await running.until(lambda: heard.messages() and heard.all.count("WATCHDOG=1") >= signs + 3, 5, "watchdog")
            running.supervisor.changes.reload_begins()
            running.supervisor.changes.reload_ended()
            assert heard.states() == ["READY=1", "RELOADING=1", "READY=1"]
            running.supervisor.request_stop()
            async with asyncio.timeout(10):
                await running.supervisor.wait_stopped()
        return running

    running = asyncio.run(scenario())
    assert running.exit_code == 0
    assert heard.states()[-1] == "STOPPING=1"
    assert heard.states().count("STOPPING=1") == 1


def test_a_start_that_fails_is_never_ready(make_args: MakeArgs, heard: Heard) -> None:
    running = asyncio.run(run_to_end(make_args(), {"scheduler": {"start": "failed:broken"}}))
    assert running.exit_code == 70
    assert "READY=1" not in heard.states()
    assert any("broken" in message for message in heard.messages())


def test_a_manager_that_is_gone_stops_nothing(make_args: MakeArgs, heard: Heard, tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "notify").unlink()
        async with supervised(make_args()) as running:
            await running.until(lambda: running.ready, 20, "ready")
            assert [text for _, _, text in running.lines if "NOTIFY_SOCKET" in text] != []
            assert sum("NOTIFY_SOCKET" in text for _, _, text in running.lines) == 1

    asyncio.run(scenario())
