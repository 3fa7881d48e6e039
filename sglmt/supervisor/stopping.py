"""The order in which an instance stops. Pure; used by the supervisor.

Workers drain first, because running requests need everybody else; each later stage is told to end when no
process of the earlier ones is left. Every command carries a deadline, after which the lifecycle uses force.
"""

from __future__ import annotations

from collections.abc import Collection

from sglmt.messages.frame import Role
from sglmt.supervisor.lifecycle_table import DrainRequested, Event, StopRequested
from sglmt.supervisor.topology import ABORT_ANSWERS_S, STOP_ORDER

STAGE_GRACE_S = 5.0


class StopPlan:
    """One stop in progress. `drain_deadline_s` (monotonic): until then running requests may finish."""

    def __init__(self, drain_deadline_s: float) -> None:
        self.drain_deadline_s = drain_deadline_s
        self.immediate = False
        self._stage = -1

    @property
    def past_workers(self) -> bool:
        """No worker is left: nobody accepts connections any more."""
        return self._stage > 0

    def advance(self, unfinished: Collection[Role], now_s: float) -> list[tuple[Role, Event]]:
        """Commands to give now, each to every process of its role. `unfinished`: roles with a process that is
        not STOPPED (or given up)."""
        commands: list[tuple[Role, Event]] = []
        while self._stage < len(STOP_ORDER) and not self._waits_for(unfinished):
            self._stage += 1
            if self._stage < len(STOP_ORDER):
                role = STOP_ORDER[self._stage]
                commands.append((role, self._command(role, now_s)))
        return commands

    def is_done(self, unfinished: Collection[Role]) -> bool:
        """Everything has ended."""
        return not unfinished and (self.immediate or self._stage >= len(STOP_ORDER))

    def bring_nearer(self, drain_deadline_s: float) -> Event | None:
        """A second request with less patience: the command for the workers, if it changes anything."""
        if drain_deadline_s >= self.drain_deadline_s:
            return None
        self.drain_deadline_s = drain_deadline_s
        return self._command(Role.TOKENIZER_WORKER, 0.0)

    def _waits_for(self, unfinished: Collection[Role]) -> bool:
        return self._stage >= 0 and any(role in unfinished for role in STOP_ORDER[: self._stage + 1])

    def _command(self, role: Role, now_s: float) -> Event:
        if role is Role.TOKENIZER_WORKER:
            return DrainRequested(self.drain_deadline_s + ABORT_ANSWERS_S)
        return StopRequested(now_s + STAGE_GRACE_S)
