"""The state of the whole instance, from the states of its processes. Pure; used by the supervisor.

`ready` says whether requests can be served, and that whatever ran when the engine last died continues; `running`,
`degraded` and the others are the words of `status`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglmt.messages.frame import Role
from sglmt.status.snapshot import InstanceState
from sglmt.supervisor.lifecycle_table import State


@dataclass(frozen=True)
class Member:
    """One process as far as the instance's state depends on it."""

    role: Role
    name: str
    state: State
    serves: bool  # RUNNING, and for a worker: a request of its own came back through every process


@dataclass(frozen=True)
class Verdict:
    """`reason` says what is missing; None when nothing is."""

    state: InstanceState
    ready: bool
    reason: str | None


def judge_instance(members: Sequence[Member], was_ready: bool, recovering: str | None = None) -> Verdict:
    """State of an instance that is not being stopped. `was_ready`: it has served before; `recovering`: what a
    scheduler that has taken over still waits for, None when nothing is left."""
    missing = [member for member in members if not member.serves]
    reason = _describe(missing) if missing else None
    if not was_ready and (missing or recovering):
        return Verdict("starting", False, reason or recovering)
    if down := roles_down(members):
        return Verdict("degraded", False, f"not ready: {', '.join(down)}; {reason}")
    if recovering:
        return Verdict("recovering", False, f"{recovering}; {reason}" if reason else recovering)
    return Verdict("degraded", True, reason) if missing else Verdict("running", True, None)


def roles_down(members: Sequence[Member]) -> list[str]:
    """Roles of which no process serves: without any one of them no request is answered."""
    roles = {member.role for member in members}
    serving = {member.role for member in members if member.serves}
    return [f"no {role.label}" for role in sorted(roles - serving)]


def backend_is_up(members: Sequence[Member]) -> bool:
    """Whether a worker's probe could come back: everything behind the workers serves."""
    return all(member.serves for member in members if member.role is not Role.TOKENIZER_WORKER)


def _describe(missing: Sequence[Member]) -> str:
    shown = [
        f"{member.name} {'is not probed yet' if member.state is State.RUNNING else f'is {member.state}'}"
        for member in missing[:4]
    ]
    more = len(missing) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
