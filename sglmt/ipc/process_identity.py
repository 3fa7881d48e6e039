"""Which process, beyond doubt: pid, start time and pid namespace. Used wherever a leftover is judged."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import psutil


class ProcessIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A process that cannot be confused with a later one of the same pid.

    `start_time_s` is seconds since boot as the kernel counts them, 0.0 when unknown; `pid_namespace` is the
    inode number of the namespace, 0 when unknown.
    """

    pid: int
    start_time_s: float
    pid_namespace: int

    def is_proven_gone(self) -> bool:
        """True only when it certainly no longer runs: never true for another pid namespace."""
        if self.pid_namespace == 0 or self.pid_namespace != pid_namespace():
            return False
        start = _start_time_s(self.pid)
        return start is None or (self.start_time_s > 0 and abs(start - self.start_time_s) > 0.5)


def own_identity() -> ProcessIdentity:
    """This process."""
    return identity_of(os.getpid())


def identity_of(pid: int) -> ProcessIdentity:
    """The process that has `pid` now; start time 0.0 when there is none."""
    return ProcessIdentity(pid=pid, start_time_s=_start_time_s(pid) or 0.0, pid_namespace=pid_namespace())


def pid_namespace() -> int:
    """Inode number of this process's pid namespace, 0 when it cannot be known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _start_time_s(pid: int) -> float | None:
    """Seconds since boot at which `pid` started; None when it does not run (a zombie does not)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, IndexError):
        return None if not psutil.pid_exists(pid) else 0.0
    if fields[0] in ("Z", "X"):
        return None
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
