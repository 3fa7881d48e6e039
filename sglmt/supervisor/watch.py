"""Watches over the processes: reads slots and the kernel, lets `health` judge, reports the hung to their lives.

Runs in the supervisor's loop, twice a second. Also finds workers whose own probe request does not come back.
"""

from __future__ import annotations

from collections.abc import Collection

from sglmt.ipc.state_page import SlotWord
from sglmt.messages.frame import Role
from sglmt.server_args import ServerArgs
from sglmt.supervisor.health import CHECK_EVERY_S, HealthMonitor, Limits, Vitals
from sglmt.supervisor.lifecycle import HeartbeatLost, State
from sglmt.supervisor.observe import kernel_state
from sglmt.supervisor.process import ManagedProcess, Run

_WATCHED = frozenset({State.STARTING, State.RUNNING, State.DRAINING})


class Watch:
    """One instance's watch."""

    def __init__(self, args: ServerArgs) -> None:
        self._monitor = HealthMonitor(_limits(args))
        self._probe_limit_s = args.start_timeout
        self._next_round_s = 0.0

    def adopt(self, args: ServerArgs) -> None:
        """Other limits from now on."""
        self._monitor.limits = _limits(args)
        self._probe_limit_s = args.start_timeout

    def round(self, processes: Collection[ManagedProcess], now_s: float, backend_up_since_s: float | None) -> None:
        """Judge everybody, when it is time. A worker can only be probed while everything behind it serves."""
        if now_s < self._next_round_s:
            return
        self._next_round_s = now_s + CHECK_EVERY_S
        living = {(p.name, p.run.generation) for p in processes if p.run is not None}
        self._monitor.begin_round(now_s, living)
        for process in processes:
            run = process.run
            if run is None:
                continue
            if run.child.pid_fd is None:
                process.reap()  # no pidfd on this kernel: look
            elif process.life.state in _WATCHED:
                reason = self._hung(process, run, now_s) or self._unprobed(process, now_s, backend_up_since_s)
                if reason is not None:
                    process.feed(HeartbeatLost(run.generation, reason))

    def _hung(self, process: ManagedProcess, run: Run, now_s: float) -> str | None:
        key = (process.name, run.generation)
        slot, life = run.slot, process.life
        vitals = Vitals(
            phase=slot[SlotWord.PHASE],
            phase_since_s=slot[SlotWord.PHASE_SINCE_NS] / 1e9,
            heartbeat_s=slot[SlotWord.HEARTBEAT_NS] / 1e9,
            ready_at_s=life.ready_at_s if life.state is not State.STARTING else None,
            kernel_state=kernel_state(run.child.pid),
        )
        return self._monitor.judge(key, vitals, now_s)

    def _unprobed(self, process: ManagedProcess, now_s: float, backend_up_since_s: float | None) -> str | None:
        life = process.life
        if process.spec.role is not Role.TOKENIZER_WORKER or life.state is not State.RUNNING or process.probed:
            return None
        if backend_up_since_s is None or life.ready_at_s is None:
            return None
        waited_s = now_s - max(life.ready_at_s, backend_up_since_s)
        if waited_s <= self._probe_limit_s:
            return None
        return f"its own probe request has not come back within {self._probe_limit_s:g} s"


def _limits(args: ServerArgs) -> Limits:
    return Limits(args.heartbeat_timeout, args.engine_step_timeout)
