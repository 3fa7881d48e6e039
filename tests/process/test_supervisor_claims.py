"""Name, port and leftovers: what a second launch meets, and what a killed one leaves to the next."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglmt.errors import ExitCode
from sglmt.server_args import ServerArgs
from sglmt.supervisor.rundir import find_instances
from tests.support.supervised import run_to_end, segments_of, start_apart, supervised
from tests.support.wait import wait_until

MakeArgs = Callable[..., ServerArgs]


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r")


@pytest.fixture
def make_args(base: Path) -> MakeArgs:
    def make(**options: Any) -> ServerArgs:
        return ServerArgs(**({"workers": 2, "port": 0, "name": "t", "runtime_dir": str(base)} | options))

    return make


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def apart(args: ServerArgs, plan: dict[str, dict[str, Any]] | None = None) -> Iterator[tuple[Any, list[int]]]:
    """(process, pids of its children) of a ready supervisor in a process of its own."""
    process = start_apart(args, plan or {})
    assert process.stdout is not None
    try:
        line = process.stdout.readline().split()
        assert line[:1] == ["READY"], line
        yield process, [int(pid) for pid in line[1:]]
    finally:
        process.stdout.close()
        if process.poll() is None:
            process.terminate()
        process.wait(20)


def test_taken_port_fails_before_anything_is_started(make_args: MakeArgs, base: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        begun_s = time.monotonic()
        running = asyncio.run(run_to_end(make_args(port=port)))
        assert time.monotonic() - begun_s < 2
    assert running.exit_code == ExitCode.PORT
    failure = str(running.supervisor.failure)
    assert f"127.0.0.1:{port}" in failure
    assert f"pid {os.getpid()}" in failure
    assert list(base.iterdir()) == []


def test_second_instance_of_a_name_is_refused_with_the_pid_of_the_first(make_args: MakeArgs) -> None:
    with apart(make_args()) as (first, _):
        running = asyncio.run(run_to_end(make_args()))
        assert running.exit_code == ExitCode.RESOURCE
        assert f"pid {first.pid}" in str(running.supervisor.failure)
        assert [found.alive for found in find_instances(make_args().runtime_dir)] == [True]
    assert first.returncode == 0


def test_port_of_another_instance_is_refused_also_while_that_does_not_listen(make_args: MakeArgs) -> None:
    port = free_port()

    async def scenario() -> None:
        async with supervised(make_args(port=port), {"tokenizer_worker": {"start": "hang"}}) as first:
            await first.until(first.pids, 10, "the first one starts its processes")
            begun_s = time.monotonic()
            process = start_apart(make_args(port=port, name="second"), {})
            assert process.stdout is not None
            await first.until(lambda: process.poll() is not None, 10, "the second one gives up")
            assert process.stdout.read() == ""
            process.stdout.close()
            assert process.returncode == ExitCode.PORT
            assert time.monotonic() - begun_s < 3

    asyncio.run(scenario())


def test_two_instances_of_different_names_run_side_by_side(make_args: MakeArgs, base: Path) -> None:
    with apart(make_args(name="one")), apart(make_args(name="two")):
        found = find_instances(str(base))
        assert [one.record.name for one in found] == ["one", "two"]
        assert len({one.record.url for one in found}) == 2
    assert list(base.iterdir()) == []


def test_children_of_a_killed_supervisor_end_and_the_next_launch_cleans_up(make_args: MakeArgs, base: Path) -> None:
    port = free_port()
    with apart(make_args(port=port)) as (killed, children):
        assert len(children) == 5
        killed.kill()
        killed.wait(5)
        wait_until(lambda: not any(map(psutil.pid_exists, children)), 5, "the children are gone")
    (stale,) = find_instances(str(base))
    assert not stale.alive
    (base / "t" / "w7.9").touch()
    with apart(make_args(port=port)) as (second, _):
        (found,) = find_instances(str(base))
        assert found.alive
        assert found.record.process.pid == second.pid
        assert not (base / "t" / "w7.9").exists()
        assert segments_of(killed.pid) == []
    assert list(base.iterdir()) == []


def test_child_that_outlives_its_supervisor_is_ended_by_the_next_launch(make_args: MakeArgs, base: Path) -> None:
    port = free_port()
    plan = {"tokenizer_worker:1": {"orphan": True}}
    with apart(make_args(port=port), plan) as (killed, children):
        killed.kill()
        killed.wait(5)
        (survivor,) = wait_until(
            lambda: left if len(left := list(filter(psutil.pid_exists, children))) == 1 else None,
            5,
            "one child is left",
        )
    with apart(make_args(port=port)):  # the survivor held the listening socket
        assert not psutil.pid_exists(survivor)
    assert list(base.iterdir()) == []


def test_what_a_killed_run_of_another_name_left_is_removed(make_args: MakeArgs, base: Path) -> None:
    with apart(make_args(name="dead"), {"router": {"orphan": True}}) as (killed, children):
        killed.kill()
        killed.wait(5)
        (survivor,) = wait_until(
            lambda: left if len(left := list(filter(psutil.pid_exists, children))) == 1 else None,
            5,
            "one child is left",
        )
    with apart(make_args(name="alive")):
        assert [found.record.name for found in find_instances(str(base))] == ["alive"]
        assert not psutil.pid_exists(survivor)
    assert list(base.iterdir()) == []


def test_supervisor_killed_while_it_starts_leaves_nothing_to_trip_over(make_args: MakeArgs, base: Path) -> None:
    port = free_port()
    process = start_apart(make_args(port=port, workers=8), {})
    assert process.stdout is not None
    wait_until(lambda: psutil.Process(process.pid).children(), 10, "it has spawned something")
    children = [child.pid for child in psutil.Process(process.pid).children()]
    process.kill()
    process.wait(5)
    process.stdout.close()
    wait_until(lambda: not any(map(psutil.pid_exists, children)), 5, "nothing of it is left")
    with apart(make_args(port=port)):
        pass
    assert list(base.iterdir()) == []


def test_port_is_free_again_after_connections_were_served(make_args: MakeArgs) -> None:
    """Connections closed by the server linger in TIME_WAIT; the next launch must not mind."""
    port = free_port()
    for _ in range(2):
        with apart(make_args(port=port)):
            client = socket.create_connection(("127.0.0.1", port), timeout=2)
            client.close()


def test_child_environment_and_arguments_hold_no_secret(make_args: MakeArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLMT_API_KEY", "in-the-environment")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/notify")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    async def scenario() -> None:
        async with supervised(make_args(api_key=("in-the-arguments",))) as running:
            await running.until(lambda: running.ready, 20, "ready")
            for row in running.supervisor.snapshot().processes[1:]:
                environ = dict(
                    part.split("=", 1)
                    for part in Path(f"/proc/{row.pid}/environ").read_text().split("\0")
                    if "=" in part
                )
                assert "NOTIFY_SOCKET" not in environ
                assert "in-the-" not in json.dumps(environ)
                assert "in-the-" not in Path(f"/proc/{row.pid}/cmdline").read_text()
                assert environ["CUDA_VISIBLE_DEVICES"] == ("0" if row.role == "scheduler" else "")
                assert os.getpgid(row.pid or 0) == row.pid

    asyncio.run(scenario())


def test_signal_to_the_terminal_reaches_only_the_supervisor(make_args: MakeArgs) -> None:
    with apart(make_args()) as (process, children):
        groups = {os.getpgid(pid) for pid in children}
        assert groups == set(children)
        assert os.getpgid(process.pid) not in groups
        assert {os.getsid(pid) for pid in children} == {os.getsid(process.pid)}
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 0


def test_detached_output_of_children_is_logged_in_whole_lines(make_args: MakeArgs) -> None:
    plan = {"router": {"say": ["WARNING watch out", "x" * 90_000, "plain"]}}

    async def scenario() -> None:
        async with supervised(make_args(), plan) as running:
            await running.until(lambda: running.ready and running.said("plain"), 20, "ready, and all was said")
            said = [(level, text) for level, source, text in running.lines if source == "router"]
            assert said[0] == ("warning", "watch out")
            assert said[-1] == ("info", "plain")
            assert sum(len(text) for _, text in said[1:-1]) == 90_000
            assert running.supervisor.tail(running.process("router").spec.role, 0)[-1] == "plain"

    asyncio.run(scenario())


def test_helpers_that_a_child_leaves_behind_are_ended_with_it(make_args: MakeArgs) -> None:
    """A grandchild in the child's process group must not hold the port or the pipes."""

    async def scenario() -> None:
        async with supervised(make_args(), {"scheduler": {"grandchild": True, "until": 1}}) as running:
            await running.until(lambda: running.ready, 20, "ready")
            scheduler = running.process("scheduler")
            assert scheduler.life.pid is not None
            (grandchild,) = psutil.Process(scheduler.life.pid).children()
            os.kill(scheduler.life.pid, signal.SIGKILL)
            await running.until(lambda: scheduler.life.generation == 2, 5, "restarted")
            await running.until(lambda: not _runs(grandchild), 5, "the grandchild is gone")

    asyncio.run(scenario())


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_start_apart_reports_its_own_exit_code(make_args: MakeArgs) -> None:
    process = start_apart(make_args(), {"scheduler": {"start": "failed:broken"}})
    out, _ = process.communicate(timeout=20)
    assert (out, process.returncode) == ("", ExitCode.CHILD_DEATH)
    assert isinstance(process, subprocess.Popen)
