"""The loop of the processes that are not HTTP servers: router, scheduler, detokenizers. One thread.

`wait` sleeps until a frame can be received, a signal arrived, or the time is up; it writes the heartbeat and
ends the process when the supervisor is gone. The role does its work between two waits.
"""

from __future__ import annotations

import os
import signal
import time

import zmq

from sglmt.ipc.queues import Inbox
from sglmt.workers.child import ChildContext

HOUSEKEEPING_INTERVAL_S = 0.05
HOUSEKEEPING_SLACK_S = 0.025  # it rides on the next wake-up, and causes one of its own only when none comes
_LONGEST_WAIT_S = 0.25  # the heartbeat is written at least this often


class PollLoop:
    """Waits for the inbox, signals and the death pipe of one child."""

    def __init__(self, child: ChildContext, inbox: Inbox) -> None:
        self._child = child
        self._poller = zmq.Poller()
        self._poller.register(inbox.socket, zmq.POLLIN)
        self._poller.register(child.death_fd, zmq.POLLIN)
        self._wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._next_housekeeping_s = 0.0

    def wait(self, until_s: float | None) -> None:
        """Sleep until there is something to do, at most until monotonic `until_s` (None: as long as it likes)."""
        now_s = time.monotonic()
        wait_s = min(self._next_housekeeping_s + HOUSEKEEPING_SLACK_S - now_s, _LONGEST_WAIT_S)
        if until_s is not None:
            wait_s = min(wait_s, until_s - now_s)
        ready = dict(self._poller.poll(max(0, int(wait_s * 1000 + 0.999))))
        if self._child.death_fd in ready:
            self._child.supervisor_is_gone()
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        self._child.slot.beat()

    def housekeeping_is_due(self) -> bool:
        """True about every `HOUSEKEEPING_INTERVAL_S`."""
        now_s = time.monotonic()
        if now_s < self._next_housekeeping_s:
            return False
        self._next_housekeeping_s = now_s + HOUSEKEEPING_INTERVAL_S
        return True
