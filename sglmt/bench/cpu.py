"""CPU seconds and memory of processes by role, from the operating system. Runs in the benchmark process.

A reading is taken before and after a load; what lies between is what the load cost. `Surroundings` tells what the
rest of the machine did meanwhile, because figures from a busy machine mean little.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import NamedTuple

import psutil

BUSY_SHARE = 0.05  # of all cores, used by others: above it a run is called noisy

Processes = Mapping[int, str]  # pid → role


def cpu_by_role(processes: Processes) -> dict[str, float]:
    """User and system seconds so far, summed by role. A process that is gone counts nothing."""
    totals: dict[str, float] = {}
    for pid, role in processes.items():
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            totals[role] = totals.get(role, 0.0) + times.user + times.system
    return totals


def reaped_children_cpu_s(pid: int) -> float:
    """CPU seconds of the children of `pid` that have ended."""
    times = psutil.Process(pid).cpu_times()
    return float(times.children_user + times.children_system)


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Seconds by role between two readings."""
    return {role: seconds - before.get(role, 0.0) for role, seconds in after.items()}


def pss_by_role(processes: Processes) -> dict[str, int]:
    """Proportional set size in bytes by role: shared pages count in parts, so the sum is the real cost."""
    totals: dict[str, int] = {}
    for pid, role in processes.items():
        with contextlib.suppress(psutil.Error):
            totals[role] = totals.get(role, 0) + int(psutil.Process(pid).memory_full_info().pss)
    return totals


class Surroundings(NamedTuple):
    """One reading of the whole machine."""

    busy_s: float
    all_s: float

    @classmethod
    def read(cls) -> Surroundings:
        """Now, summed over all cores."""
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        return cls(sum(times[:8]) - idle, sum(times[:8]))

    def others_share(self, after: Surroundings, own_s: float) -> float:
        """Share of all cores that others used between two readings, when we used `own_s` CPU seconds."""
        elapsed = after.all_s - self.all_s
        return max(0.0, after.busy_s - self.busy_s - own_s) / elapsed if elapsed > 0 else 0.0


def own_cpu_s() -> float:
    """CPU seconds of this process."""
    times = os.times()
    return times.user + times.system
