"""Fresh-connection requests at a set rate. Runs in the soak command.

A request that fails is explained only when the worker that held its connection was killed.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import msgspec

from sglmt.chaos.client import Client, ConnectionFailed, ExchangeError

ANSWER_WITHIN_S = 90.0
KEPT_PROBLEMS = 20
BEHIND_AT_MOST_S = 1.0
BODY: dict[str, object] = {"text": "a", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}


class Load:
    """The tally of one run."""

    def __init__(self, client: Client, per_second: float) -> None:
        self.client = client
        self._interval_s = 1 / per_second
        self._running: set[asyncio.Task[None]] = set()
        self.sent = 0
        self.answers = 0
        self.explained = 0
        self.failures: Counter[str] = Counter()
        self.problems: list[str] = []
        self.longest_s = 0.0
        self.texts: set[str] = set()

    async def run(self, until_s: float) -> None:
        """Send until monotonic `until_s`, then wait for the answers."""
        next_s = time.monotonic()
        while time.monotonic() < until_s:
            task = asyncio.create_task(self._one())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            next_s = max(next_s + self._interval_s, time.monotonic() - BEHIND_AT_MOST_S)
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        await asyncio.gather(*self._running)

    async def _one(self) -> None:
        self.sent += 1
        began_s = time.monotonic()
        try:
            answer = await self.client.post("/generate", BODY, began_s + ANSWER_WITHIN_S)
        except ConnectionFailed as error:
            if error.doomed:
                self.explained += 1
            else:
                self._failed("connection", str(error))
            return
        except ExchangeError as error:
            self._failed("hang", str(error))
            return
        self.answers += 1
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)
        if answer.status != 200:
            self._failed(f"status {answer.status}", answer.body[:200].decode(errors="replace"))
            return
        body: dict[str, Any] = msgspec.json.decode(answer.body)
        self.texts.add(body["text"])
        if len(body["output_ids"]) != BODY["sampling_params"]["max_new_tokens"]:  # type: ignore[index]
            self._failed("wrong answer", answer.body[:200].decode(errors="replace"))

    def _failed(self, kind: str, text: str) -> None:
        self.failures[kind] += 1
        if len(self.problems) < KEPT_PROBLEMS:
            self.problems.append(f"{time.strftime('%H:%M:%S')} {kind}: {text}")
