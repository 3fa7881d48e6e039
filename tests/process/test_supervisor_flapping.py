"""A process that keeps dying must not cost the others, the control socket, the log or the run directory anything."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglmt.control.client import call
from sglmt.control.commands import Context, Status
from sglmt.control.server import ControlServer
from sglmt.ipc.addresses import CONTROL_SOCKET
from sglmt.server_args import ServerArgs
from sglmt.status.snapshot import InstanceSnapshot
from sglmt.supervisor.logs import LogSink
from tests.support.supervised import Supervised, supervised

MakeArgs = Callable[..., ServerArgs]


@pytest.fixture
def make_args(tmp_path_factory: pytest.TempPathFactory) -> MakeArgs:
    base = tmp_path_factory.mktemp("r")

    def make(**options: Any) -> ServerArgs:
        return ServerArgs(**({"workers": 2, "port": 0, "name": "t", "runtime_dir": str(base)} | options))

    return make


def answers_to(running: Supervised) -> ControlServer:
    """A control server for a supervisor that was started without one."""
    context = Context(instance=running.supervisor, logs=LogSink("info"), drain_s=1.0)
    return ControlServer(running.supervisor.run_dir / CONTROL_SOCKET, context)


async def asked(path: Path) -> tuple[InstanceSnapshot, float]:
    """(the status, seconds it took), as a command would get it."""
    began_s = time.monotonic()
    snapshot: InstanceSnapshot = await asyncio.to_thread(call, path, Status(), began_s + 5.0)
    return snapshot, time.monotonic() - began_s


def test_a_worker_that_keeps_dying_delays_nothing_else(make_args: MakeArgs, tmp_path: Path) -> None:
    trigger = tmp_path / "now"
    plan = {"tokenizer_worker:1": {"then": "exit:1", "after_file": str(trigger)}}

    async def scenario() -> None:
        async with supervised(make_args(max_restarts=2, restart_backoff_max=0.2), plan) as running:
            await running.until(lambda: running.ready, 20, "ready")
            server = answers_to(running)
            await server.start()
            try:
                await while_it_flaps(running, trigger)
            finally:
                await server.close()

    asyncio.run(scenario())


async def while_it_flaps(running: Supervised, trigger: Path) -> None:
    path = running.supervisor.run_dir / CONTROL_SOCKET
    flapping, router = running.process("tokenizer_worker:1"), running.process("router")
    trigger.touch()
    await running.until(lambda: flapping.life.restarts >= 4, 20, "it is beyond its budget, and tried again")
    lines, restarts = len(running.lines), flapping.life.restarts
    assert router.life.pid is not None
    os.kill(router.life.pid, signal.SIGKILL)
    took_s: list[float] = []
    while flapping.life.restarts < restarts + 4 or not router.serves:
        snapshot, seconds = await asked(path)
        took_s.append(seconds)
        (row,) = [row for row in snapshot.processes if (row.role, row.index) == ("tokenizer_worker", 1)]
        assert row.restarts >= 4
        assert row.last_exit is not None
        assert row.last_exit.exit_code == 1
        assert len(took_s) < 5000, "it flaps no more, or the router does not come back"
    assert router.life.generation == 2
    assert statistics.median(took_s) < 0.2
    assert max(took_s) < 2.0
    told = len(running.lines) - lines
    assert told <= 8 * (flapping.life.restarts - restarts) + 20
    assert running.process("tokenizer_worker:0").life.generation == 1


def test_files_do_not_grow_with_restarts(make_args: MakeArgs) -> None:
    """Each life has a socket file of its own, which goes with it."""

    async def scenario() -> None:
        args = make_args(max_restarts=1000, restart_backoff_max=0.0)
        async with supervised(args) as running:
            await running.until(lambda: running.ready, 20, "ready")
            worker, directory = running.process("tokenizer_worker:0"), running.supervisor.run_dir
            before = sorted(entry.name for entry in directory.iterdir())
            descriptors = len(os.listdir("/proc/self/fd"))
            for generation in range(2, 17):
                assert worker.life.pid is not None
                os.kill(worker.life.pid, signal.SIGKILL)
                await running.until(lambda g=generation: worker.life.generation == g and worker.serves, 15, "back")
            after = sorted(entry.name for entry in directory.iterdir())
            assert [name for name in after if not name.startswith("w0.")] == [
                name for name in before if not name.startswith("w0.")
            ]
            assert [name for name in after if name.startswith("w0.")] == ["w0.16"]
            assert len(os.listdir("/proc/self/fd")) == descriptors

    asyncio.run(scenario())
