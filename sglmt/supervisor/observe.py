"""Looks at processes through /proc: state letter, memory, processor time. Runs in the supervisor, only when asked.

Proportional memory costs a walk over a process's mappings, so it is kept for some seconds; a young process still
grows, and is looked at each time.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_USAGE_EVERY_S = 0.5
_PSS_EVERY_S = 5.0
_YOUNG_S = 15.0


@dataclass(frozen=True)
class Usage:
    """Memory in bytes; processor use in percent of one core since the previous look. None: unknown."""

    rss_bytes: int | None = None
    pss_bytes: int | None = None
    cpu_percent: float | None = None


@dataclass
class _Sample:
    at_s: float
    cpu_s: float
    usage: Usage
    pss_at_s: float


class UsageSampler:
    """Remembers the last look at each pid; forgets pids that are no longer asked for."""

    def __init__(self) -> None:
        self._samples: dict[int, _Sample] = {}

    def look(self, pids: list[int]) -> dict[int, Usage]:
        """The usage of each process now, or as of at most half a second ago."""
        now_s = time.monotonic()
        self._samples = {pid: sample for pid, sample in self._samples.items() if pid in pids}
        return {pid: self._look_at(pid, now_s) for pid in pids}

    def _look_at(self, pid: int, now_s: float) -> Usage:
        before = self._samples.get(pid)
        if before is not None and now_s - before.at_s < _USAGE_EVERY_S:
            return before.usage
        fields = _stat(pid)
        if fields is None:
            return Usage()
        age_s = _seconds_since_boot() - int(fields[19]) / _TICKS_PER_S
        cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        if before is None:
            since_s, spent_s = age_s, cpu_s
        else:
            since_s, spent_s = now_s - before.at_s, cpu_s - before.cpu_s
        fresh_pss = before is None or age_s < _YOUNG_S or now_s - before.pss_at_s >= _PSS_EVERY_S
        usage = Usage(
            rss_bytes=int(fields[21]) * _PAGE_BYTES,
            pss_bytes=_pss_bytes(pid) if fresh_pss or before is None else before.usage.pss_bytes,
            cpu_percent=round(100 * spent_s / since_s, 1) if since_s > 0 else None,
        )
        pss_at_s = now_s if fresh_pss or before is None else before.pss_at_s
        self._samples[pid] = _Sample(now_s, cpu_s, usage, pss_at_s)
        return usage


def kernel_state(pid: int) -> str:
    """The state letter of a process: `R`, `S`, `T` (stopped), `Z`, …; empty when it cannot be read."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def rss_bytes(pid: int) -> int | None:
    """Resident memory of a process now; None when it cannot be read."""
    fields = _stat(pid)
    return int(fields[21]) * _PAGE_BYTES if fields is not None else None


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from the state letter (field 3 of proc(5)) on."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def _pss_bytes(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def _seconds_since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
