"""Submitting requests to a `World` the way HTTP handlers do, with a sink that checks what comes."""

from __future__ import annotations

from typing import Any

from sglmt.messages.columns import pack
from sglmt.messages.frame import Role
from sglmt.messages.sampling import SamplingParams, TextSpec
from sglmt.messages.to_scheduler import TokenizedGenerateReqInput
from sglmt.workers.live_request import LiveRequest
from tests.unit.workers.reference import expected, simulator
from tests.unit.workers.wired import CheckedSink, Life, World


class Asked:
    """One request and what came back."""

    def __init__(self, life: Life, request: LiveRequest, sink: CheckedSink) -> None:
        self.life, self.request, self.sink = life, request, sink

    @property
    def key(self) -> int:
        return self.request.key


def worker(world: World, index: int = 0) -> Life:
    """The current life of a worker."""
    return world.current[Role.TOKENIZER_WORKER, index]


def ask(world: World, index: int = 0, tokens: int = 6, prompt: int = 1, **fields: Any) -> Asked:
    """Submit one request on a worker. `fields` are those of the submission, `stop` a short form of `text`."""
    life = worker(world, index)
    key = life.machine.frontend.next_key()
    submission = TokenizedGenerateReqInput(
        **{
            "key": key,
            "attempt": 1,
            "rid": f"r{key}",
            "group": key,
            "input_ids": pack("I", [prompt, 2, 3]),
            "sampling": SamplingParams(max_new_tokens=tokens),
            "text": TextSpec(stop=fields.pop("stop", ())),
            **fields,
        }
    )
    sink = CheckedSink(expected(submission, simulator(world.clock, bad_ids=world.bad_ids)), submission.text)
    return Asked(life, life.machine.frontend.submit(submission, 0, 3, sink), sink)
