"""Which processes an instance consists of, with which limits, in which order. Pure; used by the supervisor.

From ServerArgs follow the wanted processes and their restart policies. Essential ones (scheduler, router,
detokenizers: every request of some client passes them) end the instance when their budget is spent; a tokenizer
worker is tried for ever, until no worker at all is left within its budget.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglmt.errors import ExitCode
from sglmt.messages.frame import Role
from sglmt.server_args import MAX_WORKERS, ServerArgs
from sglmt.supervisor.restart_policy import RestartPolicy

START_ORDER = (Role.SCHEDULER, Role.DETOKENIZER, Role.ROUTER, Role.TOKENIZER_WORKER)
"""What others wait for first; within the cap all start in parallel."""

STOP_ORDER = (Role.TOKENIZER_WORKER, Role.DETOKENIZER, Role.ROUTER, Role.SCHEDULER)
"""A stage is told to end when the one before has ended: running requests still need everybody else."""

FRONT_END_ROLES = frozenset({Role.TOKENIZER_WORKER, Role.DETOKENIZER, Role.ROUTER})
"""Roles that have no business on a GPU and do their work on one thread."""

_NUMBERED = frozenset({Role.TOKENIZER_WORKER, Role.DETOKENIZER})
_SAME_CODE = frozenset({ExitCode.MODEL, ExitCode.PORT, ExitCode.RESOURCE, ExitCode.CONFIG})
_WORKER_STOP_GRACE_S = 3.0
ABORT_ANSWERS_S = 1.0  # after the time for requests is over: for workers to tell the clients that are left
SCALES_TO_AT_LEAST = 128


@dataclass(frozen=True)
class ProcessSpec:
    """One wanted process."""

    role: Role
    index: int
    policy: RestartPolicy
    essential: bool

    @property
    def name(self) -> str:
        """`scheduler`, `tokenizer_worker:3`: what logs, messages and process titles call it."""
        return process_name(self.role, self.index)


def process_name(role: Role, index: int) -> str:
    """`router`, `detokenizer:0`: a role that exists once has no number."""
    return f"{role.label}:{index}" if role in _NUMBERED else role.label


def wanted_processes(args: ServerArgs) -> list[ProcessSpec]:
    """Every process of the instance, in start order."""
    counts = {
        Role.SCHEDULER: 1,
        Role.DETOKENIZER: args.detokenizers,
        Role.ROUTER: 1 if args.mode == "multi" else 0,
        Role.TOKENIZER_WORKER: args.workers,
    }
    return [spec_of(role, index, args) for role in START_ORDER for index in range(counts[role])]


def spec_of(role: Role, index: int, args: ServerArgs) -> ProcessSpec:
    """One process of the instance."""
    return ProcessSpec(role, index, policy_of(role, args), essential=role is not Role.TOKENIZER_WORKER)


def most_workers(args: ServerArgs) -> int:
    """How far an instance launched like this can be scaled: its state page has slots for so many."""
    if args.mode == "single":
        return 1
    return min(MAX_WORKERS, max(SCALES_TO_AT_LEAST, 2 * args.workers))


def policy_of(role: Role, args: ServerArgs) -> RestartPolicy:
    """The restart policy of a role. Starts that fail slowly are counted too, though they leave the window."""
    worker = role is Role.TOKENIZER_WORKER
    return RestartPolicy(
        backoff_cap_s=args.restart_backoff_max,
        max_restarts=args.max_restarts,
        restart_window_s=args.restart_window,
        start_timeout_s=args.start_timeout,
        heartbeat_timeout_s=args.heartbeat_timeout,
        stop_grace_s=_WORKER_STOP_GRACE_S if worker else 5.0,
        fatal_when_spent=not worker,
        max_failed_starts=args.max_restarts,
    )


def tree_code(child_code: int | None) -> int:
    """Exit code of the instance when it ends because a process did: the child's own when it is one of the
    documented causes (model, port, resource, configuration), else CHILD_DEATH."""
    return int(child_code) if child_code in _SAME_CODE else int(ExitCode.CHILD_DEATH)


def slots_needed(args: ServerArgs) -> int:
    """Slots of the state page: two lives of every process may coexist, workers to come included, and then some."""
    return 2 * (len(wanted_processes(args)) - args.workers + most_workers(args)) + 16
