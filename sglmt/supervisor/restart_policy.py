"""When a dead process is tried again, when it is given up, and how its death is told.

Used by the lifecycle machine, and so by the supervisor process only. It owns numbers and sentences: the
per-role limits, the backoff curve, the budget of deaths, the words for an exit. Everything here is a pure
function of its arguments; there is no clock and no I/O, so nothing here ends or waits for anything.
"""

from __future__ import annotations

import dataclasses
import math
import signal as signals
from collections.abc import Callable
from dataclasses import dataclass

from sglmt.errors import ExitCode

_LIKELY_CAUSES: dict[int, str] = {
    4: "an instruction this CPU lacks: a binary built for another machine",
    6: "a failed assertion or an uncaught C++ exception in native code",
    7: "shared memory full (see df /dev/shm)",
    9: "perhaps out of memory (see dmesg or the cgroup's memory.events)",
    11: "a crash in native code",
    31: "a system call the sandbox forbids",
}


@dataclass(frozen=True)
class RestartPolicy:
    """The limits of one role. All times are seconds, all intervals monotonic.

    Raises ValueError, naming the field, when a value makes no sense.
    """

    backoff_initial_s: float = 0.5
    backoff_factor: float = 2.0
    backoff_cap_s: float = 30.0
    jitter: float = 0.1  # 0..1; only ever shortens a delay, so the cap holds and a herd still spreads
    stable_s: float = 10.0  # ready for this long: the run was good, the next restart is immediate
    max_restarts: int = 5  # counted deaths allowed within restart_window_s; one more spends the budget
    restart_window_s: float = 60.0
    start_timeout_s: float = 120.0  # spawned → ready
    heartbeat_timeout_s: float = 30.0  # for the shell, which watches heartbeats and sends HeartbeatLost
    stop_grace_s: float = 5.0  # TERM → KILL
    hung_grace_s: float = 2.0  # TERM → KILL for a process known to be hung or stopped
    fatal_when_spent: bool = True  # False: keep trying at the cap ("degraded")
    max_failed_starts: int | None = None  # deaths in a row without a stable run, however slow; None: no limit

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_s") and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"RestartPolicy.{field.name} is {value!r}; give a finite number of seconds >= 0")
        if not 0 <= self.jitter <= 1:
            raise ValueError(f"RestartPolicy.jitter is {self.jitter!r}; give a share between 0 and 1")
        if not (math.isfinite(self.backoff_factor) and self.backoff_factor >= 1):
            raise ValueError(f"RestartPolicy.backoff_factor is {self.backoff_factor!r}; give a number >= 1")
        for name in ("max_restarts", "max_failed_starts"):
            count = getattr(self, name)
            if count is not None and count < 0:
                raise ValueError(f"RestartPolicy.{name} is {count!r}; give a whole number >= 0")


def backoff_delay_s(policy: RestartPolicy, failures_in_a_row: int, rand: Callable[[], float]) -> float:
    """Seconds to wait after the n-th counted death in a row; 0 after none. `rand` draws from [0, 1)."""
    if failures_in_a_row <= 0:
        return 0.0
    return min(_plain_delay_s(policy, failures_in_a_row), policy.backoff_cap_s) * _shortening(policy, rand)


def cap_delay_s(policy: RestartPolicy, rand: Callable[[], float]) -> float:
    """Seconds between tries once the budget is spent and the role is one that keeps trying."""
    return policy.backoff_cap_s * _shortening(policy, rand)


def deaths_within(policy: RestartPolicy, deaths: tuple[float, ...], now_s: float) -> tuple[float, ...]:
    """Those of the death times that still count: a death leaves the window `restart_window_s` later."""
    return tuple(at_s for at_s in deaths if now_s - at_s < policy.restart_window_s)


def budget_spent(policy: RestartPolicy, deaths_in_window: int, failures_in_a_row: int) -> bool:
    """Whether this many counted deaths are more than the role is allowed."""
    if policy.max_failed_starts is not None and failures_in_a_row > policy.max_failed_starts:
        return True
    return deaths_in_window > policy.max_restarts


def signal_name(sig: int) -> str:
    """`SIGKILL (9)`; `signal 99` for a number this system has no name for."""
    try:
        return f"{signals.Signals(sig).name} ({sig})"
    except ValueError:
        return f"signal {sig}"


def exit_name(code: int | None, signal: int | None) -> str:
    """How a process ended, without guessing why: `exit code 3`, `signal SIGTERM (15)`.

    A negative code is read as the signal of that number, as subprocess reports it.
    """
    if signal is None and code is not None and code < 0:
        signal = -code
    if signal is not None:
        name = signal_name(signal)
        return name if name.startswith("signal") else f"signal {name}"
    return "exit status unknown" if code is None else f"exit code {code}"


def describe_exit(code: int | None, signal: int | None) -> str:
    """`exit_name` with the likely cause, for an exit nobody asked for."""
    number = signal if signal is not None else -code if code is not None and code < 0 else None
    cause = _LIKELY_CAUSES.get(number) if number is not None else None
    return exit_name(code, signal) + (f", {cause}" if cause else "")


def tree_exit_code(code: int | None) -> int:
    """The exit code for a tree that ends because this child did: the child's own when it says "failed"
    (1..255), else 70. Death by signal is 70 too: 128+n is kept for the supervisor's own signals."""
    return code if code is not None and 0 < code <= 255 else int(ExitCode.CHILD_DEATH)


def _plain_delay_s(policy: RestartPolicy, failures_in_a_row: int) -> float:
    try:
        return float(policy.backoff_initial_s * policy.backoff_factor ** (failures_in_a_row - 1))
    except OverflowError:  # a process that has failed for days: 2.0 ** 1024 is no float
        return policy.backoff_cap_s


def _shortening(policy: RestartPolicy, rand: Callable[[], float]) -> float:
    return 1.0 - policy.jitter * rand()
