"""From launch to stop: nothing is left, whoever is killed, and whoever asks for the end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import psutil

from sglmt.errors import ExitCode
from tests.support.instance import COMMAND, Instance
from tests.support.serving import (
    Stream,
    failure_code,
    get,
    look,
    post,
    remains_of,
    streams_to,
    supervisor_pid,
    until,
)
from tests.support.wait import wait_until

SIMULATOR = ("--engine", "simulator")
LONG: dict[str, Any] = {"text": "a", "incremental_streaming_output": True}


def native(tokens: int) -> dict[str, Any]:
    """A `/generate` body for this many tokens."""
    return {**LONG, "sampling_params": {"max_new_tokens": tokens}}


def answer_of(stream: Stream) -> tuple[str, list[int]]:
    """(text, ids) of a `/generate` stream."""
    events = stream.events
    return "".join(event["text"] for event in events), [token for event in events for token in event["output_ids"]]


@contextmanager
def foreground(instance: Instance, log: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`sglmt launch` in the foreground, READY; `instance.url` is set. Ended by force if the test did not."""
    with log.open("wb") as out, subprocess.Popen(
        [COMMAND, *instance.launch_arguments(*SIMULATOR, *options)], stdout=out, stderr=out, stdin=subprocess.DEVNULL
    ) as launcher:  # fmt: skip
        try:
            wait_until(lambda: b"READY" in log.read_bytes() or launcher.poll() is not None, 60, "READY")
            snapshot = look(instance)
            instance.url, instance.pid = snapshot.url, snapshot.pid
            yield launcher
        finally:
            if launcher.poll() is None:
                launcher.kill()
            print(log.read_text(errors="replace")[-4000:])


def everything_of(instance: Instance) -> tuple[list[int], str, Path, int]:
    """What `remains_of` has to look for."""
    snapshot = look(instance)
    assert snapshot.shm is not None
    pids = [row.pid for row in snapshot.processes if row.pid is not None]
    port = urlsplit(snapshot.url).port
    assert port is not None
    return pids, snapshot.shm.name, instance.runtime_dir / instance.name, port


def test_stop_leaves_nothing(instance: Instance) -> None:
    instance.launch(*SIMULATOR)
    belongings = everything_of(instance)
    assert len(remains_of(*belongings)) == len(belongings[0]) + 3  # the check itself sees all of it
    assert instance.stop().returncode == 0
    assert remains_of(*belongings) == []
    assert instance.stop().returncode == ExitCode.NOT_RUNNING


def test_one_worker_gives_the_answers_of_many(instance: Instance, tmp_path: Path) -> None:
    bodies = [native(tokens) for tokens in (1, 20, 60)]
    texts: list[list[str]] = []
    for workers in ("1", "8"):
        with Instance(tmp_path / workers) as one:
            one.launch(*SIMULATOR, "--workers", workers, "--simulator-step-ms", "2")
            texts.append([post(one, "/generate", **body).json()["text"] for body in bodies])
            roles = [row["role"] for row in one.processes()]
            assert roles.count("tokenizer_worker") == int(workers)
            assert roles.count("router") == (0 if workers == "1" else 1)
            if workers == "8":
                serve_from_many_workers(one)
    assert texts[0] == texts[1]


def serve_from_many_workers(instance: Instance) -> None:
    """Three streams for each worker at once: they spread."""

    async def scenario() -> None:
        async with streams_to(instance) as streams:
            opened = [streams.start("/generate", **native(200)) for _ in range(24)]
            await until(lambda: all(stream.chunks for stream in opened), 20, "all streams run")
            busy_workers = [row for row in look(instance).processes if row.role == "tokenizer_worker" and row.in_flight]
            assert len(busy_workers) >= 6  # connections are spread by their number, not dealt out
            assert len({answer_of(await stream.finish())[0] for stream in opened}) == 1

    asyncio.run(scenario())


def test_a_killed_worker_costs_its_own_requests_only(instance: Instance) -> None:
    instance.launch(*SIMULATOR, "--simulator-step-ms", "10")
    body = native(300)
    expected = post(instance, "/generate", **body).json()

    async def scenario() -> tuple[list[Stream], int]:
        async with streams_to(instance) as streams:
            opened = [streams.start("/generate", **body) for _ in range(16)]
            await until(lambda: all(stream.chunks > 3 for stream in opened), 20, "all streams run")
            victim = next(row for row in look(instance).processes if row.role == "tokenizer_worker" and row.index == 1)
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGKILL)
            await until(lambda: sum(s.failure is not None for s in opened) == victim.in_flight, 2, "resets at once")
            await until(lambda: look(instance).totals.running == 16 - victim.in_flight, 2, "their slots are free")
            for stream in opened:
                await stream.finish()
            return opened, victim.in_flight

    opened, held = asyncio.run(scenario())
    assert 0 < held < 16
    broken = [stream for stream in opened if stream.failure is not None]
    assert len(broken) == held
    for stream in set(opened) - set(broken):
        assert answer_of(stream) == (expected["text"], expected["output_ids"])
    wait_until(lambda: look(instance).state == "running", 20, "the worker is back")
    row = next(row for row in instance.processes("tokenizer_worker") if row["index"] == 1)
    assert (row["restarts"], row["last_exit"]["signal"]) == (1, "SIGKILL (9)")

    asyncio.run(official_client_and_a_killed_worker(instance))


async def official_client_and_a_killed_worker(instance: Instance) -> None:
    """With its default retries what does not stream succeeds; a stream raises the client's connection error."""
    ask: dict[str, Any] = {"model": "default", "prompt": "b", "max_tokens": 200}

    async def read(client: openai.AsyncOpenAI, began: list[int]) -> str:
        text = ""
        async for chunk in await client.completions.create(**ask, stream=True):
            began.append(1)
            text += chunk.choices[0].text
        return text

    async with openai.AsyncOpenAI(base_url=instance.url + "/v1", api_key="none") as client:
        expected = (await client.completions.create(**ask)).choices[0].text
        began: list[int] = []
        wholes, streams = [], []
        for _ in range(12):  # in turn, so that each worker gets both
            wholes.append(asyncio.create_task(client.completions.create(**ask)))
            streams.append(asyncio.create_task(read(client, began)))
        await until(lambda: len(began) > 50 and look(instance).totals.running == 24, 20, "all run")
        victim = next(row for row in look(instance).processes if row.role == "tokenizer_worker" and row.index == 0)
        assert victim.pid is not None
        assert 0 < victim.in_flight < 24
        os.kill(victim.pid, signal.SIGKILL)
        assert {(await whole).choices[0].text for whole in wholes} == {expected}
        results = await asyncio.gather(*streams, return_exceptions=True)
    broken = [result for result in results if isinstance(result, BaseException)]
    assert all(isinstance(error, openai.APIConnectionError) for error in broken), broken
    assert 0 < len(broken) < 12
    assert {result for result in results if isinstance(result, str)} == {expected}
    await until(lambda: look(instance).state == "running", 20, "the worker is back")


def test_a_killed_supervisor_takes_everything_with_it(instance: Instance) -> None:
    instance.launch(*SIMULATOR)
    pids, segment, _, port = everything_of(instance)

    async def scenario() -> None:
        async with streams_to(instance) as streams:
            opened = [streams.start("/generate", **native(2000)) for _ in range(4)]
            await until(lambda: all(stream.chunks for stream in opened), 20, "all streams run")
            os.kill(instance.pid, signal.SIGKILL)
            await until(lambda: all(stream.ended for stream in opened), 5, "clients are told")

    began_s = time.monotonic()
    asyncio.run(scenario())
    wait_until(
        lambda: not remains_of(pids, "no-such-segment", Path("/no-such-directory"), port), 5, "no process, port free"
    )
    assert time.monotonic() - began_s < 15
    with Instance(instance.runtime_dir, instance.name) as again:
        again.launch(*SIMULATOR, "--port", str(port))
        assert urlsplit(again.url).port == port
        assert post(again, "/generate", **native(3)).status_code == 200
        assert not (Path("/dev/shm") / segment).exists()
        new = everything_of(again)
        assert again.stop().returncode == 0
    assert remains_of(*new) == []
    assert list(instance.runtime_dir.iterdir()) == []


def test_ctrl_c_lets_streams_finish(instance: Instance, tmp_path: Path) -> None:
    with foreground(instance, tmp_path / "log") as launcher:
        belongings = everything_of(instance)
        expected = post(instance, "/generate", **native(80)).json()["text"]

        async def scenario() -> Stream:
            async with streams_to(instance) as streams:
                stream = streams.start("/generate", **native(80))
                await until(lambda: stream.chunks > 2, 20, "the stream runs")
                launcher.send_signal(signal.SIGINT)
                return await stream.finish()

        assert answer_of(asyncio.run(scenario()))[0] == expected
        assert launcher.wait(20) == 0
    assert remains_of(*belongings) == []


def test_a_terminated_instance_refuses_new_requests_and_finishes_the_running_ones(
    instance: Instance, tmp_path: Path
) -> None:
    with foreground(instance, tmp_path / "log") as launcher:

        async def scenario() -> Stream:
            async with streams_to(instance) as streams:
                stream = streams.start("/generate", **native(120))
                await until(lambda: stream.chunks > 2, 20, "the stream runs")
                launcher.send_signal(signal.SIGTERM)
                await until(lambda: look(instance).state == "draining", 2, "it drains")
                assert [await asyncio.to_thread(refusal, instance) for _ in range(4)] == [503] * 4
                assert (await asyncio.to_thread(get, instance, "/ready")).status_code == 503
                assert (await asyncio.to_thread(get, instance, "/health")).status_code == 200
                return await stream.finish()

        stream = asyncio.run(scenario())
        assert stream.events[-1]["meta_info"]["completion_tokens"] == 120
        assert launcher.wait(20) == 0
    assert list(instance.runtime_dir.iterdir()) == []


def refusal(instance: Instance) -> int:
    """The status a new request gets, at once."""
    answer = httpx.post(instance.url + "/generate", json=native(1), timeout=1.0)
    assert answer.headers["connection"] == "close"
    return answer.status_code


def test_what_is_not_done_by_the_drain_deadline_is_told_so(instance: Instance, tmp_path: Path) -> None:
    with foreground(instance, tmp_path / "log", "--drain-timeout", "1") as launcher:

        async def scenario() -> tuple[Stream, Stream, httpx.Response]:
            async with streams_to(instance) as streams, httpx.AsyncClient(timeout=30) as client:
                stream = streams.start("/generate", **native(4000))
                chat = streams.start(
                    "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=4000
                )
                whole = asyncio.create_task(client.post(instance.url + "/generate", json=native(4000)))
                await until(lambda: stream.chunks > 2 and chat.chunks > 2, 20, "the streams run")
                await until(lambda: look(instance).totals.running == 3, 5, "all three run")
                launcher.send_signal(signal.SIGTERM)
                return await stream.finish(), await chat.finish(), await whole

        began_s = time.monotonic()
        stream, chat, whole = asyncio.run(scenario())
        for ended in (stream, chat):
            assert failure_code(ended) == "shutting_down"
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "shutting_down")
        assert launcher.wait(10) == 0
        assert time.monotonic() - began_s < 20
    assert list(instance.runtime_dir.iterdir()) == []


def test_a_group_signal_does_not_bypass_the_drain(instance: Instance, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as out, subprocess.Popen(
        [COMMAND, *instance.launch_arguments(*SIMULATOR)], stdout=out, stderr=out, stdin=subprocess.DEVNULL,
        start_new_session=True,
    ) as launcher:  # fmt: skip
        wait_until(lambda: b"READY" in log.read_bytes(), 60, "READY")
        instance.url = look(instance).url

        async def scenario() -> Stream:
            async with streams_to(instance) as streams:
                stream = streams.start("/generate", **native(60))
                await until(lambda: stream.chunks > 2, 20, "the stream runs")
                os.killpg(launcher.pid, signal.SIGINT)
                os.killpg(launcher.pid, signal.SIGTERM)
                return await stream.finish()

        assert asyncio.run(scenario()).events[-1]["meta_info"]["completion_tokens"] == 60
        assert launcher.wait(20) == 0


def test_launches_that_cannot_work_say_why(instance: Instance, tmp_path: Path) -> None:
    done = instance.run(*instance.launch_arguments("--detach", "--model-path", str(tmp_path / "none.gguf")))
    assert done.returncode == ExitCode.CONFIG
    assert "none.gguf" in done.stderr
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 64)
    done = instance.run(*instance.launch_arguments("--detach", "--model-path", str(broken)))
    assert done.returncode == ExitCode.MODEL
    assert "broken.gguf" in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        began_s = time.monotonic()
        done = instance.run(*instance.launch_arguments("--detach", *SIMULATOR, "--port", port))
        assert time.monotonic() - began_s < 5
    assert done.returncode == ExitCode.PORT
    assert port in done.stderr
    assert list(instance.runtime_dir.iterdir()) == []


def test_check_with_the_real_model_starts_nothing(instance: Instance) -> None:
    before = {process.pid for process in psutil.process_iter()}
    done = instance.run(*instance.launch_arguments("--check", "--workers", "3"))
    assert done.returncode == 0, done.stderr
    assert "SmolLM2" in done.stdout
    assert "3 tokenizer_workers" in done.stdout
    assert supervisor_pid(instance) == 0
    new = [process for process in psutil.process_iter() if process.pid not in before]
    assert not [process for process in new if instance.name in " ".join(process.cmdline())]
    assert list(instance.runtime_dir.iterdir()) == []
