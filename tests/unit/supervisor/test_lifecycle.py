"""Histories of a process's life, replayed without processes, clocks or sleeps."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from typing import TypeVar

import pytest

from sglmt.supervisor.lifecycle import (
    KILL_RETRY_S,
    LATE_TICK_S,
    Action,
    BecameFatal,
    BeginDrain,
    DrainRequested,
    DumpStacks,
    Event,
    Exited,
    HeartbeatLost,
    LifecycleError,
    Ready,
    Report,
    ResetRequested,
    RestartPolicy,
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
    Wanted,
    _Turn,
    new_life,
    step,
)
from sglmt.supervisor.lifecycle_table import HISTORY_LENGTH, LIVE_STATES, TRANSITIONS, WAITING_STATES

NAME = "tokenizer_worker:3"
POLICY = RestartPolicy(jitter=0.0, start_timeout_s=20.0, heartbeat_timeout_s=30.0, stop_grace_s=5.0, hung_grace_s=2.0)
TERM, KILL = signal.SIGTERM, signal.SIGKILL
A = TypeVar("A", bound=Action)


class Replay:
    """One slot and the actions of its last step."""

    def __init__(self, policy: RestartPolicy = POLICY, last_generation: int = 0) -> None:
        self.life = new_life(NAME, policy, last_generation)
        self.now_s = 100.0
        self.actions: list[Action] = []

    def feed(self, *events: Event, after_s: float = 0.0) -> Replay:
        self.now_s += after_s
        self.actions = []
        for event in events:
            self.life, actions = step(self.life, event, self.now_s, lambda: 0.0)
            self.actions += actions
            waiting = self.life.state in WAITING_STATES
            assert (self.life.wake_at_s is not None) is waiting
            timers = [action.at_s for action in actions if isinstance(action, SetTimer)]
            if timers:
                assert timers[-1] == self.life.wake_at_s
        return self

    def wake(self, late_s: float = 0.0) -> Replay:
        """The timer fires."""
        assert self.life.wake_at_s is not None, "nothing to wait for"
        return self.feed(Tick(), after_s=self.life.wake_at_s - self.now_s + late_s)

    def did(self, kind: type[A]) -> list[A]:
        return [action for action in self.actions if isinstance(action, kind)]

    @property
    def signals(self) -> list[int]:
        return [action.sig for action in self.did(Signal)]

    @property
    def said(self) -> str:
        return " | ".join(report.text for report in self.did(Report))

    # histories that others begin with

    def starting(self) -> Replay:
        return self.feed(StartRequested()).spawned()

    def spawned(self) -> Replay:
        return self.feed(Spawned(1000 + self.life.generation, self.life.generation))

    def running(self, for_s: float = 0.0) -> Replay:
        if self.life.state is State.STOPPED:
            self.starting()
        elif self.life.pid is None:
            self.spawned()
        return self.feed(Ready(self.life.generation)).later(for_s)

    def draining(self, deadline_in_s: float = 30.0) -> Replay:
        return self.running().feed(DrainRequested(self.now_s + deadline_in_s))

    def stopping(self, deadline_in_s: float = 5.0) -> Replay:
        return self.running().feed(StopRequested(self.now_s + deadline_in_s))

    def backoff(self) -> Replay:
        return self.starting().exits(1)

    def fatal(self) -> Replay:
        self.backoff()
        while self.life.state is not State.FATAL:
            self.wake().spawned().exits(3)
        return self

    def exits(self, code: int | None = None, sig: int | None = None, after_s: float = 0.0) -> Replay:
        return self.feed(Exited(self.life.generation, code, sig), after_s=after_s)

    def later(self, seconds: float) -> Replay:
        self.now_s += seconds
        return self


IN_STATE: dict[State, Callable[[], Replay]] = {
    State.STOPPED: Replay,
    State.STARTING: lambda: Replay().starting(),
    State.RUNNING: lambda: Replay().running(),
    State.DRAINING: lambda: Replay().draining(),
    State.STOPPING: lambda: Replay().stopping(),
    State.BACKOFF: lambda: Replay().backoff(),
    State.FATAL: lambda: Replay().fatal(),
}


def states(replay: Replay) -> list[State]:
    return [transition.target for transition in replay.life.history]


# --- the ordinary life ---------------------------------------------------------------------------------


def test_start_ready_drain_exit() -> None:
    r = Replay().feed(StartRequested())
    assert r.did(Spawn) == [Spawn(1)]
    r.running().feed(DrainRequested(r.now_s + 30))
    assert r.did(BeginDrain) == [BeginDrain(1, r.now_s + 30)]
    assert r.did(SetTimer) == [SetTimer(r.now_s + 30)]
    assert r.signals == []
    r.exits(0, after_s=3)
    assert (r.life.state, r.life.pid, r.life.wanted) == (State.STOPPED, None, Wanted.STOPPED)
    assert r.did(Spawn) == []
    assert r.life.restarts == 0
    assert r.life.last_exit is not None
    assert r.life.last_exit.asked
    assert states(r) == [State.STARTING, State.RUNNING, State.DRAINING, State.STOPPED]


def test_a_slot_keeps_counting_generations_from_where_it_took_over() -> None:
    r = Replay(last_generation=7).feed(StartRequested())
    assert r.did(Spawn) == [Spawn(8)]


# --- deaths: backoff, budget, stable run ----------------------------------------------------------------


@pytest.mark.parametrize("how", [(0, None), (1, None), (None, 9), (None, None)])
@pytest.mark.parametrize("state", [State.STARTING, State.RUNNING])
def test_an_unasked_exit_of_any_kind_is_a_failure(how: tuple[int | None, int | None], state: State) -> None:
    r = IN_STATE[state]().exits(*how)
    assert r.life.state is State.BACKOFF
    assert r.life.deaths == (r.now_s,)
    assert r.did(SetTimer) == [SetTimer(r.now_s + 0.5)]


def test_a_death_is_told_in_one_sentence() -> None:
    r = Replay().running().exits(sig=7, after_s=2.3)
    assert r.said == (
        "tokenizer_worker:3 (pid 1001) failed 2.3 s after it was ready: signal SIGBUS (7), "
        "shared memory full (see df /dev/shm); restart 1 in 0.5 s"
    )


def test_the_first_restart_after_a_stable_run_is_immediate_and_not_counted() -> None:
    r = Replay().running(for_s=10.0).exits(1)
    assert r.life.state is State.STARTING
    assert r.did(Spawn) == [Spawn(2)]
    assert (r.life.deaths, r.life.restarts) == ((), 1)
    assert states(r)[-2:] == [State.BACKOFF, State.STARTING]


def test_a_run_one_moment_too_short_is_not_stable() -> None:
    r = Replay().running(for_s=9.99).exits(1)
    assert r.life.state is State.BACKOFF
    assert len(r.life.deaths) == 1


def test_a_crash_loop_backs_off_and_ends_fatal() -> None:
    r, delays = Replay().starting(), []
    for _ in range(5):
        r.exits(66)
        delays.append(r.life.wake_at_s - r.now_s)  # type: ignore[operator]
        r.wake()
        assert r.did(Spawn) == [Spawn(r.life.generation)]
        r.spawned()
    r.exits(66)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0]
    assert r.life.state is State.FATAL
    (fatal,) = r.did(BecameFatal)
    assert fatal.exit_code == 66
    assert "exit code 66" in fatal.reason
    assert "given up" in r.said
    assert r.did(Spawn) == []
    assert r.did(SetTimer) == []
    assert r.life.restarts == 5
    assert states(r)[-2:] == [State.BACKOFF, State.FATAL]


@pytest.mark.parametrize("how", [(0, None), (None, 9), (None, None)])
def test_fatal_never_carries_exit_code_zero(how: tuple[int | None, int | None]) -> None:
    r = Replay(dataclasses.replace(POLICY, max_restarts=0)).starting().exits(*how)
    assert [action.exit_code for action in r.did(BecameFatal)] == [70]


def test_a_role_that_keeps_trying_stays_at_the_cap() -> None:
    r = Replay(dataclasses.replace(POLICY, fatal_when_spent=False)).starting()
    for _ in range(5):
        r.exits(1).wake().spawned()
    for _ in range(50):
        r.exits(1)
        assert r.life.state is State.BACKOFF
        assert r.life.wake_at_s == r.now_s + 30
        r.wake().spawned()
    assert "restart 56 in 30.0 s" in r.exits(1).said
    assert len(r.life.deaths) < 10  # what left the window is forgotten


def test_the_budget_window_slides() -> None:
    r = Replay().starting()
    for _ in range(30):  # a death every 20 s is never six in sixty seconds
        r.exits(1, after_s=20.0)
        assert r.life.state is State.BACKOFF
        r.feed(RestartRequested(r.now_s + 1)).spawned()
    assert r.life.deaths_in_window(r.now_s) == 3
    assert r.life.deaths_in_window(r.now_s + 60) == 0


def test_failures_too_slow_for_the_window_have_their_own_limit() -> None:
    r = Replay(dataclasses.replace(POLICY, max_failed_starts=3)).starting()
    for _ in range(3):
        r.exits(1, after_s=90.0).wake().spawned()
    assert r.exits(1, after_s=90.0).life.state is State.FATAL


def test_a_stable_run_resets_the_backoff_but_not_the_window() -> None:
    r = Replay().starting()
    for _ in range(3):
        r.exits(1).wake().spawned()
    r.running(for_s=11).exits(1)
    assert r.life.state is State.STARTING
    assert r.life.failures_in_a_row == 0
    assert r.life.deaths_in_window(r.now_s) == 3
    r.spawned().exits(1)
    assert r.life.wake_at_s == r.now_s + 0.5


def test_a_failed_spawn_is_a_death() -> None:
    r = Replay().feed(StartRequested(), SpawnFailed("EAGAIN: too many processes"))
    assert r.life.state is State.BACKOFF
    assert "could not be spawned: EAGAIN" in r.said
    assert r.life.deaths == (r.now_s,)


# --- starts that take long -------------------------------------------------------------------------------


def test_a_slow_start_within_its_deadline_is_left_alone() -> None:
    r = Replay().starting().feed(Tick(), after_s=19.9)
    assert r.life.state is State.STARTING
    assert r.did(SetTimer) == [SetTimer(r.now_s - 19.9 + 20)]  # an early wake must not lose the timer
    assert r.feed(Ready(1)).life.state is State.RUNNING
    assert r.life.wake_at_s is None
    assert r.feed(Tick(), after_s=1000).actions == []


def test_a_start_that_never_gets_ready_is_ended_and_counted() -> None:
    r = Replay().starting().wake()
    assert r.did(DumpStacks) == [DumpStacks(1)]
    assert r.signals == [TERM]
    assert r.actions.index(DumpStacks(1)) < r.actions.index(Signal(1, TERM))
    assert (r.life.state, r.life.wake_at_s) == (State.STOPPING, r.now_s + 5)
    assert r.wake().signals == [KILL]
    r.exits(sig=9)
    assert r.life.state is State.BACKOFF
    assert len(r.life.deaths) == 1
    assert "not ready after 20 s; ended with signal SIGKILL (9); restart 1 in 0.5 s" in r.said
    assert "memory" not in r.said  # we killed it ourselves


def test_ready_while_being_ended_for_slowness_does_not_stop_the_end() -> None:
    r = Replay().starting().wake().feed(Ready(1))
    assert (r.life.state, r.actions) == (State.STOPPING, [])


def test_time_in_the_spawn_queue_is_not_start_time() -> None:
    r = Replay().feed(StartRequested()).wake()
    assert r.life.state is State.STARTING
    assert r.signals == []
    assert "still waiting" in r.said
    r.later(5).spawned()
    assert r.life.wake_at_s == r.now_s + 20


def test_ready_may_overtake_spawned() -> None:
    r = Replay().feed(StartRequested(), Ready(1))
    assert r.life.state is State.RUNNING
    r.feed(StopRequested(r.now_s + 5))
    assert r.signals == []
    assert r.spawned().signals == [TERM]


def test_one_tick_after_a_clock_gap_does_not_kill_a_starting_process() -> None:
    r = Replay().starting().wake(late_s=3600)
    assert (r.life.state, r.signals) == (State.STARTING, [])
    assert r.life.wake_at_s == r.now_s + 20
    assert "clock jumped 3600.0 s" in r.said
    assert r.wake(late_s=3600).life.state is State.STOPPING  # once per start


def test_the_extension_is_what_was_lost_and_a_little_lateness_is_none() -> None:
    r = Replay().starting().wake(late_s=LATE_TICK_S + 2)
    assert r.life.wake_at_s == r.now_s + LATE_TICK_S + 2
    assert Replay().starting().wake(late_s=LATE_TICK_S).life.state is State.STOPPING


def test_each_start_may_be_forgiven_once() -> None:
    r = Replay().starting().wake(late_s=100).exits(1).wake().spawned().wake(late_s=100)
    assert r.life.state is State.STARTING


@pytest.mark.parametrize("state", [State.RUNNING, State.STOPPED, State.FATAL])
def test_a_clock_gap_means_nothing_to_who_does_not_wait(state: State) -> None:
    assert IN_STATE[state]().feed(Tick(), after_s=1e6).actions == []


# --- hung processes --------------------------------------------------------------------------------------


def test_a_hung_process_that_ignores_term_is_killed_and_replaced() -> None:
    r = Replay().running(for_s=3600).feed(HeartbeatLost(1, "no heartbeat for 30 s"))
    assert r.did(DumpStacks) == [DumpStacks(1)]
    assert r.signals == [TERM]
    assert r.life.wake_at_s == r.now_s + 2
    assert r.wake().signals == [KILL]
    r.exits(sig=9)
    assert r.did(Spawn) == [Spawn(2)]  # it had run well: at once
    assert "hung: no heartbeat for 30 s; ended with signal SIGKILL (9); restart 1 now" in r.said


def test_a_process_that_hangs_as_soon_as_it_is_ready_is_counted() -> None:
    r = Replay().running(for_s=35).feed(HeartbeatLost(1, "no heartbeat for 30 s")).exits(sig=15)
    assert r.life.state is State.BACKOFF
    assert len(r.life.deaths) == 1


def test_a_long_death_struggle_does_not_make_a_run_stable() -> None:
    r = Replay().running(for_s=35).feed(HeartbeatLost(1, "hung")).exits(sig=9, after_s=60)
    assert len(r.life.deaths) == 1


def test_a_killed_process_that_stays_is_killed_again_and_never_replaced_before_it_is_gone() -> None:
    r = Replay().running().feed(HeartbeatLost(1, "state D")).wake()
    for _ in range(5):
        assert r.wake().signals == [KILL]
        assert "despite KILL" in r.said
        assert r.did(Spawn) == []


def test_hung_while_draining_ends_sooner_and_for_good() -> None:
    r = Replay().draining(600).feed(HeartbeatLost(1, "spins"))
    assert r.did(DumpStacks) == [DumpStacks(1)]
    assert r.signals == [TERM]
    assert r.life.wake_at_s == r.now_s + 2
    assert r.exits(sig=15).life.state is State.STOPPED
    assert r.did(Spawn) == []


def test_a_process_stopped_while_starting_is_ended() -> None:
    r = Replay().starting().feed(HeartbeatLost(1, "stopped (state T)"))
    assert r.signals == [TERM]
    assert len(r.exits(sig=9).life.deaths) == 1


def test_a_heartbeat_verdict_about_a_stopping_process_changes_nothing() -> None:
    r = Replay().stopping().feed(HeartbeatLost(1, "no heartbeat"))
    assert r.actions == []


def test_start_is_no_excuse_for_a_hung_process_being_ended() -> None:
    r = Replay().running().feed(HeartbeatLost(1, "hung"), StartRequested()).exits(sig=9)
    assert (r.life.state, len(r.life.deaths)) == (State.BACKOFF, 1)


def test_stop_while_a_hung_process_is_being_replaced() -> None:
    r = Replay().running().feed(HeartbeatLost(1, "hung"))
    r.feed(StopRequested(r.now_s + 60)).exits(sig=15)
    assert r.life.state is State.STOPPED
    assert (r.did(Spawn), r.life.deaths) == ([], ())


# --- stop ------------------------------------------------------------------------------------------------


def test_stop_is_term_then_kill_at_the_deadline() -> None:
    r = Replay().running().feed(StopRequested(110.0))
    assert (r.signals, r.life.wake_at_s) == ([TERM], 110.0)
    assert r.wake().signals == [KILL]
    assert "did not end within 10.0 s: KILL" in r.said
    assert r.life.wake_at_s == 110.0 + KILL_RETRY_S
    assert r.exits(sig=9).life.state is State.STOPPED


def test_stop_during_backoff_cancels_the_restart() -> None:
    r = Replay().backoff().feed(StopRequested(105.0))
    assert r.life.state is State.STOPPED
    assert r.life.wake_at_s is None
    assert r.feed(Tick(), after_s=100.0).actions == []


@pytest.mark.parametrize("event", [StopRequested(1000.0), DrainRequested(1000.0)])
@pytest.mark.parametrize("state", [State.BACKOFF, State.FATAL, State.STOPPED])
def test_without_a_process_stop_and_drain_are_done_at_once(state: State, event: Event) -> None:
    r = IN_STATE[state]().feed(event)
    assert (r.life.state, r.life.wanted) == (State.STOPPED, Wanted.STOPPED)
    assert r.feed(event).actions == []


def test_stop_while_starting() -> None:
    r = Replay().starting().feed(StopRequested(105.0))
    assert (r.life.state, r.signals) == (State.STOPPING, [TERM])
    assert r.feed(Ready(1)).actions == []
    assert r.exits(sig=15).life.state is State.STOPPED


def test_stop_before_the_spawn_is_answered_owes_the_signal() -> None:
    r = Replay().feed(StartRequested(), StopRequested(105.0))
    assert (r.life.state, r.signals, r.did(Spawn)) == (State.STOPPING, [], [Spawn(1)])
    assert r.spawned().signals == [TERM]
    assert r.wake().signals == [KILL]


def test_a_spawn_answered_after_the_stop_deadline_is_killed_at_once() -> None:
    r = Replay().feed(StartRequested(), StopRequested(105.0)).wake()
    assert (r.signals, r.life.state) == ([], State.STOPPING)
    assert r.spawned().signals == [KILL]


def test_a_spawn_that_fails_after_the_stop_is_no_death() -> None:
    r = Replay().feed(StartRequested(), StopRequested(105.0), SpawnFailed("gone"))
    assert (r.life.state, r.life.deaths) == (State.STOPPED, ())


def test_stop_is_idempotent_and_only_comes_nearer() -> None:
    r = Replay().stopping(10)
    assert r.feed(StopRequested(r.now_s + 10)).actions == []
    assert r.feed(StopRequested(r.now_s + 20)).actions == []
    assert r.feed(StopRequested(r.now_s + 3)).actions == [SetTimer(r.now_s + 3)]


def test_the_second_signal_means_now_and_escalates_once() -> None:
    r = Replay().stopping(10)
    now = StopRequested(r.now_s + 10, now_immediately=True)
    assert r.feed(now).signals == [KILL]
    assert r.feed(now).actions == []
    assert r.feed(StopRequested(r.now_s + 1)).actions == []  # nor does the retry come sooner


def test_a_kill_in_an_earlier_life_does_not_count_for_this_one() -> None:
    r = Replay().stopping().wake().exits(sig=9).stopping()
    assert r.signals == [TERM]
    assert r.feed(StopRequested(1000.0, now_immediately=True)).signals == [KILL]


@pytest.mark.parametrize("state", [State.STARTING, State.RUNNING, State.DRAINING, State.STOPPING])
@pytest.mark.parametrize("event", [StopRequested(1000.0, True), StopRequested(50.0)])
def test_now_or_a_deadline_already_past_is_kill(state: State, event: Event) -> None:
    r = IN_STATE[state]().feed(event)
    assert (r.signals, r.life.state) == ([KILL], State.STOPPING)


def test_a_stop_that_is_revoked_starts_a_new_process_once_the_old_is_gone() -> None:
    r = Replay().stopping().feed(StartRequested())
    assert r.did(Spawn) == []
    assert r.exits(0).did(Spawn) == [Spawn(2)]
    assert (r.life.deaths, r.life.restarts) == ((), 0)


def test_start_is_idempotent() -> None:
    for state in LIVE_STATES - {State.DRAINING, State.STOPPING} | {State.BACKOFF}:
        r = IN_STATE[state]()
        before = r.life
        assert r.feed(StartRequested()).actions == []
        assert r.life == before


# --- drain -----------------------------------------------------------------------------------------------


def test_drain_then_term_then_kill() -> None:
    r = Replay().draining(30).wake()
    assert (r.life.state, r.signals, r.life.wake_at_s) == (State.STOPPING, [TERM], r.now_s + 5)
    assert r.wake().signals == [KILL]
    assert r.exits(sig=9).life.state is State.STOPPED


def test_drain_deadlines_are_kept_whatever_the_clock_did() -> None:
    assert Replay().draining(30).wake(late_s=3600).signals == [TERM]


def test_a_starting_process_has_nothing_to_drain() -> None:
    r = Replay().starting().feed(DrainRequested(1000.0))
    assert (r.life.state, r.signals, r.did(BeginDrain)) == (State.STOPPING, [TERM], [])
    assert r.life.wake_at_s == r.now_s + 5
    assert r.exits(sig=15).life.state is State.STOPPED


def test_a_drain_without_time_is_term() -> None:
    r = Replay().running().feed(DrainRequested(100.0))
    assert (r.life.state, r.signals) == (State.STOPPING, [TERM])


def test_stop_during_drain() -> None:
    r = Replay().draining(600).feed(StopRequested(103.0))
    assert (r.signals, r.life.wake_at_s) == ([TERM], 103.0)


def test_a_second_drain_only_comes_nearer() -> None:
    r = Replay().draining(30)
    assert r.feed(DrainRequested(r.now_s + 60)).actions == []
    assert r.feed(DrainRequested(r.now_s + 6)).actions == [SetTimer(r.now_s + 6)]


def test_drain_does_not_soften_a_stop() -> None:
    assert Replay().stopping(5).feed(DrainRequested(1000.0)).actions == []


def test_death_during_a_drain_is_not_restarted() -> None:
    r = Replay().draining().exits(sig=11)
    assert (r.life.state, r.did(Spawn), r.life.deaths) == (State.STOPPED, [], ())


# --- an operator's restart and reset ----------------------------------------------------------------------


def test_restart_drains_and_starts_at_once_uncounted() -> None:
    r = Replay().running().feed(RestartRequested(130.0))
    assert r.did(BeginDrain) == [BeginDrain(1, 130.0)]
    r.exits(1, after_s=2)
    assert r.did(Spawn) == [Spawn(2)]
    assert r.life.pid is None
    assert (r.life.state, r.life.deaths, r.life.restarts) == (State.STARTING, (), 0)


def test_restart_of_a_process_that_does_not_finish() -> None:
    r = Replay().running().feed(RestartRequested(130.0)).wake()
    assert r.signals == [TERM]
    assert r.wake().signals == [KILL]
    assert r.exits(sig=9).did(Spawn) == [Spawn(2)]
    assert r.life.deaths == ()


def test_restart_of_a_starting_process() -> None:
    r = Replay().starting().feed(RestartRequested(130.0))
    assert (r.signals, r.life.wake_at_s) == ([TERM], r.now_s + 5)
    assert r.exits(sig=15).did(Spawn) == [Spawn(2)]


def test_restart_during_backoff_starts_at_once() -> None:
    r = Replay().backoff().feed(RestartRequested(130.0))
    assert r.did(Spawn) == [Spawn(2)]
    assert r.life.restarts == 0


def test_restart_excuses_a_hung_process_being_ended() -> None:
    r = Replay().running().feed(HeartbeatLost(1, "hung"), RestartRequested(130.0)).exits(sig=9)
    assert (r.did(Spawn), r.life.deaths) == ([Spawn(2)], ())


@pytest.mark.parametrize("state", [State.DRAINING, State.STOPPING, State.STOPPED])
def test_restart_never_revives_what_is_being_stopped(state: State) -> None:
    r = IN_STATE[state]().feed(RestartRequested(101.0))
    assert r.life.wanted is Wanted.STOPPED
    assert r.did(Spawn) == []
    assert "not restarted" in r.said
    if r.life.alive:
        assert r.exits(0).life.state is State.STOPPED


def test_stop_or_drain_during_a_restart_wins() -> None:
    for event in (StopRequested(101.0), DrainRequested(101.0)):
        r = Replay().running().feed(RestartRequested(130.0), event)
        assert r.life.wake_at_s == 101.0
        assert r.exits(0).life.state is State.STOPPED
        assert r.did(Spawn) == []


@pytest.mark.parametrize("event", [ResetRequested(), RestartRequested(1000.0)])
def test_fatal_is_left_on_request_with_a_fresh_budget(event: Event) -> None:
    r = Replay().fatal().feed(event)
    assert r.life.state is State.STARTING
    assert (r.life.deaths, r.life.failures_in_a_row) == ((), 0)
    assert r.spawned().exits(1).life.state is State.BACKOFF


def test_start_does_not_leave_fatal_but_says_how_to() -> None:
    r = Replay().fatal().feed(StartRequested())
    assert (r.life.state, r.did(Spawn)) == (State.FATAL, [])
    assert "reset" in r.said


def test_reset_elsewhere_only_forgets_deaths() -> None:
    r = Replay().backoff()
    wake_at_s = r.life.wake_at_s
    r.feed(ResetRequested())
    assert (r.life.state, r.life.deaths, r.life.wake_at_s, r.actions) == (State.BACKOFF, (), wake_at_s, [])


# --- late, early and impossible events ---------------------------------------------------------------------


@pytest.mark.parametrize("state", list(State))
def test_reports_about_an_older_generation_change_nothing(state: State) -> None:
    r = IN_STATE[state]()
    while r.life.generation < 2:  # give the slot a past first
        r = Replay(last_generation=r.life.generation + 1)
        if state is State.STARTING:
            r.starting()
        elif state is not State.STOPPED:
            getattr(r, state.lower())()
    before, old = r.life, r.life.generation - 1
    r.feed(Ready(old), Exited(old, 1, None), HeartbeatLost(old, "late"), Spawned(9, old))
    assert (r.life, r.actions) == (before, [])


def test_ready_read_after_the_death_it_preceded_is_ignored() -> None:
    r = Replay().backoff().feed(Ready(1), HeartbeatLost(1, "late"))
    assert (r.life.state, r.actions) == (State.BACKOFF, [])


def future(generation: int) -> list[Event]:
    n = generation + 1
    return [Ready(n), Exited(n, 0, None), HeartbeatLost(n, "?"), Spawned(9, n)]


@pytest.mark.parametrize("state", list(State))
def test_reports_about_a_future_generation_are_impossible(state: State) -> None:
    for event in future(IN_STATE[state]().life.generation):
        with pytest.raises(LifecycleError, match="is impossible in"):
            IN_STATE[state]().feed(event)


@pytest.mark.parametrize(
    ("state", "event"),
    [
        *[(state, Exited(0, 1, None)) for state in (State.STOPPED, State.BACKOFF, State.FATAL)],
        *[(state, Spawned(9, 0)) for state in State],
        *[(state, SpawnFailed("?")) for state in State],
        (State.RUNNING, Ready(0)),
        (State.DRAINING, Ready(0)),
    ],
)
def test_what_would_lose_or_double_a_process_raises(state: State, event: Event) -> None:
    r = IN_STATE[state]()
    if isinstance(event, (Exited, Spawned, Ready)):
        event = dataclasses.replace(event, generation=r.life.generation)
    with pytest.raises(LifecycleError, match="is impossible in"):
        r.feed(event)


def test_an_exit_before_its_spawn_is_answered_is_impossible() -> None:
    with pytest.raises(LifecycleError):
        Replay().feed(StartRequested(), Exited(1, 1, None))


def test_the_error_tells_the_story() -> None:
    r = Replay().running(for_s=2.5).exits(sig=9)
    with pytest.raises(LifecycleError) as caught:
        r.exits(sig=9)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("tokenizer_worker:3: Exited(generation=1, exit_code=None, signal=9)")
    assert lines[1:] == [
        "  100.000 STOPPED → STARTING (StartRequested)",
        "  100.000 STARTING → RUNNING (Ready)",
        "  102.500 RUNNING → BACKOFF (Exited: signal SIGKILL (9))",
    ]


def test_a_transition_outside_the_table_raises_with_the_story() -> None:
    turn = _Turn(Replay().backoff().life, Tick(), 101.0, lambda: 0.0)
    with pytest.raises(LifecycleError, match=r"(?s)BACKOFF → RUNNING, which is no .*STOPPED → STARTING"):
        turn.go(State.RUNNING)


def test_a_negative_exit_code_is_read_as_its_signal() -> None:
    last = Replay().starting().exits(-9).life.last_exit
    assert last is not None
    assert (last.exit_code, last.signal) == (None, 9)


def test_the_story_is_bounded() -> None:
    r = Replay(dataclasses.replace(POLICY, fatal_when_spent=False)).starting()
    for _ in range(100):
        r.exits(1).wake().spawned()
    assert len(r.life.history) == HISTORY_LENGTH


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize(
    "command",
    [
        StartRequested(),
        DrainRequested(1000.0),
        StopRequested(1000.0),
        StopRequested(1000.0, True),
        RestartRequested(1000.0),
        ResetRequested(),
        Tick(),
    ],
)
def test_commands_are_legal_in_every_state(state: State, command: Event) -> None:
    IN_STATE[state]().feed(command, command)


def test_every_state_can_be_reached_and_left() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {target for targets in TRANSITIONS.values() for target in targets} == set(State)


@pytest.mark.parametrize("kind", [StopRequested, DrainRequested, RestartRequested])
@pytest.mark.parametrize("deadline_s", [float("inf"), float("nan")])
def test_a_deadline_is_a_time(kind: Callable[[float], Event], deadline_s: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        kind(deadline_s)
