"""Every answer finds the connection that asked, whatever is refused, aborted, stopped or gone: field cases."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.support.instance import Instance
from tests.support.serving import (
    Stream,
    busy,
    chat_text,
    events_of,
    look,
    post,
    stopped,
    streams_to,
    until,
)
from tests.support.wait import wait_until

SIMULATOR = ("--engine", "simulator", "--simulator-step-ms", "10")
TEXTS = (
    "Tell me about the sea.",
    "鑫龘 是什么意思？",
    "Почему небо голубое?",
    "कृपया एक कहानी सुनाओ",
    "🔥👩‍👩‍👧‍👦🇫🇷",
    "สวัสดีชาวโลก",
    "cafe\u0301 naïve",
    "مرحبا بالعالم",
)


def native(tokens: int, **more: Any) -> dict[str, Any]:
    """A `/generate` body."""
    return {"text": "a", "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}, **more}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with Instance(runtime_dir=Path(tmp_path_factory.mktemp("s"))) as made:
        yield made.launch(*SIMULATOR, "--workers", "4", "--detokenizers", "2")


@pytest.fixture(autouse=True)
def nothing_unexplained(request: pytest.FixtureRequest) -> Iterator[None]:
    """No message without an address, none that cannot be read, and nothing in flight afterwards."""
    yield
    if "served" in request.fixturenames:
        instance: Instance = request.getfixturevalue("served")
        wait_until(lambda: not busy(instance), 5, "nothing is left in flight")
        counters = look(instance).totals.counters
        assert (counters.get("unroutable", 0), counters.get("undecodable", 0)) == (0, 0)


def test_concurrent_streams_of_many_scripts_are_byte_exact(served: Instance) -> None:
    def body(number: int) -> dict[str, Any]:
        content = f"{TEXTS[number % len(TEXTS)]} {number}"
        return {"messages": [{"role": "user", "content": content}], "max_tokens": 30 + 5 * number}

    async def scenario() -> tuple[list[list[dict[str, Any]]], list[httpx.Response]]:
        async with streams_to(served) as streams, httpx.AsyncClient(timeout=60) as client:
            opened = [streams.start("/v1/chat/completions", **body(number)) for number in range(32)]
            await until(lambda: all(stream.chunks for stream in opened), 20, "all streams run")
            rows = [row for row in look(served).processes if row.role == "tokenizer_worker"]
            assert all(row.in_flight for row in rows), "some worker has no stream"
            streamed = [(await stream.finish()).events for stream in opened]
            url = served.url + "/v1/chat/completions"
            return streamed, await asyncio.gather(*(client.post(url, json=body(number)) for number in range(32)))

    streamed, wholes = asyncio.run(scenario())
    assert len({event["id"] for events in streamed for event in events}) == 32
    assert len({whole.json()["id"] for whole in wholes}) == 32
    for number, (events, answer) in enumerate(zip(streamed, wholes, strict=True)):
        whole = answer.json()
        assert chat_text(events) == whole["choices"][0]["message"]["content"]
        assert whole["usage"]["completion_tokens"] == 30 + 5 * number


def test_a_full_queue_is_told_at_once_and_batches_work_from_the_first_request(instance: Instance) -> None:
    instance.launch(*SIMULATOR, "--max-running-requests", "2", "--max-queued-requests", "2")
    several = post(instance, "/generate", text=["a", "b", "c"], sampling_params={"max_new_tokens": 4}).json()
    assert len({each["meta_info"]["id"] for each in several}) == len(several) == 3
    assert all(each["meta_info"]["completion_tokens"] == 4 for each in several)
    params = {"max_new_tokens": 4, "n": 2}
    for text, count in (("a", 2), (["a", "b"], 4)):
        body: dict[str, Any] = {"text": text, "sampling_params": params}
        events = events_of(post(instance, "/generate", **body, stream=True).text)
        assert {event["index"] for event in events} == set(range(count))
        assert sum(event["meta_info"]["finish_reason"] is not None for event in events) == count
        assert len(post(instance, "/generate", **body).json()) == count
    answer = post(instance, "/v1/completions", prompt=["a", "b"], n=2, max_tokens=4).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 16
    for stream in (False, True):
        asyncio.run(overload(instance, stream))
    asyncio.run(leave_the_queue(instance))
    assert look(instance).totals.counters.get("unroutable", 0) == 0


async def overload(instance: Instance, stream: bool) -> None:
    """Twelve at once where four have room: eight are refused, the four are answered."""
    body = {"prompt": "hi", "max_tokens": 150, "stream": stream}
    async with httpx.AsyncClient(timeout=30) as client:
        began_s = asyncio.get_running_loop().time()
        refused_after_s: list[float] = []

        async def ask() -> httpx.Response:
            answer = await client.post(instance.url + "/v1/completions", json=body)
            if answer.status_code != 200:
                refused_after_s.append(asyncio.get_running_loop().time() - began_s)
            return answer

        answers = await asyncio.gather(*(ask() for _ in range(12)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(refused) == 8, [answer.status_code for answer in answers]
    assert max(refused_after_s) < 1.0
    for answer in refused:
        assert answer.status_code == 429
        assert answer.headers["content-type"] == "application/json"
        assert int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["code"] == "queue_full"
    port = urlsplit(instance.url).port
    pids = {row.pid for row in look(instance).processes if row.role == "tokenizer_worker"}

    def connections() -> list[Any]:
        return [
            each
            for each in psutil.net_connections("tcp")
            if each.pid in pids and each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED
        ]

    await until(lambda: not connections(), 5, "no connection is left open")


async def leave_the_queue(instance: Instance) -> None:
    """Clients that leave before their first token: their place in the queue is free again."""
    async with streams_to(instance) as streams:
        running = [streams.start("/generate", **native(3000)) for _ in range(2)]
        await until(lambda: all(stream.chunks for stream in running), 10, "two run")
        waiting = [streams.start("/generate", **native(3000)) for _ in range(2)]
        await until(lambda: look(instance).totals.queued == 2, 5, "two wait")
        for stream in waiting:
            assert stream.chunks == 0
            await stream.leave()
        await until(lambda: look(instance).totals.queued == 0, 2, "their places are free")
        for stream in running:
            await stream.leave()
        await until(lambda: not busy(instance), 2, "everything is free")


def test_an_id_in_use_is_refused_and_can_be_used_again(served: Instance) -> None:
    async def scenario() -> None:
        async with streams_to(served) as streams:
            for _ in range(6):
                pair = [streams.start("/generate", **native(60, rid="x")) for _ in range(2)]
                ended = [await stream.finish() for stream in pair]
                assert sorted(stream.status for stream in ended) == [200, 400]
                good, bad = sorted(ended, key=lambda stream: stream.status)
                assert good.events[-1]["meta_info"]["completion_tokens"] == 60
                assert '"duplicate_rid"' in bad.body

    asyncio.run(scenario())
    assert post(served, "/generate", text=["a", "b"], rid=["x", "x"]).status_code == 400
    assert post(served, "/generate", **native(1, rid="x")).status_code == 200


def test_an_abort_reaches_the_request_wherever_it_is(served: Instance) -> None:
    async def scenario() -> None:
        async with streams_to(served) as streams:
            for number in range(12):
                rid = f"r-{number}"
                stream = streams.start("/generate", **native(4000, rid=rid))
                await until(lambda: stream.chunks > 1, 10, "the stream runs")  # noqa: B023 - called at once
                await asyncio.to_thread(post, served, "/abort_request", rid=rid)
                async with asyncio.timeout(1):
                    await stream.finish()
                assert_aborted(stream)
            await until(lambda: not busy(served), 1, "the slots are free")

    asyncio.run(scenario())
    assert post(served, "/abort_request", rid="nobody").status_code == 200


def assert_aborted(stream: Stream) -> None:
    """It ended as what it is, and not as if it had come to its end."""
    reason = stream.events[-1]["meta_info"]["finish_reason"]
    assert (reason["type"], reason["code"]) == ("abort", "aborted")


def test_only_the_exact_id_is_aborted(served: Instance) -> None:
    async def scenario() -> None:
        async with streams_to(served) as streams:
            one, ten, other = (streams.start("/generate", **native(4000, rid=rid)) for rid in ("r-1", "r-10", "other"))
            await until(lambda: all(stream.chunks for stream in (one, ten, other)), 10, "all run")
            for body in ({"rid": ""}, {}):
                refused = await asyncio.to_thread(post, served, "/abort_request", **body)
                assert refused.status_code == 400
            await asyncio.to_thread(post, served, "/abort_request", rid="r-1")
            await one.finish()
            assert_aborted(one)
            before = ten.chunks, other.chunks
            await until(lambda: ten.chunks > before[0] + 5 and other.chunks > before[1] + 5, 5, "the others go on")
            await asyncio.to_thread(post, served, "/abort_request", abort_all=True)
            for stream in (ten, other):
                assert_aborted(await stream.finish())

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_is_gone_is_forgotten(served: Instance, how: str) -> None:
    lines_before = len(served.logs("-n", "2000").splitlines())
    parts = urlsplit(served.url)
    body = b'{"text":"a","stream":true,"sampling_params":{"max_new_tokens":4000,"ignore_eos":true}}'
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    for _ in range(5):
        with socket.create_connection((parts.hostname, parts.port), timeout=10) as connection:
            connection.sendall(head % len(body) + body)
            assert b"200 OK" in connection.recv(65536)
            if how == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: not busy(served), 2, "slot, text state and worker state are gone")
    assert len(served.logs("-n", "2000").splitlines()) - lines_before <= 5


def test_a_stopped_worker_stalls_nobody_else(instance: Instance) -> None:
    instance.launch(*SIMULATOR, "--workers", "3", "--heartbeat-timeout", "2")
    body = native(300, incremental_streaming_output=True)
    expected = post(instance, "/generate", **body).json()["output_ids"]

    async def scenario() -> None:
        async with streams_to(instance) as streams:
            opened = [streams.start("/generate", **body) for _ in range(12)]
            await until(lambda: all(stream.chunks > 5 for stream in opened), 20, "all streams run")
            victim = next(row for row in look(instance).processes if row.role == "tokenizer_worker" and row.index == 1)
            assert victim.pid is not None
            with stopped(victim.pid):  # a pause that streams survive
                marks = [stream.chunks for stream in opened]
                await until(
                    lambda: sum(s.chunks > m + 60 for s, m in zip(opened, marks, strict=True)) == 12 - victim.in_flight,
                    10, "the others go on",
                )  # fmt: skip
            for stream in opened:
                await stream.finish()
                ids = [token for event in stream.events for token in event["output_ids"]]
                assert ids == expected
            assert sum(stream.longest_gap_s < 1.0 for stream in opened) >= 12 - victim.in_flight

            opened = [streams.start("/generate", **native(3000)) for _ in range(12)]
            await until(lambda: all(stream.chunks > 5 for stream in opened), 20, "all streams run")
            held = next(row.in_flight for row in look(instance).processes if row.pid == victim.pid)
            os.kill(victim.pid, signal.SIGSTOP)  # one that lasts: it is replaced, its requests are aborted
            await until(lambda: look(instance).totals.running == 12 - held, 10, "the engine has dropped its requests")
            await until(lambda: sum(s.failure is not None for s in opened) == held, 5, "exactly its clients are told")
            others = [stream for stream in opened if stream.failure is None]
            assert max(stream.longest_gap_s for stream in others) < 1.0

    asyncio.run(scenario())
    wait_until(lambda: look(instance).state == "running", 20, "the worker is back")
