"""Requests of 2 MB beside 20 streams of one worker, with the slower of the two tokenizer libraries.

How long the streams wait is measured by `scripts/gaps` on a quiet machine. Here the bound is one that a worker passes
under any load, and that one which encodes or renders on its event loop does not (2 MB take that library seconds).
"""

from __future__ import annotations

import asyncio
import json

from tests.support.big_prompts import STREAMS, cases, running, send
from tests.support.instance import Instance
from tests.support.serving import look

NEVER_LONGER_S = 0.8
TOKENS = 500
BESIDE = ("completion", "completion, 250 rows", "chat, 8000 turns", "tokenize", "detokenize")


def test_streams_go_on_beside_big_requests(instance: Instance) -> None:
    instance.launch("--workers", "1", "--engine", "simulator", "--tokenizer-backend", "huggingface")
    texts, longest_gap_s = asyncio.run(beside(instance.url))
    assert len(texts) == STREAMS
    assert len(set(texts)) == 1
    assert texts[0]
    assert longest_gap_s < NEVER_LONGER_S
    assert {row.restarts for row in look(instance).processes} == {0}


async def beside(url: str) -> tuple[list[str], float]:
    """(the streams' texts, their longest gap) while each of `BESIDE` is answered, twice: known texts are cached."""
    async with running(url, TOKENS) as (streams, texts):
        streams.reset()
        for name in BESIDE * 2:
            path, body, status = cases()[name]
            answered, answer = await send(url, path, json.dumps(body).encode())
            assert answered == status, f"{name}: {answer[:300]!r}"
            content = json.loads(answer)
            if path == "/tokenize":
                assert content["count"] == len(content["tokens"]) > 400_000
            elif path == "/detokenize":
                assert len(content["text"]) >= len(body["tokens"])
            elif status == 400:
                assert content["error"]["code"] == "context_length_exceeded"
                assert "8192" in content["error"]["message"]
            else:
                assert len(content["choices"]) == len(body["prompt"])
        return await texts(), streams.longest_gap_s
