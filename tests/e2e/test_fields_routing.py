"""Field cases of the control plane between workers, and of who gets which work (5, 10, 14, 15, 28).

One instance of eight workers and two detokenizers serves most of them; its fixture checks after each that every
message had an address and that nothing is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from sglmt.chaos.client import parse_answer
from tests.support.instance import Instance
from tests.support.serving import Stream, busy, events_of, look, post, stopped, streams_to, until
from tests.support.wait import wait_until

SIMULATOR = ("--engine", "simulator", "--simulator-step-ms", "10")
WORKERS = 8
PROBING_S = 4.0
HALTED_S = 3.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with Instance(runtime_dir=Path(tmp_path_factory.mktemp("f"))) as made:
        yield made.launch(*SIMULATOR, "--workers", str(WORKERS), "--detokenizers", "2")


@pytest.fixture(autouse=True)
def nothing_unexplained(request: pytest.FixtureRequest) -> Iterator[None]:
    """No message without an address, none that cannot be read, nothing in flight, everybody there."""
    yield
    if "served" in request.fixturenames:
        instance: Instance = request.getfixturevalue("served")
        post(instance, "/continue_generation")  # a test that failed does not take the others with it
        wait_until(lambda: not busy(instance), 5, "nothing is left in flight")
        wait_until(lambda: look(instance).state == "running", 20, "everybody is there")
        counters = look(instance).totals.counters
        assert (counters.get("unroutable", 0), counters.get("undecodable", 0)) == (0, 0)


def native(tokens: int, **more: Any) -> dict[str, Any]:
    """A `/generate` body."""
    return {"text": "a", "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}, **more}


def restarts(instance: Instance) -> int:
    return sum(row.restarts for row in look(instance).processes)


def a_worker(instance: Instance) -> int:
    """The pid of one that serves."""
    rows = look(instance).processes
    return next(row.pid for row in rows if row.role == "tokenizer_worker" and row.pid is not None)


def kill_worker(instance: Instance) -> None:
    """With SIGKILL; returns when somebody else has its place."""
    before = restarts(instance)
    os.kill(a_worker(instance), signal.SIGKILL)
    wait_until(lambda: restarts(instance) > before and look(instance).state == "running", 20, "it is replaced")


async def ask_all(instance: Instance, count: int, path: str, body: dict[str, Any] | None) -> list[httpx.Response]:
    """That many at once, each on a connection of its own; GET without a body."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=30, limits=limits) as client:
        url = instance.url + path
        return list(
            await asyncio.gather(
                *(client.get(url) if body is None else client.post(url, json=body) for _ in range(count))
            )
        )


def test_a_storm_of_probes_over_all_workers(served: Instance) -> None:
    before = restarts(served)

    async def storm() -> int:
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=30, limits=limits) as client:
            until_s = time.monotonic() + PROBING_S

            async def probe() -> int:
                answered = 0
                while time.monotonic() < until_s:
                    answer = await client.get(served.url + "/health_generate")
                    assert answer.status_code == 200, answer.text
                    answered += 1
                return answered

            return sum(await asyncio.gather(*(probe() for _ in range(64))))

    assert asyncio.run(storm()) >= 64
    assert restarts(served) == before


@pytest.mark.parametrize("mode", ["abort", "in_place"])
def test_a_pause_holds_in_every_worker_and_in_one_that_starts_meanwhile(served: Instance, mode: str) -> None:
    async def scenario() -> None:
        paused = await asyncio.to_thread(post, served, "/pause_generation", mode=mode)
        assert paused.status_code == 200, paused.text
        names = {f"tokenizer_worker:{index}" for index in range(WORKERS)}
        assert names | {"scheduler", "router"} <= set(paused.json()["confirmed"])
        tokens_before = look(served).totals.output_tokens
        async with streams_to(served) as streams:
            first = [streams.start("/generate", **native(5)) for _ in range(20)]
            await until(lambda: look(served).totals.queued == 20, 10, "all wait")
            await asyncio.to_thread(kill_worker, served)
            await until(lambda: all(stream.failure for stream in first if stream.ended), 5, "the dead one's are told")
            cut = sum(stream.ended for stream in first)
            assert look(served).totals.queued == 20 - cut
            later = [streams.start("/generate", **native(5)) for _ in range(20)]
            await until(lambda: look(served).totals.queued == 40 - cut, 10, "the later ones wait too, in all workers")
            assert look(served).totals.running == 0
            assert look(served).totals.output_tokens == tokens_before
            assert not any(stream.body for stream in (*first, *later))
            gone_on = await asyncio.to_thread(post, served, "/continue_generation")
            assert gone_on.status_code == 200, gone_on.text
            answered = [stream for stream in (*first, *later) if stream.failure is None]
            assert len(answered) == 40 - cut
            for stream in answered:
                assert (await stream.finish()).events[-1]["meta_info"]["completion_tokens"] == 5

    asyncio.run(scenario())


def test_a_worker_that_dies_does_not_hold_up_a_pause(served: Instance) -> None:
    async def scenario() -> None:
        before = restarts(served)
        pid = a_worker(served)
        os.kill(pid, signal.SIGSTOP)  # it can confirm nothing any more
        asking = asyncio.create_task(asyncio.to_thread(post, served, "/pause_generation", mode="in_place"))
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        answer = await asking
        assert answer.status_code in (200, 503), answer.text
        await until(lambda: restarts(served) > before and look(served).state == "running", 20, "it is replaced")
        gone_on = await asyncio.to_thread(post, served, "/continue_generation")
        assert gone_on.status_code == 200, gone_on.text
        answers = await ask_all(served, 16, "/generate", native(3))
        assert {answer.status_code for answer in answers} == {200}

    asyncio.run(scenario())


def test_an_adapter_is_known_to_all_workers_and_to_later_ones(served: Instance) -> None:
    ask = {"model": "a", "prompt": "x", "max_tokens": 4}

    def all_know_it(known: bool) -> set[str]:
        listed = asyncio.run(ask_all(served, 40, "/v1/models", None))
        assert {"a" in {each["id"] for each in answer.json()["data"]} for answer in listed} == {known}
        answers = asyncio.run(ask_all(served, 40, "/v1/completions", ask))
        assert {answer.status_code for answer in answers} == {200 if known else 404}
        return {answer.json()["choices"][0]["text"] for answer in answers} if known else set()

    all_know_it(False)
    assert post(served, "/load_lora_adapter", lora_name="a", lora_path="/p").status_code == 200
    with_adapter = all_know_it(True)
    plain = post(served, "/v1/completions", prompt="x", max_tokens=4).json()["choices"][0]["text"]
    assert len(with_adapter | {plain}) == 2  # one text of all workers, and not that of the model itself
    kill_worker(served)
    assert all_know_it(True) == with_adapter
    assert post(served, "/unload_lora_adapter", lora_name="a").status_code == 200
    all_know_it(False)


def test_nothing_is_lost_while_a_worker_stands_still(served: Instance) -> None:
    """Nor by a client that does not read for as long."""
    tokens = 500
    body = {**native(tokens), "incremental_streaming_output": True, "return_logprob": True}
    whole = post(served, "/generate", **body).json()

    async def scenario() -> None:
        async with streams_to(served) as streams:
            opened = [streams.start("/generate", **body) for _ in range(48)]
            await until(lambda: all(stream.chunks > 5 for stream in opened), 20, "all streams run")
            not_reading = asyncio.create_task(asyncio.to_thread(read_with_a_pause, served, body))
            rows = [row for row in look(served).processes if row.role == "tokenizer_worker" and row.in_flight]
            assert rows[0].pid is not None
            with stopped(rows[0].pid):
                await asyncio.sleep(HALTED_S)  # the length of the pause is what is tested
            for stream in opened:
                check_whole(await stream.finish())
            paused = Stream()
            paused.body, paused.ended = await not_reading, True
            check_whole(paused)

    def check_whole(stream: Stream) -> None:
        events = stream.events
        metas = [event["meta_info"] for event in events]
        assert "".join(event["text"] for event in events) == whole["text"]
        assert [token for event in events for token in event["output_ids"]] == whole["output_ids"]
        logprobs = [entry for meta in metas for entry in meta.get("output_token_logprobs", ())]
        assert logprobs == whole["meta_info"]["output_token_logprobs"]
        assert metas[-1]["completion_tokens"] == len(logprobs) == tokens

    asyncio.run(scenario())
    assert not look(served).totals.counters.get("slow_client_aborts")


def read_with_a_pause(instance: Instance, body: dict[str, Any]) -> str:
    """The events of a stream whose client, with little room for what comes, does not read for a while."""
    parts = urlsplit(instance.url)
    payload = httpx.Request("POST", instance.url, json={**body, "stream": True}).content
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(payload)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect((parts.hostname, parts.port))
        connection.sendall(head.encode() + payload)
        data = connection.recv(512)
        time.sleep(HALTED_S)
        while piece := connection.recv(4096):
            data += piece
    return parse_answer(data).body.decode()


@pytest.mark.parametrize("workers", [1, 2])
def test_every_detokenizer_has_work_with_few_workers(workers: int, instance: Instance) -> None:
    instance.launch(
        "--engine", "simulator", "--simulator-step-ms", "2", "--workers", str(workers), "--detokenizers", "4"
    )
    answers = asyncio.run(ask_all(instance, 200, "/generate", native(6, stream=True)))
    last = {events_of(answer.text)[-1]["text"] for answer in answers}
    assert len(last) == 1  # every stream joined from pieces of one detokenizer
    snapshot = look(instance)
    rows = [row.counters.get("rows_in", 0) for row in snapshot.processes if row.role == "detokenizer"]
    assert len(rows) == 4
    assert min(rows) > sum(rows) / 8, rows  # an even share is a quarter
    assert not snapshot.totals.counters.get("gap_rows")
    assert sum(row.restarts for row in snapshot.processes) == 0
