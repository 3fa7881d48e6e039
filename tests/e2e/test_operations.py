"""Scaling, restarts, reloads and draining of a running instance: no request notices (field cases 92, 95, 96)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from sglmt.errors import ExitCode
from tests.support.instance import COMMAND, Instance
from tests.support.serving import Stream, get, look, post, streams_to, until
from tests.support.steady_load import steady_load
from tests.support.wait import wait_until

SIMULATOR = ("--engine", "simulator", "--simulator-step-ms", "10")
SHORT = {"text": "a", "sampling_params": {"max_new_tokens": 3}}
WORKER = "tokenizer_worker"


def native(number: int, tokens: int) -> dict[str, Any]:
    """A `/generate` body; each number has an answer of its own."""
    return {
        "text": f"{number} a", "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
        "incremental_streaming_output": True,
    }  # fmt: skip


def text_of(stream: Stream) -> str:
    return "".join(event["text"] for event in stream.events)


def operate(instance: Instance, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`sglmt VERB … --name NAME`."""
    return instance.run(verb, "--name", instance.name, "--runtime-dir", str(instance.runtime_dir), *arguments)


async def operate_meanwhile(instance: Instance, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same while streams are read; it must succeed."""
    done = await asyncio.to_thread(operate, instance, verb, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def workers(instance: Instance) -> dict[int, int | None]:
    """Index → pid of those that hold a place."""
    return {row.index: row.pid for row in look(instance).processes if row.role == WORKER and row.state == "RUNNING"}


@pytest.fixture
def served(instance: Instance) -> Instance:
    """Two workers in multi mode."""
    return instance.launch(*SIMULATOR, "--workers", "2")


async def answers_stay_exact(instance: Instance, act: Callable[[], Any], streams: int = 24, tokens: int = 250) -> None:
    """Streams run while `act()` (a coroutine) is carried out; each brings what an undisturbed request brings."""
    async with streams_to(instance) as opener:
        opened = [opener.start("/generate", **native(number, tokens)) for number in range(streams)]
        await until(lambda: all(stream.chunks > 3 for stream in opened), 20, "all streams run")
        await act()
        ended = [await stream.finish() for stream in opened]
    async with httpx.AsyncClient(timeout=60) as client:
        url = instance.url + "/generate"
        wholes = await asyncio.gather(*(client.post(url, json=native(number, tokens)) for number in range(streams)))
    for stream, whole in zip(ended, wholes, strict=True):
        assert text_of(stream) == whole.json()["text"]


def test_scaling_up_and_down_cuts_no_stream_and_refuses_no_connection(served: Instance) -> None:
    async def act() -> None:
        async with steady_load(served, 30, SHORT) as load:
            await operate_meanwhile(served, "scale", "4")
            assert sorted(workers(served)) == [0, 1, 2, 3]
            done = await operate_meanwhile(served, "scale", "1")
            assert "4 to 1 workers" in done.stdout
            assert sorted(workers(served)) == [0]
        assert load.problems == []
        assert load.answers > 10

    asyncio.run(answers_stay_exact(served, act))
    snapshot = look(served)
    assert (snapshot.workers.requested, snapshot.workers.ready, snapshot.state) == (1, 1, "running")
    assert snapshot.mode == "multi"
    assert snapshot.totals.counters.get("unroutable", 0) == 0


def test_kept_alive_clients_move_over_with_their_next_answer(instance: Instance) -> None:
    instance.launch(*SIMULATOR, "--workers", "4")

    async def scenario() -> None:
        limits = httpx.Limits(max_keepalive_connections=1)
        clients = [httpx.AsyncClient(timeout=20, limits=limits) for _ in range(32)]
        url = instance.url + "/generate"
        try:
            await asyncio.gather(*(client.post(url, json=SHORT) for client in clients))
            held = {row.index: row.connections for row in look(instance).processes if row.role == WORKER}
            assert sum(held.values()) == 32
            assert held[0] < 20, held
            async with streams_to(instance) as opener:  # with these, the workers have something to finish
                opened = [opener.start("/generate", **native(number, 300)) for number in range(16)]
                await until(lambda: all(stream.chunks for stream in opened), 20, "all streams run")
                scaling = asyncio.create_task(operate_meanwhile(instance, "scale", "1"))
                await until(lambda: len(workers(instance)) == 1, 10, "the others leave")
                answers = await asyncio.gather(*(client.post(url, json=SHORT) for client in clients))
                assert [answer.status_code for answer in answers] == [200] * 32
                closed = [answer for answer in answers if answer.headers.get("connection") == "close"]
                assert len(closed) == sum(held.values()) - held[0]
                again = await asyncio.gather(*(client.post(url, json=SHORT) for client in clients))
                assert {answer.headers.get("connection") for answer in again} == {None}
                await scaling
                for stream in opened:
                    assert (await stream.finish()).events[-1]["meta_info"]["completion_tokens"] == 300
        finally:
            for client in clients:
                await client.aclose()

    asyncio.run(scenario())


def test_connections_are_balanced_over_eight_workers(instance: Instance) -> None:
    instance.launch(*SIMULATOR, "--workers", "8")
    address = urlsplit(instance.url)
    assert address.hostname is not None
    assert address.port is not None
    place = (address.hostname, address.port)

    def connections(word: str) -> list[int]:
        rows = [row for row in look(instance).processes if row.role == WORKER]
        return [row.counters.get(word, 0) if word != "open" else row.connections for row in rows]

    burst = [socket.create_connection(place, timeout=10) for _ in range(160)]
    try:
        wait_until(lambda: sum(connections("open")) == 160, 10, "all are accepted")
        held = connections("open")
        assert max(held) <= 160 / 8 * 1.3, held
    finally:
        for connection in burst:
            connection.close()
    wait_until(lambda: sum(connections("open")) == 0, 10, "all are closed")

    async def fresh() -> None:
        async def one() -> None:
            reader, writer = await asyncio.open_connection(*place)
            writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()

        for _ in range(50):
            await asyncio.gather(*(one() for _ in range(16)))

    before = connections("connections_total")
    asyncio.run(fresh())
    wait_until(lambda: sum(connections("connections_total")) - sum(before) == 800, 10, "all are counted")
    spread = [now - then for now, then in zip(connections("connections_total"), before, strict=True)]
    assert max(spread) <= 800 / 8 * 1.3, spread


def test_rolling_restart_under_load_fails_no_request(served: Instance) -> None:
    async def scenario() -> None:
        before = workers(served)
        async with (
            steady_load(served, 50, SHORT) as fresh,
            steady_load(served, 10, SHORT, keep_alive=True) as kept,
        ):
            await until(lambda: fresh.answers > 20, 20, "the load runs")
            await operate_meanwhile(served, "restart", WORKER)
            after = workers(served)
            await operate_meanwhile(served, "restart", f"{WORKER}:1")
        assert fresh.problems == []
        assert kept.problems == []
        assert sorted(after) == [0, 1]
        assert not set(before.values()) & set(after.values())
        assert workers(served)[0] == after[0]
        assert workers(served)[1] != after[1]

    asyncio.run(scenario())
    assert [row.restarts for row in look(served).processes if row.role == WORKER] == [0, 0]


def test_restart_of_everything_leaves_streams_exact(served: Instance) -> None:
    async def act() -> None:
        before = {row.role: row.pid for row in look(served).processes}
        for role in ("router", "detokenizer", "scheduler", "all"):
            await operate_meanwhile(served, "restart", role)
        after = {row.role: row.pid for row in look(served).processes}
        assert after["supervisor"] == before["supervisor"]
        assert all(after[role] != before[role] for role in before if role != "supervisor")

    asyncio.run(answers_stay_exact(served, act))


def test_restart_names_what_there_is(served: Instance) -> None:
    done = operate(served, "restart", "tokenizer_worker:7")
    assert done.returncode == ExitCode.USAGE
    assert "there is no such process; roles are: detokenizer, router, scheduler, tokenizer_worker" in done.stderr


def test_scale_limits_and_signals(served: Instance) -> None:
    before = look(served)
    for count in ("0", "-1", "1000"):
        done = operate(served, "scale", "--", count)
        assert done.returncode == ExitCode.CONFIG, done.stderr
        assert "can have 1 to 128" in done.stderr
    assert look(served).workers == before.workers
    for _ in range(2):
        os.kill(served.pid, signal.SIGTTIN)
        wait_until(lambda: look(served).operation or look(served).workers.requested > 2, 5, "the signal is noticed")
    wait_until(lambda: look(served).workers.ready == 4, 20, "two more workers serve")
    assert operate(served, "reload").returncode == 0
    assert look(served).workers.requested == 4  # live scaling outlives a reload
    for _ in range(50):
        os.kill(served.pid, signal.SIGTTOU)
    wait_until(lambda: look(served).workers.requested < 4 and not look(served).operation, 20, "some of them leave")
    for _ in range(3):
        os.kill(served.pid, signal.SIGTTOU)
        wait_until(lambda: not look(served).operation, 20, "it is settled")
    wait_until(lambda: look(served).workers.requested == 1, 20, "one is left, never none")
    assert look(served).state == "running"


def test_single_mode_cannot_be_scaled(instance: Instance) -> None:
    instance.launch(*SIMULATOR, "--workers", "1")
    done = operate(instance, "scale", "2")
    assert done.returncode == ExitCode.CONFIG
    assert "--router always" in done.stderr
    os.kill(instance.pid, signal.SIGTTIN)
    wait_until(lambda: "--router always" in instance.logs(), 5, "the signal is answered in the log")
    asyncio.run(answers_stay_exact(instance, lambda: operate_meanwhile(instance, "restart"), streams=8))
    assert look(instance).workers.ready == 1


def test_reload_applies_what_can_and_refuses_the_rest(instance: Instance, tmp_path: Path) -> None:
    config = tmp_path / "sglmt.toml"
    config.write_text('workers = 2\napi_key = ["one"]\nmax_prompts_per_request = 4\n')
    instance.launch(*SIMULATOR, "--config", str(config))

    def status_for(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(instance.url + "/generate", json=SHORT, headers=headers, timeout=20).status_code

    assert (status_for("one"), status_for("two")) == (200, 401)
    before = workers(instance)
    for broken, code, words in (
        ("workers = 2\nworkers = [\n", ExitCode.CONFIG, "not a TOML file"),
        ('workers = 2\napi_key = ["one"]\nport = 1234\n', ExitCode.OK, ""),
        ('workers = 2\nengine_threads = 1\nmodel_path = "/nowhere"\n', ExitCode.CONFIG, "no such file"),
        ("workers = 2\nengine_threads = 1\n", ExitCode.CONFIG, "--engine-threads"),
        ('workers = 2\ntokenizer_path = "/nowhere"\n', ExitCode.CONFIG, "--tokenizer-path"),
        ("workers = 1\n", ExitCode.CONFIG, "--router always"),
    ):
        config.write_text(broken)
        done = operate(instance, "reload")
        assert done.returncode == code, done.stdout + done.stderr
        assert words in done.stderr
        if code:
            assert workers(instance) == before
            assert status_for("one") == 200
        before = workers(instance)
    config.write_text('workers = 3\napi_key = ["two"]\nmax_prompts_per_request = 1\ndrain_timeout = 7\n')
    done = operate(instance, "reload")
    assert done.returncode == 0, done.stderr
    assert "changed: workers, max_prompts_per_request, drain_timeout, api_key" in done.stdout
    assert "two" not in done.stdout
    assert (status_for("one"), status_for("two")) == (401, 200)
    after = workers(instance)
    assert sorted(after) == [0, 1, 2]
    assert not set(before.values()) & set(after.values())
    os.kill(instance.pid, signal.SIGHUP)
    wait_until(lambda: not set(workers(instance).values()) & set(after.values()), 20, "HUP replaces all workers")
    wait_until(lambda: look(instance).operation is None, 20, "the reload ends")


def test_drain_serves_what_runs_and_takes_nothing_new(served: Instance) -> None:
    async def scenario() -> None:
        async with streams_to(served) as opener:
            opened = [opener.start("/generate", **native(number, 200)) for number in range(8)]
            await until(lambda: all(stream.chunks for stream in opened), 20, "all streams run")
            done = await operate_meanwhile(served, "drain")
            assert "requests run" in done.stdout
            refused = await asyncio.to_thread(post, served, "/generate", **SHORT)
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert "retry-after" in refused.headers
            assert (await asyncio.to_thread(get, served, "/ready")).status_code == 503
            assert (await asyncio.to_thread(get, served, "/health")).status_code == 200
            for stream in opened:
                assert (await stream.finish()).events[-1]["meta_info"]["completion_tokens"] == 200

    asyncio.run(scenario())
    done = operate(served, "drain", "--wait", "5")
    assert (done.returncode, done.stdout) == (0, "draining; nothing runs\n")
    assert served.run("status", served.name, "--runtime-dir", str(served.runtime_dir)).returncode == ExitCode.STOPPING
    assert served.stop().returncode == 0


def test_operations_at_the_same_time_are_done_one_after_the_other(served: Instance) -> None:
    async def scenario() -> None:
        async with steady_load(served, 20, SHORT) as load:
            await asyncio.gather(
                operate_meanwhile(served, "restart", WORKER),
                operate_meanwhile(served, "restart", WORKER),
                operate_meanwhile(served, "scale", "3"),
                operate_meanwhile(served, "restart", "router"),
                operate_meanwhile(served, "reload"),
            )
        assert load.problems == []

    asyncio.run(scenario())
    assert sorted(workers(served)) == [0, 1, 2]


def test_workers_are_replaced_after_their_lifetime(instance: Instance) -> None:
    async def scenario() -> None:
        async with steady_load(instance, 20, SHORT) as load:
            first = workers(instance)
            await until(
                lambda: len(workers(instance)) == 2 and not set(workers(instance).values()) & set(first.values()),
                40, "both are replaced",
            )  # fmt: skip
        assert load.problems == []

    instance.launch(*SIMULATOR, "--workers", "2", "--max-worker-lifetime", "4")
    asyncio.run(scenario())
    assert "--max-worker-lifetime 4" in instance.logs()


def test_a_terminal_that_goes_away_ends_the_instance_and_a_hangup_by_hand_reloads_it(instance: Instance) -> None:
    ours, theirs = os.openpty()
    os.set_blocking(ours, False)

    def be_in_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    command = [str(COMMAND), *instance.launch_arguments(*SIMULATOR, "--no-live")]
    launcher = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, preexec_fn=be_in_terminal
    )
    os.close(theirs)
    shown = b""

    def is_ready() -> bool:
        nonlocal shown
        shown += read_all(ours)
        return b"READY" in shown

    try:
        wait_until(is_ready, 60, "READY")
        before = workers(instance)
        os.kill(launcher.pid, signal.SIGHUP)
        wait_until(lambda: not set(workers(instance).values()) & set(before.values()), 30, "HUP replaces all workers")
        wait_until(lambda: look(instance).operation is None, 20, "the reload ends")
    finally:
        os.close(ours)  # the kernel sends HUP
        try:
            code = launcher.wait(20)
        finally:
            launcher.kill()
            launcher.wait()
    assert code == 0, shown[-2000:].decode(errors="replace")


def read_all(fd: int) -> bytes:
    """What is there now."""
    parts: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while part := os.read(fd, 65536):
            parts.append(part)
    return b"".join(parts)
