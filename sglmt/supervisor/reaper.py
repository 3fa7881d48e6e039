"""Reads the exit of children, ours and strangers'. Runs in the supervisor's loop.

In a container the supervisor may be pid 1, and every orphan of the container becomes its child. Its own children
are reaped by their owners; `reap_strangers` only ever takes others.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

_MOST_AT_ONCE = 256


def reap_strangers(is_ours: Callable[[int], bool]) -> list[int]:
    """Reap ended children that `is_ours(pid)` denies; their pids.

    Looks at each before it takes it, and takes none of ours: one system call when nobody has ended. An ended child
    of our own that its owner has not reaped yet may be the one the kernel shows first; then all children are gone
    through.
    """
    reaped: list[int] = []
    for _ in range(_MOST_AT_ONCE):
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            break
        if ended is None:
            break
        if is_ours(ended.si_pid):
            reaped += [pid for pid in _children() if not is_ours(pid) and _reap(pid)]
            break
        _reap(ended.si_pid)
        reaped.append(ended.si_pid)
    return reaped


def _reap(pid: int) -> bool:
    """Whether the child had ended; it is gone then."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
    except ChildProcessError:
        return False


def _children() -> list[int]:
    """The children of all our threads; none where the kernel does not tell."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(pid) for pid in path.read_text().split()]
    return found


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
