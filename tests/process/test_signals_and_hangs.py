"""Signals to everybody at once, processes that hang or do not end, two generations on one port, and where all run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.support.instance import COMMAND, Instance
from tests.support.serving import is_gone, look, streams_to, until
from tests.support.wait import wait_until

SIMULATOR = ("--engine", "simulator")


def native(tokens: int) -> dict[str, Any]:
    """A `/generate` body for this many tokens, 20 ms each."""
    return {"text": "a", "incremental_streaming_output": True, "sampling_params": {"max_new_tokens": tokens}}


@contextmanager
def own_group(instance: Instance, log: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`sglmt launch` in the foreground, in a process group of its own as a shell's job is; READY."""
    with log.open("wb") as out, subprocess.Popen(
        [COMMAND, *instance.launch_arguments(*SIMULATOR, *options)], stdout=out, stderr=out, stdin=subprocess.DEVNULL,
        process_group=0,
    ) as launcher:  # fmt: skip
        try:
            wait_until(lambda: b"READY" in log.read_bytes() or launcher.poll() is not None, 60, "READY")
            instance.url = look(instance).url
            yield launcher
        finally:
            if launcher.poll() is None:
                launcher.kill()


@pytest.mark.parametrize(
    "sent",
    [[signal.SIGTERM], [signal.SIGINT, signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]],
    ids=["TERM", "INT then TERM", "TERM then INT"],
)
def test_signals_to_the_group_are_one_request_to_stop(
    instance: Instance, tmp_path: Path, sent: list[signal.Signals]
) -> None:
    log = tmp_path / "log"
    with own_group(instance, log) as launcher:

        async def scenario() -> list[int]:
            async with streams_to(instance) as streams:
                opened = [streams.start("/generate", **native(60)) for _ in range(10)]
                await until(lambda: all(stream.chunks > 2 for stream in opened), 20, "the streams run")
                for number in sent:
                    os.killpg(launcher.pid, number)
                    await asyncio.sleep(0.05)
                ends = [await stream.finish() for stream in opened]
                return [stream.events[-1]["meta_info"]["completion_tokens"] for stream in ends]

        assert asyncio.run(scenario()) == [60] * 10
        assert launcher.wait(20) == 0
    text = log.read_text()
    assert text.count("stopping; another one stops at once") == 1
    assert "killing everything now" not in text


def test_a_stopped_worker_is_replaced_and_the_others_are_left_alone(instance: Instance) -> None:
    """A stream that lasts several heartbeat limits, and a worker without work, are not hangs."""
    instance.launch(*SIMULATOR, "--workers", "3", "--heartbeat-timeout", "1")
    before = {row["index"]: row for row in instance.processes("tokenizer_worker")}

    async def scenario() -> tuple[int, int]:
        async with streams_to(instance) as streams:
            stream = streams.start("/generate", **native(250))
            await until(lambda: stream.chunks > 2, 20, "the stream runs")
            rows = [row for row in look(instance).processes if row.role == "tokenizer_worker"]
            busy = next(row.index for row in rows if row.in_flight)
            victim = next(row for row in rows if row.index != busy)
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGSTOP)
            began_s = time.monotonic()
            await until(lambda: generation_of(instance, victim.index) == 2, 10, "the stopped one is replaced")
            assert time.monotonic() - began_s < 6
            events = (await stream.finish()).events
            assert events[-1]["meta_info"]["completion_tokens"] == 250
            return busy, victim.index

    _, victim = asyncio.run(scenario())
    for row in instance.processes("tokenizer_worker"):
        if row["index"] != victim:
            assert (row["pid"], row["generation"]) == (before[row["index"]]["pid"], 1)
    told = [line for line in instance.logs("supervisor").splitlines() if f"pid {before[victim]['pid']}" in line]
    assert any("stopped" in line for line in told)
    assert any("SIGKILL" in line for line in told)


def generation_of(instance: Instance, index: int) -> int:
    rows = [row for row in look(instance).processes if (row.role, row.index) == ("tokenizer_worker", index)]
    return rows[0].generation if rows and rows[0].state == "RUNNING" else 0


def test_stop_names_what_it_had_to_kill(instance: Instance) -> None:
    instance.launch(*SIMULATOR, "--workers", "1")
    (router,) = instance.processes("detokenizer")
    os.kill(router["pid"], signal.SIGSTOP)
    done = instance.stop("--timeout", "1")
    assert done.returncode == 0, done.stderr
    assert f"was killed: detokenizer:0 (pid {router['pid']})" in done.stdout


def test_all_processes_stay_in_the_launcher_s_cgroup(instance: Instance) -> None:
    instance.launch(*SIMULATOR, "--workers", "2")
    supervisor = psutil.Process(instance.pid)
    pids = [process.pid for process in supervisor.children(recursive=True)]
    assert len(pids) == 6  # with the zygote
    groups = {Path(f"/proc/{pid}/cgroup").read_text() for pid in [*pids, instance.pid, os.getpid()]}
    assert len(groups) == 1
    assert all(psutil.Process(pid).ppid() == instance.pid for pid in pids)


def test_a_relaunch_after_a_kill_serves_alone(instance: Instance) -> None:
    instance.launch(*SIMULATOR, "--simulator-step-ms", "0")
    port = urlsplit(instance.url).port
    old = {instance.pid, *(row["pid"] for row in instance.processes())}
    os.kill(instance.pid, signal.SIGKILL)
    with Instance(instance.runtime_dir, instance.name) as again:
        again.launch(*SIMULATOR, "--simulator-step-ms", "0", "--port", str(port))
        with httpx.Client(timeout=20, limits=httpx.Limits(max_keepalive_connections=0)) as client:
            answers = [client.post(f"{again.url}/generate", json=native(2)).status_code for _ in range(150)]
        assert answers == [200] * 150
        new = {row["pid"] for row in again.processes()}
        holders = {one.pid for one in psutil.net_connections("tcp") if one.laddr and one.laddr.port == port and one.pid}
        assert holders <= new
        assert not old & new
        wait_until(lambda: all(map(is_gone, old)), 5, "the killed run's processes are gone")
        assert again.stop().returncode == 0
