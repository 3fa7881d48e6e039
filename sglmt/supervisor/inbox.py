"""The supervisor's one queue: callbacks of the event loop post work, one coroutine does it, one at a time.

Nothing changes the state of an instance from anywhere else, so no change meets another half way. An exception in
posted work, or in a callback of the loop, ends `pump_until`, and with it the supervisor, loudly.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from sglmt.supervisor.services import Log

Work = Callable[[], None]


class Inbox:
    """Belongs to the loop it is made in."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: Log) -> None:
        self.loop = loop
        self._log = log
        self._queue: asyncio.Queue[Work] = asyncio.Queue()
        self._ticker: asyncio.TimerHandle | None = None
        self._previous_handler = loop.get_exception_handler()
        loop.set_exception_handler(self._callback_failed)

    def post(self, work: Work) -> None:
        """Do this after everything posted before. From the loop's thread only."""
        self._queue.put_nowait(work)

    def tick(self, every_s: Callable[[], float], work: Callable[[float], None]) -> None:
        """Post `work(now_s)` again and again; never twice at once, however slow it is. `every_s` is asked each time."""

        def due() -> None:
            work(time.monotonic())
            self._ticker = self.loop.call_later(every_s(), self.post, due)

        self.post(due)

    async def pump_until(self, finished: Callable[[], bool], after_each: Work) -> None:
        """Do what is posted until `finished()`; `after_each` follows every piece of work."""
        while not finished():
            work = await self._queue.get()
            work()
            after_each()

    def close(self) -> None:
        """Stop ticking; what is still queued is not done."""
        if self._ticker is not None:
            self._ticker.cancel()
        self.loop.set_exception_handler(self._previous_handler)

    def _callback_failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in a callback ends the supervisor; one in a connection or its task costs only that."""
        error = context.get("exception")
        if "handle" not in context or not isinstance(error, Exception):
            self._log("error", "supervisor", f"{context.get('message', 'event loop')}: {error!r}")
            return

        def fail() -> None:
            raise error

        self.post(fail)
