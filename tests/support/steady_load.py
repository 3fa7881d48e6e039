"""A steady number of requests a second, each on a connection of its own or on kept-alive ones, while a test acts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from tests.support.instance import Instance

ANSWER_WITHIN_S = 30.0


class SteadyLoad:
    """Requests sent at a set pace. `problems`: every answer that was not 200, and every one that did not come."""

    def __init__(self, instance: Instance, per_second: float, body: dict[str, Any], keep_alive: bool) -> None:
        self.answers = 0
        self.problems: list[str] = []
        self._url = instance.url + "/generate"
        self._interval_s = 1 / per_second
        self._body = body
        self._limits = httpx.Limits(max_keepalive_connections=64 if keep_alive else 0)
        self._running: set[asyncio.Task[None]] = set()
        self._ends = asyncio.Event()

    async def run(self) -> None:
        """Until `end`; a client that cannot keep pace sends as fast as it can."""
        async with httpx.AsyncClient(timeout=ANSWER_WITHIN_S, limits=self._limits) as client:
            next_s = time.monotonic()
            while not self._ends.is_set():
                task = asyncio.create_task(self._one(client))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
                next_s = max(next_s + self._interval_s, time.monotonic() - 1.0)
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            await asyncio.gather(*self._running)

    def end(self) -> None:
        """Send no more; `run` returns when the last answer is here."""
        self._ends.set()

    async def _one(self, client: httpx.AsyncClient) -> None:
        try:
            answer = await client.post(self._url, json=self._body)
        except httpx.HTTPError as error:
            self.problems.append(repr(error))
            return
        self.answers += 1
        if answer.status_code != 200:
            self.problems.append(f"{answer.status_code} {answer.text[:200]}")


@contextlib.asynccontextmanager
async def steady_load(
    instance: Instance, per_second: float, body: dict[str, Any], keep_alive: bool = False
) -> AsyncIterator[SteadyLoad]:
    """Load around the block; when it ends, all answers have been waited for."""
    load = SteadyLoad(instance, per_second, body, keep_alive)
    task = asyncio.create_task(load.run())
    try:
        yield load
    finally:
        load.end()
        await task
