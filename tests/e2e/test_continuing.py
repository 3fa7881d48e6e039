"""After the engine's death: not ready until every request has moved, served meanwhile; what continuing is, is told."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from sglmt.status.snapshot import InstanceSnapshot
from tests.support.instance import Instance
from tests.support.metrics import scrape, value
from tests.support.serving import Stream, failure_code, get, look, post, streams_to, until

TOKENS = {"max_new_tokens": 40, "ignore_eos": True}


def kill_scheduler(instance: Instance) -> None:
    row = next(row for row in look(instance).processes if row.role == "scheduler")
    assert row.pid is not None
    os.kill(row.pid, signal.SIGKILL)


def approximate_resumes(instance: Instance) -> float:
    return value(scrape(instance), "sglmt_delivery_events_total", role="scheduler", event="approximate_resume")


@pytest.mark.timeout(90)
def test_not_ready_until_every_request_has_moved_again(instance: Instance) -> None:
    instance.launch("--engine", "simulator", "--workers", "2", "--simulator-step-ms", "1200")

    def state() -> InstanceSnapshot:
        return look(instance)

    async def scenario() -> None:
        async with streams_to(instance) as streams:
            opened = [
                streams.start("/generate", text=f"r{n}", sampling_params={"max_new_tokens": 6, "ignore_eos": True})
                for n in range(3)
            ]
            await until(lambda: all(stream.chunks for stream in opened), 20, "all streams run")
            kill_scheduler(instance)
            await until(lambda: "3 requests continue" in str(state().reason), 10, "they are submitted again")
            snapshot = state()
            assert snapshot.state == "recovering"
            answer = await asyncio.to_thread(get, instance, "/ready")
            assert answer.status_code == 503
            assert "3 requests continue" in answer.json()["error"]["message"]
            assert value(scrape(instance), "sglmt_ready") == 0
            new = streams.start("/generate", text="new", sampling_params={"max_new_tokens": 1})
            pieces = [stream.chunks for stream in opened]
            await until(lambda: state().state == "running", 10, "it is over")
            assert all(stream.chunks > before for stream, before in zip(opened, pieces, strict=True))
            assert get(instance, "/ready").status_code == 200
            for stream in (*opened, new):
                assert (await stream.finish()).events[-1]["meta_info"]["finish_reason"]["type"] == "length"

    asyncio.run(scenario())


async def interrupted(instance: Instance, path: str, bodies: list[dict[str, Any]]) -> list[Stream]:
    """Streams during which the engine died once, all at their end."""
    async with streams_to(instance) as streams:
        opened = [streams.start(path, **body) for body in bodies]
        await until(lambda: all(stream.chunks > 2 for stream in opened), 20, "all streams run")
        kill_scheduler(instance)
        for stream in opened:
            await stream.finish()
        return opened


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("declared", "counted"), [("exact", 0), ("approximate", 3)])
def test_approximate_continuations_are_counted(instance: Instance, declared: str, counted: int) -> None:
    instance.launch("--engine", "simulator", "--workers", "2", "--simulator-continuing", declared)
    assert approximate_resumes(instance) == 0
    bodies = [{"text": f"r{n}", "sampling_params": TOKENS} for n in range(3)]
    for stream in asyncio.run(interrupted(instance, "/generate", bodies)):
        assert stream.events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    assert approximate_resumes(instance) == counted


@pytest.mark.timeout(90)
def test_what_cannot_be_continued_ends_with_an_error(instance: Instance) -> None:
    instance.launch("--engine", "simulator", "--workers", "2", "--simulator-continuing", "refused")
    chat = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_tokens": 400}
    for stream in asyncio.run(interrupted(instance, "/v1/chat/completions", [chat] * 3)):
        assert failure_code(stream) == "cannot_continue"
        error = stream.events[-1]["error"]
        assert "continue.greedy" in error["message"]
        finishes = [choice["finish_reason"] for event in stream.events[:-1] for choice in event["choices"]]
        assert set(finishes) == {None}
    native = {"text": "b", "sampling_params": {**TOKENS, "temperature": 0.9}}
    (stream,) = asyncio.run(interrupted(instance, "/generate", [native]))
    assert failure_code(stream) == "cannot_continue"
    assert "error" in stream.events[-1]
    assert value(scrape(instance), "sglmt_aborts_total", cause="engine_error") == 4
    assert post(instance, "/generate", text="c", sampling_params={"max_new_tokens": 2}).status_code == 200
