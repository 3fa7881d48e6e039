"""Any process but the worker dies, by any signal: the running streams end with the same bytes, new ones are served."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import httpx
import pytest

from tests.support.instance import Instance
from tests.support.serving import Stream, look, post, streams_to, until

BODY: dict[str, Any] = {
    "text": "a",
    "sampling_params": {"max_new_tokens": 150, "ignore_eos": True},
    "return_logprob": True,
    "incremental_streaming_output": True,
}

# TERM that nobody asked for: the process ends in order, with 0, and that is a failure all the same.
DEATHS = (
    ("scheduler", signal.SIGSEGV),
    ("scheduler", signal.SIGTERM),
    ("detokenizer", signal.SIGABRT),
    ("detokenizer", signal.SIGTERM),
    ("router", signal.SIGKILL),
)


def answer_of(stream: Stream) -> tuple[str, list[int], list[Any]]:
    """(text, ids, log-probabilities) of a stream."""
    events = stream.events
    return (
        "".join(event["text"] for event in events),
        [token for event in events for token in event["output_ids"]],
        [entry for event in events for entry in event["meta_info"]["output_token_logprobs"]],
    )


@pytest.mark.timeout(150)
def test_streams_survive_the_death_of_every_other_process(instance: Instance) -> None:
    instance.launch("--engine", "simulator", "--simulator-step-ms", "10", "--max-restarts", "100",
                    "--restart-backoff-max", "0.2")  # fmt: skip
    whole = post(instance, "/generate", **BODY).json()
    expected = (whole["text"], whole["output_ids"], whole["meta_info"]["output_token_logprobs"])
    for role, number in DEATHS:
        asyncio.run(survive(instance, role, number, expected))
    counters = look(instance).totals.counters
    assert (counters.get("unroutable", 0), counters.get("undecodable", 0)) == (0, 0)


async def survive(instance: Instance, role: str, number: signal.Signals, expected: tuple[str, list[int], Any]) -> None:
    """Kill one process under eight streams; more requests come while it is away."""
    async with streams_to(instance) as streams, httpx.AsyncClient(timeout=30) as client:
        opened = [streams.start("/generate", **BODY) for _ in range(8)]
        await until(lambda: all(stream.chunks > 3 for stream in opened), 20, "all streams run")
        row = next(row for row in look(instance).processes if row.role == role)
        assert row.pid is not None
        os.kill(row.pid, number)
        late = [client.post(instance.url + "/generate", json=BODY) for _ in range(2)]
        assert (await client.get(instance.url + "/health")).status_code == 200
        answers = await asyncio.gather(*late)
        for stream in opened:
            assert answer_of(await stream.finish()) == expected, (role, number)
        assert {answer.json()["text"] for answer in answers} == {expected[0]}
        await until(lambda: look(instance).state == "running", 10, "it is back")
    after = next(each for each in look(instance).processes if each.role == role)
    assert after.restarts == row.restarts + 1
    assert after.last_exit is not None
    if number is signal.SIGTERM:
        assert after.last_exit.exit_code == 0
    else:
        assert number.name in (after.last_exit.signal or "")
