"""A process's life as a pure machine: (life, event, now) → (life, actions).

Used by the supervisor process only. It owns every decision about one slot: when to spawn, to signal, to
wait and until when, to try again, to give up. It does nothing itself: the shell performs the actions in
order and feeds back what happened. `new_life` begins a slot; a slot ends when its owner drops it.

Decisions worth knowing:

- Every waiting state has a time (`ProcessLife.wake_at_s`), and a SetTimer for it went out. A Tick that comes
  early (timers may, by their resolution) gets the SetTimer again.
- A restart without delay passes through BACKOFF within one step. So does giving up: BACKOFF → FATAL.
- A process the machine ends unasked (hung, never ready) is in STOPPING until it is reaped, then in BACKOFF.
- Signals need a pid. While a spawn is unanswered they are owed, and paid when Spawned arrives; no second
  process is spawned before the first is accounted for. The start deadline runs anew from Spawned: a queue
  of spawns is no slow start.
- A hung process was well until a heartbeat limit before it was found. Only a run that was stable by that
  measure excuses it from the budget; else a process that hangs at once, every time, would never be given up.
- Clock gaps. A Tick that comes more than LATE_TICK_S after the start deadline means that this process did not
  run, so its child perhaps did not either (suspend, a paused machine): the start deadline is extended by what
  was lost, at most a whole start timeout, once per start. Drain and stop deadlines are promises to an
  operator and are kept. A gap before the deadline cannot be seen here. (CLOCK_MONOTONIC stands still in a
  suspend on Linux; a stopped or paused supervisor sees gaps all the same.)
"""

from __future__ import annotations

import signal as signals
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from sglmt.supervisor.lifecycle_table import (
    HISTORY_LENGTH,
    POSSIBLE,
    TRANSITIONS,
    WAITING_STATES,
    Action,
    BecameFatal,
    BeginDrain,
    DrainRequested,
    DumpStacks,
    Event,
    Exited,
    GenerationTaken,
    HeartbeatLost,
    LastExit,
    LifecycleError,
    PolicyChanged,
    ProcessLife,
    Ready,
    Report,
    ResetRequested,
    RestartRequested,
    SetTimer,
    Signal,
    Spawn,
    Spawned,
    SpawnFailed,
    StartRequested,
    State,
    StopRequested,
    Tick,
    Transition,
    Wanted,
)
from sglmt.supervisor.restart_policy import (
    RestartPolicy,
    backoff_delay_s,
    budget_spent,
    cap_delay_s,
    deaths_within,
    describe_exit,
    exit_name,
    tree_exit_code,
)

__all__ = [
    "Action", "BecameFatal", "BeginDrain", "DrainRequested", "DumpStacks", "Event", "Exited", "GenerationTaken",
    "HeartbeatLost", "LastExit", "LifecycleError", "PolicyChanged", "ProcessLife", "Ready", "Report",
    "ResetRequested", "RestartPolicy", "RestartRequested", "SetTimer", "Signal", "Spawn", "SpawnFailed", "Spawned",
    "StartRequested", "State", "StopRequested", "Tick", "Transition", "Wanted", "describe_exit", "new_life", "step",
]  # fmt: skip

DID_NOT_END = "did not end within"  # how the log says that a process had to be killed
LATE_TICK_S = 5.0
KILL_RETRY_S = 5.0  # KILL again, and say so, while a killed process is not reaped


def new_life(name: str, policy: RestartPolicy, last_generation: int = 0) -> ProcessLife:
    """A STOPPED slot. `last_generation`: the newest one this role and index ever had, when another slot value
    held it before (a rolling replacement); the first spawn gets the next number."""
    return ProcessLife(name=name, policy=policy, generation=last_generation)


def step(life: ProcessLife, event: Event, now_s: float, rand: Callable[[], float]) -> tuple[ProcessLife, list[Action]]:
    """One event of one slot. `now_s` is monotonic; `rand` draws from [0, 1) for jitter.

    Reports about an older generation, and those that merely lost a race, change nothing. Raises
    LifecycleError for a report that is impossible here: a process would be forgotten or counted twice.
    """
    turn = _Turn(life, event, now_s, rand)
    if turn.concerns_the_present():
        _dispatch(turn, event)
    return turn.life, turn.actions


class _Turn:
    """The life being changed within one step, and the actions collected so far."""

    def __init__(self, life: ProcessLife, event: Event, now_s: float, rand: Callable[[], float]) -> None:
        self.life = life
        self.event = event
        self.now_s = now_s
        self.rand = rand
        self.actions: list[Action] = []

    def concerns_the_present(self) -> bool:
        """False for what is to be ignored. Raises for what cannot be."""
        generation = getattr(self.event, "generation", self.life.generation)
        if generation < self.life.generation:
            return False
        possible = POSSIBLE.get(type(self.event))
        if generation > self.life.generation or (possible is not None and self.life.state not in possible):
            raise self.impossible()
        return True

    def impossible(self) -> LifecycleError:
        life = self.life
        return LifecycleError(
            f"{life.name}: {self.event!r} is impossible in {life.state} (generation {life.generation}, "
            f"pid {life.pid}) at {self.now_s:.3f}; what led there:\n{life.story()}"
        )

    def change(self, **fields: Any) -> None:
        self.life = replace(self.life, **fields)

    def go(self, target: State, **fields: Any) -> None:
        """The only place where the state changes. The times of the state left behind end here."""
        origin = self.life.state
        if target not in TRANSITIONS[origin]:
            raise LifecycleError(
                f"{self.life.name}: {self.event!r} would go {origin} → {target}, which is no transition, "
                f"at {self.now_s:.3f}; what led there:\n{self.life.story()}"
            )
        transition = Transition(self.now_s, origin, target, _cause(self.event))
        history = (*self.life.history, transition)[-HISTORY_LENGTH:]
        times: dict[str, Any] = {"since_s": self.now_s, "deadline_s": None, "next_try_at_s": None}
        self.change(**(times | {"state": target, "history": history} | fields))

    def wait_until(self, deadline_s: float) -> None:
        self.change(deadline_s=deadline_s)
        self.actions.append(SetTimer(deadline_s))

    def send(self, sig: signals.Signals) -> None:
        """Now, or when there is a pid: `_spawned` pays what is owed."""
        if self.life.pid is not None:
            self.actions.append(Signal(self.life.generation, sig))

    def say(self, level: Literal["info", "warning", "error"], text: str) -> None:
        pid = f" (pid {self.life.pid})" if self.life.pid is not None else ""
        self.actions.append(Report(level, f"{self.life.name}{pid} {text}"))


def _dispatch(turn: _Turn, event: Event) -> None:
    match event:
        case StartRequested():
            _start_requested(turn)
        case DrainRequested(deadline_s):
            _drain_requested(turn, deadline_s)
        case StopRequested(deadline_s, now_immediately):
            _stop_requested(turn, deadline_s, now_immediately)
        case RestartRequested(deadline_s):
            _restart_requested(turn, deadline_s)
        case ResetRequested():
            _reset_requested(turn)
        case GenerationTaken(number):
            turn.change(taken=max(turn.life.taken, number))
        case PolicyChanged(policy):
            turn.change(policy=policy)
        case Tick():
            _tick(turn)
        case Spawned(pid):
            _spawned(turn, pid)
        case SpawnFailed(reason):
            _spawn_failed(turn, reason)
        case Ready():
            _ready(turn)
        case Exited(_, exit_code, signal):
            _exited(turn, exit_code, signal)
        case HeartbeatLost(_, reason):
            _heartbeat_lost(turn, reason)


# --- commands -----------------------------------------------------------------------------------------


def _start_requested(turn: _Turn) -> None:
    match turn.life.state:
        case State.STOPPED:
            turn.change(wanted=Wanted.RUNNING)
            _spawn(turn)
        case State.DRAINING | State.STOPPING if turn.life.wanted is Wanted.STOPPED:
            turn.change(wanted=Wanted.RUNNING, trouble=None)
            turn.say("info", "starts again once it has ended")
        case State.FATAL:
            turn.say("warning", "was given up; reset or restart it to start it again")


def _drain_requested(turn: _Turn, deadline_s: float) -> None:
    turn.change(wanted=Wanted.STOPPED)
    match turn.life.state:
        case State.RUNNING:
            _drain(turn, deadline_s)
        case State.STARTING:  # nothing to finish yet
            _end(turn, min(deadline_s, turn.now_s + turn.life.policy.stop_grace_s))
        case State.DRAINING:
            _bring_nearer(turn, deadline_s)
        case State.BACKOFF | State.FATAL:
            _cancel(turn)


def _stop_requested(turn: _Turn, deadline_s: float, now_immediately: bool) -> None:
    turn.change(wanted=Wanted.STOPPED)
    kill = now_immediately or deadline_s <= turn.now_s
    match turn.life.state:
        case State.STARTING | State.RUNNING | State.DRAINING:
            _end(turn, deadline_s, kill=kill)
        case State.STOPPING if kill:
            if not turn.life.kill_sent:
                _kill(turn)
        case State.STOPPING:
            _bring_nearer(turn, deadline_s)
        case State.BACKOFF | State.FATAL:
            _cancel(turn)


def _restart_requested(turn: _Turn, deadline_s: float) -> None:
    if turn.life.wanted is Wanted.STOPPED:
        turn.say("warning", f"is {turn.life.state}, not wanted running: not restarted")
        return
    match turn.life.state:
        case State.RUNNING:
            _drain(turn, deadline_s)
        case State.STARTING:
            _end(turn, min(deadline_s, turn.now_s + turn.life.policy.stop_grace_s))
        case State.DRAINING:
            _bring_nearer(turn, deadline_s)
        case State.STOPPING:  # whatever it was ended for, the operator's restart excuses it
            turn.change(trouble=None)
        case State.BACKOFF:
            _spawn(turn)
        case State.FATAL:
            _reset_requested(turn)


def _reset_requested(turn: _Turn) -> None:
    turn.change(deaths=(), failures_in_a_row=0)
    if turn.life.state is State.FATAL:
        _spawn(turn)


def _cancel(turn: _Turn) -> None:
    turn.go(State.STOPPED)
    turn.say("info", "is stopped; it will not be tried again")


# --- time ---------------------------------------------------------------------------------------------


def _tick(turn: _Turn) -> None:
    life, wake_at_s = turn.life, turn.life.wake_at_s
    if life.state not in WAITING_STATES or wake_at_s is None:
        return
    if turn.now_s < wake_at_s:
        turn.actions.append(SetTimer(wake_at_s))
        return
    match life.state:
        case State.BACKOFF:
            turn.change(restarts=life.restarts + 1)
            _spawn(turn)
        case State.STARTING:
            _start_deadline_passed(turn, late_s=turn.now_s - wake_at_s)
        case State.DRAINING:
            turn.say("warning", "did not finish by the drain deadline: TERM")
            _end(turn, turn.now_s + life.policy.stop_grace_s)
        case State.STOPPING:
            _stop_deadline_passed(turn)


def _start_deadline_passed(turn: _Turn, late_s: float) -> None:
    life, timeout_s = turn.life, turn.life.policy.start_timeout_s
    if life.pid is None:  # nothing to end, and a second spawn might make two
        turn.say("warning", f"has waited {turn.now_s - life.since_s:.1f} s to be spawned; still waiting")
        turn.wait_until(turn.now_s + max(timeout_s, KILL_RETRY_S))
    elif late_s > LATE_TICK_S and not life.gap_forgiven:
        extension_s = min(late_s, timeout_s)
        turn.change(gap_forgiven=True)
        turn.say("warning", f"gets {extension_s:.1f} s more to start: the clock jumped {late_s:.1f} s")
        turn.wait_until(turn.now_s + extension_s)
    else:
        _end_for(turn, f"not ready after {timeout_s:g} s", life.policy.stop_grace_s, well_until_s=turn.now_s)


def _stop_deadline_passed(turn: _Turn) -> None:
    waited_s = turn.now_s - turn.life.since_s
    if turn.life.pid is None:
        turn.say("warning", f"is to end, but its spawn is unanswered after {waited_s:.1f} s; KILL follows it")
    elif turn.life.kill_sent:
        turn.say("error", f"is still there {waited_s:.1f} s after it was to end, despite KILL; KILL again")
    else:
        turn.say("warning", f"{DID_NOT_END} {waited_s:.1f} s: KILL")
    _kill(turn)


# --- reports from the world ---------------------------------------------------------------------------


def _spawned(turn: _Turn, pid: int) -> None:
    if turn.life.pid is not None:
        raise turn.impossible()
    turn.change(pid=pid)
    if turn.life.state is State.STARTING:
        turn.wait_until(turn.now_s + turn.life.policy.start_timeout_s)
    elif turn.life.state is State.STOPPING:
        turn.send(signals.SIGKILL if turn.life.kill_sent else signals.SIGTERM)


def _spawn_failed(turn: _Turn, reason: str) -> None:
    if turn.life.pid is not None:
        raise turn.impossible()
    _gone(turn, f"could not be spawned: {reason}", None, None)


def _ready(turn: _Turn) -> None:
    if turn.life.state is State.STARTING:
        took_s = turn.now_s - turn.life.since_s
        turn.go(State.RUNNING, ready_at_s=turn.now_s)
        turn.say("info", f"is ready after {took_s:.1f} s")


def _exited(turn: _Turn, exit_code: int | None, signal: int | None) -> None:
    if turn.life.pid is None:
        raise turn.impossible()
    if signal is None and exit_code is not None and exit_code < 0:
        signal, exit_code = -exit_code, None
    unasked = turn.life.state in (State.STARTING, State.RUNNING)
    text = describe_exit(exit_code, signal) if unasked else exit_name(exit_code, signal)
    _gone(turn, text, exit_code, signal)


def _heartbeat_lost(turn: _Turn, reason: str) -> None:
    life = turn.life
    if life.state in (State.STARTING, State.RUNNING):
        well_until_s = turn.now_s - life.policy.heartbeat_timeout_s
        _end_for(turn, f"hung: {reason}", life.policy.hung_grace_s, well_until_s)
    elif life.state is State.DRAINING:  # it was to end anyway: nothing to count
        turn.say("warning", f"hung while draining: {reason}; TERM, then KILL")
        turn.actions.append(DumpStacks(life.generation))
        _end(turn, turn.now_s + life.policy.hung_grace_s)


# --- what they have in common -------------------------------------------------------------------------


def _spawn(turn: _Turn) -> None:
    generation = max(turn.life.generation, turn.life.taken) + 1
    turn.go(State.STARTING, generation=generation, pid=None, ready_at_s=None, gap_forgiven=False)
    turn.actions.append(Spawn(turn.life.generation))
    turn.wait_until(turn.now_s + max(turn.life.policy.start_timeout_s, KILL_RETRY_S))


def _drain(turn: _Turn, deadline_s: float) -> None:
    if deadline_s <= turn.now_s:
        _end(turn, turn.now_s + turn.life.policy.stop_grace_s)
        return
    turn.go(State.DRAINING)
    turn.actions.append(BeginDrain(turn.life.generation, deadline_s))
    turn.wait_until(deadline_s)


def _end(turn: _Turn, kill_at_s: float, *, kill: bool = False) -> None:
    turn.go(State.STOPPING, kill_sent=False, trouble=None)
    if kill:
        _kill(turn)
    else:
        turn.send(signals.SIGTERM)
        turn.wait_until(kill_at_s)


def _end_for(turn: _Turn, trouble: str, grace_s: float, well_until_s: float) -> None:
    """End a process that failed without dying; its exit will count as a death, for this reason."""
    turn.say("warning", f"{trouble}; stack dump asked for, TERM, KILL in {grace_s:g} s")
    turn.actions.append(DumpStacks(turn.life.generation))
    _end(turn, turn.now_s + grace_s)
    turn.change(trouble=trouble, trouble_since_s=well_until_s)


def _kill(turn: _Turn) -> None:
    turn.change(kill_sent=True)
    turn.send(signals.SIGKILL)
    turn.wait_until(turn.now_s + KILL_RETRY_S)


def _bring_nearer(turn: _Turn, deadline_s: float) -> None:
    current_s = turn.life.deadline_s
    if not turn.life.kill_sent and current_s is not None and deadline_s < current_s:
        turn.wait_until(deadline_s)


def _gone(turn: _Turn, text: str, exit_code: int | None, signal: int | None) -> None:
    """There is no process any more: asked for, or a death that is counted and answered."""
    life = turn.life
    asked = life.state in (State.DRAINING, State.STOPPING) and life.trouble is None
    turn.change(last_exit=LastExit(text, exit_code, signal, turn.now_s, life.generation, asked))
    if life.wanted is Wanted.STOPPED:
        clean = exit_code == 0 or signal == signals.SIGTERM
        turn.say("info" if clean else "warning", f"ended: {text}")
        turn.go(State.STOPPED, pid=None)
    elif asked:
        turn.say("info", f"ended: {text}; restart now, as asked")
        _spawn(turn)
    else:
        _died(turn, f"{life.trouble}; ended with {text}" if life.trouble else text, exit_code)


def _died(turn: _Turn, why: str, exit_code: int | None) -> None:
    life, policy, now_s = turn.life, turn.life.policy, turn.now_s
    well_until_s = life.trouble_since_s if life.trouble else now_s
    stable = life.ready_at_s is not None and well_until_s - life.ready_at_s >= policy.stable_s
    deaths = deaths_within(policy, life.deaths, now_s)
    if stable:
        turn.change(deaths=deaths, failures_in_a_row=0)
    else:
        turn.change(deaths=(*deaths, now_s), failures_in_a_row=life.failures_in_a_row + 1)
    count, in_a_row = len(turn.life.deaths), turn.life.failures_in_a_row
    spent = not stable and budget_spent(policy, count, in_a_row)
    story, window = f"{_age(life, now_s)}: {why}", f"{policy.restart_window_s:g} s"
    if spent and policy.fatal_when_spent:
        _give_up(turn, f"{story}; given up, {in_a_row} failures in a row, {count} within {window}", exit_code)
    else:
        delay_s = cap_delay_s(policy, turn.rand) if spent else backoff_delay_s(policy, in_a_row, turn.rand)
        _back_off(turn, story, delay_s, spent)


def _back_off(turn: _Turn, story: str, delay_s: float, spent: bool) -> None:
    number = turn.life.restarts + 1
    when = f"restart {number} in {delay_s:.1f} s" if delay_s > 0 else f"restart {number} now"
    budget = f" (budget of {turn.life.policy.max_restarts} spent, keeps trying)" if spent else ""
    turn.say("error" if spent else "warning", f"{story}; {when}{budget}")
    next_try_at_s = turn.now_s + delay_s
    turn.go(State.BACKOFF, pid=None, trouble=None, next_try_at_s=next_try_at_s)
    if delay_s > 0:
        turn.actions.append(SetTimer(next_try_at_s))
    else:
        turn.change(restarts=number)
        _spawn(turn)


def _give_up(turn: _Turn, reason: str, exit_code: int | None) -> None:
    turn.say("error", reason)
    turn.go(State.BACKOFF, pid=None, trouble=None)
    turn.go(State.FATAL)
    turn.actions.append(BecameFatal(tree_exit_code(exit_code), f"{turn.life.name} {reason}"))


def _age(life: ProcessLife, now_s: float) -> str:
    if life.ready_at_s is None:
        return "failed before it was ready"
    return f"failed {now_s - life.ready_at_s:.1f} s after it was ready"


def _cause(event: Event) -> str:
    """An event for the history: `Exited: signal SIGKILL (9)`."""
    match event:
        case Exited(_, exit_code, signal):
            return f"Exited: {exit_name(exit_code, signal)}"
        case HeartbeatLost(_, reason) | SpawnFailed(reason):
            return f"{type(event).__name__}: {reason}"
        case _:
            return type(event).__name__
