"""Does an instance have to end because of a process? Runs in the supervisor; decides and words it, does nothing.

Before the instance has ever been ready, a process that failed for a known cause (it said so, or was not ready by
its deadline) ends the start at once, because it would fail again; one that just dies gets a few attempts.
Afterwards only the loss of every worker counts here; processes the instance cannot do without say so themselves
(BecameFatal).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglmt.messages.frame import Role
from sglmt.supervisor.process import ManagedProcess
from sglmt.supervisor.topology import tree_code

START_ATTEMPTS = 3
_SHOWN_LINES = 12


@dataclass(frozen=True)
class Ending:
    """Why the instance ends, and its exit code. The reason's first line stands alone; last lines follow."""

    exit_code: int
    reason: str


def because_of(process: ManagedProcess, reason: str) -> Ending:
    """The ending that this process's death means."""
    last = process.life.last_exit
    cause = f"; cause: {process.last_failure}" if process.last_failure is not None else ""
    lines = "".join(f"\n  {process.name} | {line}" for line in process.last_tail[-_SHOWN_LINES:])
    return Ending(tree_code(last.exit_code if last is not None else None), f"{reason}{cause}{lines}")


def failed_start(processes: Sequence[ManagedProcess]) -> Ending | None:
    """For an instance that has never been ready."""
    for process in processes:
        failures, last = process.life.failures_in_a_row, process.life.last_exit
        if last is not None and (failures >= START_ATTEMPTS or (failures and process.last_failure is not None)):
            return because_of(process, f"start failed: {process.name}: {last.text}")
    return None


def no_worker_left(processes: Sequence[ManagedProcess]) -> Ending | None:
    """For one that has: every worker has spent its budget and none has been ready since."""
    workers = [process for process in processes if process.spec.role is Role.TOKENIZER_WORKER]
    if not workers or not all(worker.beyond_budget for worker in workers):
        return None
    budget = workers[-1].spec.policy.max_restarts
    return because_of(workers[-1], f"no tokenizer worker is left: each died more than {budget} times")
