"""A request that kills the engine each time ends with an error; what runs beside it does not notice.

The engine dies inside its step while one poisoned request and many healthy ones are in it. Its first death makes
suspects of those that had yielded nothing, its second, with the poison alone on trial, convicts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.instance import Instance
from tests.support.serving import failure_code, look, post, streams_to, until

POISON_ID = 777
HEALTHY = 64
TOKENS = 150


@pytest.fixture
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    runtime_dir = tmp_path_factory.mktemp("poison")
    with Instance(runtime_dir).launch(
        "--engine", "simulator", "--workers", "2", "--simulator-poison", str(POISON_ID), "--simulator-step-ms", "20"
    ) as instance:  # fmt: skip
        yield instance


@pytest.mark.timeout(120)
def test_the_second_death_alone_convicts(instance: Instance) -> None:
    def sampling(number: int) -> dict[str, object]:
        return {"text": f"healthy request {number}", "sampling_params": {"max_new_tokens": TOKENS, "ignore_eos": True}}

    undisturbed = [post(instance, "/generate", **sampling(number)).json() for number in range(4)]

    async def scenario() -> None:
        async with streams_to(instance) as streams:
            healthy = [streams.start("/generate", **sampling(number)) for number in range(HEALTHY)]
            await until(lambda: all(stream.chunks > 2 for stream in healthy), 30.0, "all healthy streams are under way")
            poisoned = streams.start(
                "/generate", input_ids=[1, POISON_ID, 2], sampling_params={"max_new_tokens": TOKENS}
            )
            await poisoned.finish()
            assert failure_code(poisoned) == "engine_died"
            for number, stream in enumerate(healthy):
                last = (await stream.finish()).events[-1]
                assert last["meta_info"]["finish_reason"] == {"type": "length", "length": TOKENS}
                if number < len(undisturbed):
                    assert last["output_ids"] == undisturbed[number]["output_ids"]
                    assert last["text"] == undisturbed[number]["text"]

    asyncio.run(scenario())
    scheduler = next(row for row in look(instance).processes if row.role == "scheduler")
    assert scheduler.restarts == 2
    assert post(instance, "/generate", **sampling(1)).json()["output_ids"] == undisturbed[1]["output_ids"]
