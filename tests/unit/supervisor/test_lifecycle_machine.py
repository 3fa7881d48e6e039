"""No history forgets a process, doubles one, starts one after a stop, or waits without a deadline.

Hypothesis drives the machine against a small world in which a process exists until it dies, may ignore TERM,
may be stopped (then only KILL helps), and is reaped some time after its death.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglmt.supervisor.lifecycle import (
    Action,
    BecameFatal,
    BeginDrain,
    DrainRequested,
    DumpStacks,
    Event,
    Exited,
    GenerationTaken,
    HeartbeatLost,
    PolicyChanged,
    ProcessLife,
    Ready,
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
    new_life,
    step,
)
from sglmt.supervisor.lifecycle_table import WAITING_STATES

LONGEST_WAIT_S = 60.0  # no limit and no deadline given below is longer

seconds = st.floats(0, LONGEST_WAIT_S).map(lambda value: round(value, 3))
waits = st.sampled_from([0.0, 0.001, 1.0, 5.0, 12.0, LONGEST_WAIT_S]) | seconds
endings = st.sampled_from([(0, None), (1, None), (66, None), (None, 9), (None, 11), (None, None)])


@dataclass
class Process:
    generation: int
    ignores_term: bool = False
    stopped: bool = False
    said_ready: bool = False
    dead: tuple[int | None, int | None] | None = None  # exit code and signal of one not reaped yet

    def take(self, sig: int) -> None:
        if self.dead is None and (sig == signal.SIGKILL or not (self.ignores_term or self.stopped)):
            self.dead = (None, sig)


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.life: ProcessLife = new_life("scheduler", RestartPolicy())
        self.now_s = 1000.0
        self.timer_s: float | None = None
        self.process: Process | None = None
        self.asked_spawn: int | None = None  # a Spawn not answered yet
        self.spawned: list[int] = []
        self.taken: set[int] = set()
        self.reaped: list[int] = []
        self.wanted = Wanted.STOPPED
        self.fatal = False
        self.draw = 0.0

    @initialize(fatal_when_spent=st.booleans(), max_restarts=st.integers(0, 3), stable_s=st.sampled_from([0.0, 10.0]))
    def choose_policy(self, fatal_when_spent: bool, max_restarts: int, stable_s: float) -> None:
        policy = RestartPolicy(
            fatal_when_spent=fatal_when_spent,
            max_restarts=max_restarts,
            stable_s=stable_s,
            start_timeout_s=20.0,
        )
        self.life = new_life("scheduler", policy)

    # the shell

    def feed(self, event: Event) -> None:
        self.life, actions = step(self.life, event, self.now_s, lambda: self.draw)
        for action in actions:
            self.perform(action)

    def perform(self, action: Action) -> None:
        match action:
            case Spawn(generation):
                assert self.process is None, "two processes in one slot"
                assert self.asked_spawn is None, "two spawns at once"
                assert self.wanted is Wanted.RUNNING, "started after stop"
                assert generation == max([*self.spawned, *self.taken], default=0) + 1
                self.spawned.append(generation)
                self.asked_spawn, self.fatal = generation, False
            case Signal(generation, sig):
                assert self.process is not None, "a signal to nobody"
                assert self.process.generation == generation
                self.process.take(sig)
            case BeginDrain(generation, deadline_s):
                assert generation == self.spawned[-1]
                assert deadline_s > self.now_s
            case DumpStacks(generation):
                assert self.process is not None
                assert self.process.generation == generation
            case SetTimer(at_s):
                self.timer_s = at_s
            case BecameFatal(exit_code):
                assert exit_code != 0
                self.fatal = True

    # operators

    @rule()
    def start(self) -> None:
        self.wanted = Wanted.RUNNING
        self.feed(StartRequested())

    @rule(wait_s=waits)
    def drain(self, wait_s: float) -> None:
        self.wanted, self.fatal = Wanted.STOPPED, False
        self.feed(DrainRequested(self.now_s + wait_s))

    @rule(wait_s=waits, now=st.booleans())
    def stop(self, wait_s: float, now: bool) -> None:
        self.wanted, self.fatal = Wanted.STOPPED, False
        self.feed(StopRequested(self.now_s + wait_s, now))

    @rule(wait_s=waits)
    def restart(self, wait_s: float) -> None:
        self.feed(RestartRequested(self.now_s + wait_s))

    @rule()
    def reset(self) -> None:
        self.feed(ResetRequested())

    @rule(ahead=st.integers(-2, 3))
    def another_slot_takes_a_generation(self, ahead: int) -> None:
        number = max(1, self.life.generation + ahead)
        if number not in self.spawned:
            self.taken.add(number)
            self.feed(GenerationTaken(number))

    @rule(stable_s=st.sampled_from([0.0, 10.0]), max_restarts=st.integers(0, 3))
    def limits_change(self, stable_s: float, max_restarts: int) -> None:
        self.feed(PolicyChanged(replace(self.life.policy, stable_s=stable_s, max_restarts=max_restarts)))

    # time

    @rule(wait_s=waits, draw=st.floats(0, 1, exclude_max=True))
    def time_passes(self, wait_s: float, draw: float) -> None:
        self.draw = draw
        self.now_s += wait_s if self.timer_s is None else min(wait_s, max(0.0, self.timer_s - self.now_s))

    @precondition(lambda self: self.timer_s is not None)
    @rule(late_s=st.sampled_from([0.0, 0.01, 4.0, 30.0, 86400.0]))
    def wake(self, late_s: float) -> None:
        assert self.timer_s is not None
        self.now_s = max(self.now_s, self.timer_s) + late_s
        self.timer_s = None  # a timer fires once
        self.feed(Tick())

    @rule()
    def wake_too_early(self) -> None:
        self.timer_s = None
        self.feed(Tick())

    # processes

    @precondition(lambda self: self.asked_spawn is not None)
    @rule(ignores_term=st.booleans(), eager=st.booleans())
    def spawn_succeeds(self, ignores_term: bool, eager: bool) -> None:
        generation, self.asked_spawn = self.asked_spawn, None
        assert generation is not None
        self.process = Process(generation, ignores_term, said_ready=eager)
        if eager:
            self.feed(Ready(generation))
        self.feed(Spawned(5000 + generation, generation))

    @precondition(lambda self: self.asked_spawn is not None)
    @rule()
    def spawn_fails(self) -> None:
        assert self.asked_spawn is not None
        self.reaped.append(self.asked_spawn)
        self.asked_spawn = None
        self.feed(SpawnFailed("EAGAIN"))

    @precondition(lambda self: self.process is not None and not self.process.said_ready)
    @rule()
    def becomes_ready(self) -> None:
        assert self.process is not None
        self.process.said_ready = True
        self.feed(Ready(self.process.generation))

    @precondition(lambda self: self.process is not None and self.process.dead is None)
    @rule(how=endings)
    def dies(self, how: tuple[int | None, int | None]) -> None:
        assert self.process is not None
        self.process.dead = how

    @precondition(lambda self: self.process is not None and self.process.dead is not None)
    @rule()
    def is_reaped(self) -> None:
        assert self.process is not None
        gone, self.process = self.process, None
        self.reaped.append(gone.generation)
        assert gone.dead is not None
        self.feed(Exited(gone.generation, *gone.dead))

    @precondition(lambda self: self.process is not None)
    @rule()
    def is_stopped(self) -> None:
        assert self.process is not None
        self.process.stopped = True

    @precondition(lambda self: self.process is not None)
    @rule()
    def heartbeat_is_lost(self) -> None:
        assert self.process is not None
        self.feed(HeartbeatLost(self.process.generation, "no heartbeat"))

    @precondition(lambda self: self.reaped)
    @rule(pick=st.integers(0, 1000), what=st.integers(0, 2))
    def something_late_arrives(self, pick: int, what: int) -> None:
        generation = self.reaped[pick % len(self.reaped)]
        before, timer_s = self.life, self.timer_s
        if what == 0:
            self.feed(Ready(generation))
        elif what == 1:
            self.feed(HeartbeatLost(generation, "late"))
        elif generation < self.life.generation:
            self.feed(Exited(generation, 1, None))
        assert (self.life, self.timer_s) == (before, timer_s)

    # what must hold after every step

    @invariant()
    def no_process_is_forgotten(self) -> None:
        there = self.process.generation if self.process else self.asked_spawn
        assert self.life.alive is (there is not None)
        assert there in (None, self.life.generation)
        assert sorted(self.reaped + ([there] if there else [])) == self.spawned
        assert self.life.pid == (5000 + self.process.generation if self.process else None)

    @invariant()
    def nothing_waits_without_a_deadline(self) -> None:
        assert (self.life.wake_at_s is not None) is (self.life.state in WAITING_STATES)
        if self.life.wake_at_s is not None:
            assert self.timer_s == self.life.wake_at_s
            assert self.timer_s <= self.now_s + LONGEST_WAIT_S

    @invariant()
    def the_wish_is_known(self) -> None:
        assert self.life.wanted is self.wanted
        assert self.fatal is (self.life.state is State.FATAL)
        if self.wanted is Wanted.STOPPED:
            assert self.life.state in (State.STOPPED, State.STOPPING, State.DRAINING)
        else:
            assert self.life.state is not State.STOPPED

    # and however it went: it can be brought up, and it can be brought down

    def teardown(self) -> None:
        if self.wanted is Wanted.RUNNING:
            for _ in range(40):
                if self.settled():
                    break
                self.behave()
            assert self.settled(), f"never came up again:\n{self.life.story()}"
        self.stop(5.0, False)
        for _ in range(6):
            if self.asked_spawn is not None:
                self.spawn_succeeds(ignores_term=True, eager=False)
            if self.process is not None and self.process.dead is not None:
                self.is_reaped()
            elif self.timer_s is not None:
                self.wake(0.0)
            self.no_process_is_forgotten()
        assert self.life.state is State.STOPPED, f"never went down:\n{self.life.story()}"
        assert self.process is None
        assert sorted(self.reaped) == self.spawned

    def settled(self) -> bool:
        healthy = self.process is not None and self.process.dead is None
        return self.life.state is State.FATAL or (self.life.state is State.RUNNING and healthy)

    def behave(self) -> None:
        if self.asked_spawn is not None:
            self.spawn_succeeds(ignores_term=False, eager=False)
        elif self.process is not None and self.process.dead is not None:
            self.is_reaped()
        elif self.life.state is State.STARTING and self.process and not self.process.said_ready:
            self.becomes_ready()
        else:
            self.wake(0.0)


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
