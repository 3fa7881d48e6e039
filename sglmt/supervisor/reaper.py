"""Duties of process 1: reaps children that nobody here started. Runs in the supervisor's loop.

In a container the supervisor may be pid 1, and every orphan of the container becomes its child. Its own children
are reaped by their owners; this only ever takes strangers, and says how many.
"""

from __future__ import annotations

import os
from collections.abc import Callable

_MOST_AT_ONCE = 256


def reap_strangers(is_ours: Callable[[int], bool]) -> list[int]:
    """Reap ended children that `is_ours(pid)` denies; their pids.

    Looks at each before it takes it. An ended child of our own at the head of the queue ends the round: its
    owner is about to reap it, and the next round goes on behind it.
    """
    reaped: list[int] = []
    for _ in range(_MOST_AT_ONCE):
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            break
        if ended is None or is_ours(ended.si_pid):
            break
        os.waitid(os.P_PID, ended.si_pid, os.WEXITED | os.WNOHANG)
        reaped.append(ended.si_pid)
    return reaped


def is_init() -> bool:
    """Whether this process is pid 1 of its namespace."""
    return os.getpid() == 1
