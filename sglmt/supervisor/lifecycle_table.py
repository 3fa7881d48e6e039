"""The vocabulary of a process's life: states, the one table of transitions, events, actions, the value.

Used by the supervisor process only. `lifecycle.step` is the machine that speaks this vocabulary; the shell
(processes, timers, signals) builds events and performs actions. State names are supervisord's.

All times are seconds of one monotonic clock. A *generation* numbers the processes of one slot, from 1.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sglmt.errors import SglmtError
from sglmt.supervisor.restart_policy import RestartPolicy, deaths_within

HISTORY_LENGTH = 32


class LifecycleError(SglmtError):
    """An event or transition that no correct shell can cause; the message tells the story that led there."""


class State(enum.StrEnum):
    STARTING = "STARTING"  # a spawn was asked for; not ready yet
    RUNNING = "RUNNING"  # ready
    DRAINING = "DRAINING"  # finishing what it has, then it exits by itself
    STOPPING = "STOPPING"  # was told to end (TERM, later KILL) and not reaped yet
    STOPPED = "STOPPED"  # no process, none wanted
    BACKOFF = "BACKOFF"  # no process, the next try has a time
    FATAL = "FATAL"  # no process, given up


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.STOPPED: frozenset({State.STARTING}),
    State.STARTING: frozenset({State.RUNNING, State.STOPPING, State.BACKOFF}),
    State.RUNNING: frozenset({State.DRAINING, State.STOPPING, State.BACKOFF}),
    # A drained process that exits is STOPPED, or STARTING again when the drain was a restart.
    State.DRAINING: frozenset({State.STOPPING, State.STOPPED, State.STARTING}),
    # BACKOFF: the process was ended because it hung or never got ready. STARTING: an operator's restart.
    State.STOPPING: frozenset({State.STOPPED, State.STARTING, State.BACKOFF}),
    # A restart without delay passes through BACKOFF in the same step; so does giving up.
    State.BACKOFF: frozenset({State.STARTING, State.FATAL, State.STOPPED}),
    State.FATAL: frozenset({State.STARTING, State.STOPPED}),
}

LIVE_STATES = frozenset({State.STARTING, State.RUNNING, State.DRAINING, State.STOPPING})
"""States in which there is a process, or a spawn not answered yet."""

WAITING_STATES = frozenset({State.STARTING, State.DRAINING, State.STOPPING, State.BACKOFF})
"""States that always have a time at which the machine acts by itself (`ProcessLife.wake_at_s`)."""


class Wanted(enum.StrEnum):
    RUNNING = "running"
    STOPPED = "stopped"


# --- events: commands, legal in every state ---------------------------------------------------------


@dataclass(frozen=True)
class StartRequested:
    """Be running. While the slot is ending on request: start again once it has ended."""


@dataclass(frozen=True)
class DrainRequested:
    """Finish and end, for good. `deadline_s` (a time): TERM then."""

    deadline_s: float

    def __post_init__(self) -> None:
        _check_deadline(self, self.deadline_s)


@dataclass(frozen=True)
class StopRequested:
    """End, for good: TERM now, KILL at `deadline_s` (a time); KILL at once when it has passed, or when
    `now_immediately`. Repeating it only ever brings the end nearer."""

    deadline_s: float
    now_immediately: bool = False

    def __post_init__(self) -> None:
        _check_deadline(self, self.deadline_s)


@dataclass(frozen=True)
class RestartRequested:
    """An operator's restart: drain until `deadline_s` (a time), end, start at once. Not a failure, so
    not counted. Ignored, with a report, for a slot that is stopped or being stopped."""

    deadline_s: float

    def __post_init__(self) -> None:
        _check_deadline(self, self.deadline_s)


@dataclass(frozen=True)
class ResetRequested:
    """Forget the counted deaths. A FATAL slot starts again at once."""


@dataclass(frozen=True)
class GenerationTaken:
    """Another value of the same role and index (a rolling replacement) has used `number`: spawn behind it."""

    number: int


@dataclass(frozen=True)
class PolicyChanged:
    """New limits, from the next decision on. Deadlines that run stay as they are."""

    policy: RestartPolicy


@dataclass(frozen=True)
class Tick:
    """The time asked for with SetTimer has come. Early, late and needless ones do no harm."""


# --- events: reports from the world, legal only where they are possible ------------------------------


@dataclass(frozen=True)
class Spawned:
    """The answer to `Spawn`. Must come before the generation's Exited; its Ready may overtake it."""

    pid: int
    generation: int


@dataclass(frozen=True)
class SpawnFailed:
    """The other answer to `Spawn`: there is no process. Counts as a death."""

    reason: str


@dataclass(frozen=True)
class Ready:
    generation: int


@dataclass(frozen=True)
class Exited:
    """The process was reaped. Exactly one of `exit_code` and `signal`, or neither when unknown."""

    generation: int
    exit_code: int | None
    signal: int | None


@dataclass(frozen=True)
class HeartbeatLost:
    """Hung, stopped or spinning, as the shell measured it against `policy.heartbeat_timeout_s`. A STARTING
    process has no heartbeat limit (a slow start is not a hang); report one only when it is stopped."""

    generation: int
    reason: str


Command = (
    StartRequested | DrainRequested | StopRequested | RestartRequested | ResetRequested | GenerationTaken
    | PolicyChanged | Tick
)  # fmt: skip
WorldReport = Spawned | SpawnFailed | Ready | Exited | HeartbeatLost
Event = Command | WorldReport

_NO_PROCESS = frozenset({State.STOPPED, State.BACKOFF, State.FATAL})

POSSIBLE: Mapping[type[object], frozenset[State]] = {
    Spawned: LIVE_STATES,
    SpawnFailed: frozenset({State.STARTING, State.STOPPING}),
    Exited: LIVE_STATES,
    # A Ready or a heartbeat verdict may sit in a queue while its process is told to stop, or dies.
    Ready: frozenset({State.STARTING, State.STOPPING}) | _NO_PROCESS,
    HeartbeatLost: LIVE_STATES | _NO_PROCESS,
}
"""Where a report about the *current* generation can arrive; elsewhere it proves a bug and raises."""


# --- actions: what the shell is to do, in order -------------------------------------------------------


@dataclass(frozen=True)
class Spawn:
    """Start a process. Answer exactly once, with Spawned or SpawnFailed."""

    generation: int


@dataclass(frozen=True)
class Signal:
    generation: int
    sig: int


@dataclass(frozen=True)
class DumpStacks:
    """Ask the process to write its stacks; a request, nobody waits for it."""

    generation: int


@dataclass(frozen=True)
class SetTimer:
    """Send Tick at this time. The newest one per slot is the one that counts."""

    at_s: float


@dataclass(frozen=True)
class BeginDrain:
    generation: int
    deadline_s: float


@dataclass(frozen=True)
class Report:
    """A sentence for people."""

    level: Literal["info", "warning", "error"]
    text: str


@dataclass(frozen=True)
class BecameFatal:
    """Given up. `exit_code` is never 0: what the tree ends with if it ends because of this."""

    exit_code: int
    reason: str


Action = Spawn | Signal | DumpStacks | SetTimer | BeginDrain | Report | BecameFatal


# --- the value ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LastExit:
    """`asked`: a stop, drain or restart was under way. Code and signal are None when a spawn failed."""

    text: str
    exit_code: int | None
    signal: int | None
    at_s: float
    generation: int
    asked: bool


@dataclass(frozen=True)
class Transition:
    at_s: float
    origin: State
    target: State
    cause: str

    def __str__(self) -> str:
        return f"{self.at_s:.3f} {self.origin} → {self.target} ({self.cause})"


@dataclass(frozen=True)
class ProcessLife:
    """One slot (role and index), across the processes it has had. Changed only by `lifecycle.step`."""

    name: str
    policy: RestartPolicy
    state: State = State.STOPPED
    since_s: float = 0.0
    wanted: Wanted = Wanted.STOPPED
    generation: int = 0  # of the newest Spawn
    taken: int = 0  # the highest generation that another value of this role and index has used
    pid: int | None = None  # None in a live state: the spawn is not answered yet
    ready_at_s: float | None = None
    deadline_s: float | None = None  # STARTING: be ready; DRAINING: TERM; STOPPING: KILL (again)
    next_try_at_s: float | None = None  # BACKOFF
    restarts: int = 0  # automatic ones, in total; an operator's restarts are not among them
    failures_in_a_row: int = 0  # counted deaths since the last stable run
    deaths: tuple[float, ...] = ()  # times of counted deaths; may hold some that have left the window
    last_exit: LastExit | None = None
    kill_sent: bool = False  # STOPPING: TERM is behind us (or KILL is due as soon as there is a pid)
    trouble: str | None = None  # STOPPING: why the machine ended it unasked; counts as a death
    trouble_since_s: float = 0.0
    gap_forgiven: bool = False  # STARTING: the deadline was already extended once after a clock gap
    history: tuple[Transition, ...] = field(default=(), repr=False)

    @property
    def alive(self) -> bool:
        """There is a process, or a spawn not answered yet."""
        return self.state in LIVE_STATES

    @property
    def wake_at_s(self) -> float | None:
        """When the machine next acts by itself; a time in every waiting state, None in the others."""
        return self.next_try_at_s if self.state is State.BACKOFF else self.deadline_s

    def deaths_in_window(self, now_s: float) -> int:
        return len(deaths_within(self.policy, self.deaths, now_s))

    def story(self) -> str:
        """The last transitions, oldest first, one per line."""
        return "\n".join(f"  {transition}" for transition in self.history) or "  (nothing happened yet)"


def _check_deadline(event: object, deadline_s: float) -> None:
    if not math.isfinite(deadline_s):
        raise ValueError(f"{event!r}: deadline_s must be a finite time; nothing waits without a deadline")
