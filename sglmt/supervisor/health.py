"""Is a process hung? Pure: from what its slot and the kernel say, and now, to a reason or None.

The supervisor asks twice a second for each live process. A slow start is no hang (the lifecycle's start deadline
judges it); a long engine step has a limit of its own; a process in state `T` is judged by the time it has been
stopped, whatever its heartbeat. Time in which the supervisor itself did not run excuses everybody.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sglmt.ipc.state_page import Phase

CHECK_EVERY_S = 0.5
_OWN_GAP_S = 2.0  # between two checks: more means that this process did not run


@dataclass(frozen=True)
class Limits:
    """Seconds. `stopped_s`: how long a process may be in state T; long enough for a debugger's glance or a
    pause that streams survive, short against a heartbeat limit."""

    heartbeat_s: float
    step_s: float
    stopped_s: float = 4.0


@dataclass(frozen=True)
class Vitals:
    """What is known of one process now. Times are monotonic seconds; `ready_at_s` is None while STARTING."""

    phase: int
    phase_since_s: float
    heartbeat_s: float
    ready_at_s: float | None
    kernel_state: str  # the letter of /proc/<pid>/stat; "" when unknown


class HealthMonitor:
    """Judges one instance's processes; remembers since when each is stopped. `key` names a process life."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._stopped_since_s: dict[tuple[str, int], float] = {}
        self._last_round_s: float | None = None
        self._excused_until_s = 0.0

    def begin_round(self, now_s: float, living: Collection[tuple[str, int]]) -> None:
        """Call before judging: notices when the supervisor itself was not running for a while. `living`: the
        keys there are; others are forgotten."""
        self._stopped_since_s = {key: since for key, since in self._stopped_since_s.items() if key in living}
        if self._last_round_s is not None and now_s - self._last_round_s > _OWN_GAP_S:
            self._excused_until_s = now_s
            self._stopped_since_s.clear()
        self._last_round_s = now_s

    def judge(self, key: tuple[str, int], vitals: Vitals, now_s: float) -> str | None:
        """Why this process counts as hung; None when it does not."""
        if vitals.kernel_state == "T":
            since_s = self._stopped_since_s.setdefault(key, now_s)
            stopped_s = now_s - since_s
            limit_s = min(self.limits.stopped_s, self.limits.heartbeat_s)
            return f"stopped (state T) for {stopped_s:.1f} s" if stopped_s >= limit_s else None
        self._stopped_since_s.pop(key, None)
        return self._judge_heartbeat(vitals, now_s)

    def _judge_heartbeat(self, vitals: Vitals, now_s: float) -> str | None:
        if vitals.ready_at_s is None:
            return None
        seen_s = max(vitals.heartbeat_s, vitals.ready_at_s, self._excused_until_s)
        if vitals.phase == Phase.STEPPING:
            since_s = max(vitals.phase_since_s, seen_s)
            age_s, limit_s, what = now_s - since_s, self.limits.step_s, "inside one engine step"
        elif vitals.phase in (Phase.BOOTING, Phase.LOADING):
            age_s, limit_s, what = now_s - seen_s, self.limits.step_s, "without a heartbeat while loading"
        else:
            age_s, limit_s, what = now_s - seen_s, self.limits.heartbeat_s, "without a heartbeat"
        return f"{age_s:.1f} s {what} (limit {limit_s:g} s)" if age_s > limit_s else None
