"""The loop of the processes that are not HTTP servers: router, scheduler, detokenizers. One thread.

`wait` sleeps until a frame has arrived, a signal came, or the time is up; it writes the heartbeat and
ends the process when the supervisor is gone. The role does its work between two waits.
"""

from __future__ import annotations

import os
import signal
import time

from sglmt.workers.child import ChildContext

HOUSEKEEPING_INTERVAL_S = 0.05
LONGEST_WAIT_S = 0.15  # housekeeping rides on wake-ups, and causes one of its own only when none comes for so long
RETRY_WAIT_S = 0.025  # the same while frames are kept for a peer that is not there (housekeeping tries again)


class PollLoop:
    """Waits for the queues, signals and the death pipe of one child."""

    def __init__(self, child: ChildContext) -> None:
        self._transport = child.transport
        self._slot = child.slot
        self._wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        child.transport.poller.watch(self._wake_read, self._take_signals)
        child.transport.poller.watch(child.death_fd, child.supervisor_is_gone)
        self._next_housekeeping_s = 0.0

    def wait(self, until_s: float | None) -> None:
        """Sleep until there is something to do, at most until monotonic `until_s` (None: as long as it likes)."""
        wait_s = RETRY_WAIT_S if self._transport.poller.retrying else LONGEST_WAIT_S
        if until_s is not None:
            wait_s = min(wait_s, max(0.0, until_s - time.monotonic()))
        self._transport.wait(wait_s)
        self._slot.beat()

    def _take_signals(self) -> None:
        os.read(self._wake_read, 4096)

    def housekeeping_is_due(self) -> bool:
        """True about every `HOUSEKEEPING_INTERVAL_S`."""
        now_s = time.monotonic()
        if now_s < self._next_housekeeping_s:
            return False
        self._next_housekeeping_s = now_s + HOUSEKEEPING_INTERVAL_S
        return True
