"""Reads the exit of children, ours and strangers'. Runs in the supervisor's loop.

In a container the supervisor may be pid 1, and every orphan of the container becomes its child. Its own children
are reaped by their owners; `reap_strangers` only ever takes others.
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


def has_ended(pid: int) -> bool:
    """Whether a child has ended; its status is left to be read."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True  # somebody took it


def exit_status(pid: int) -> tuple[int | None, int | None]:
    """Reap an ended child: (exit code, signal), one of them None; both when somebody else has reaped it."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED)
    except ChildProcessError:
        return None, None
    assert ended is not None
    by_signal = ended.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
    return (None, ended.si_status) if by_signal else (ended.si_status, None)
