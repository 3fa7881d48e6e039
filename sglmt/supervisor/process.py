"""The shell around one slot of the lifecycle machine: performs its actions, tells it what happened.

Runs in the supervisor. A ManagedProcess is one (role, index) across the lives it has; a Run is one life: a pid,
its descriptors, its slot of the state page. All decisions are in `lifecycle.step`. Callbacks of the event loop
only read and note; what changes a life is posted to the supervisor's inbox and happens there, one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import deque
from dataclasses import dataclass, field

from sglmt.errors import SglmtError
from sglmt.ipc.state_page import Slot, SlotWord
from sglmt.messages.frame import Role
from sglmt.supervisor import lifecycle
from sglmt.supervisor.lifecycle import (
    Action,
    BecameFatal,
    BeginDrain,
    DumpStacks,
    Event,
    Exited,
    PolicyChanged,
    Ready,
    Report,
    SetTimer,
    Signal,
    Spawn,
    Spawned,
    SpawnFailed,
    State,
    Tick,
)
from sglmt.supervisor.output import LinePipe, split_level
from sglmt.supervisor.reaper import exit_status, has_ended
from sglmt.supervisor.restart_policy import budget_spent
from sglmt.supervisor.services import Services
from sglmt.supervisor.spawn import SpawnedChild
from sglmt.supervisor.topology import ABORT_ANSWERS_S, ProcessSpec

TAIL_LINES = 50
_REAP_WITHIN_S = 5.0


@dataclass
class Run:
    """One life. `failure` is the cause the child itself gave before it ended."""

    generation: int
    child: SpawnedChild
    slot: Slot
    spawned_at_s: float
    probed: bool = False
    failure: str | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    pipes: list[LinePipe] = field(default_factory=list)


class ManagedProcess:
    """One wanted process. `life` is its value in the lifecycle machine; `run` its current life, if any."""

    def __init__(self, spec: ProcessSpec, services: Services, last_generation: int = 0, key: str | None = None) -> None:
        """`key` tells it from another process of the same name during a rolling replacement."""
        self.spec = spec
        self.key = key or spec.name
        self.earlier_restarts = 0  # of those whose place it took
        self.was_replaced = False  # another one has its place; it leaves
        self.life = lifecycle.new_life(spec.name, spec.policy, last_generation)
        self.run: Run | None = None
        self.last_failure: str | None = None  # why the previous life failed: its own words, or why it was ended
        self.last_tail: list[str] = []
        self.beyond_budget = False  # its budget is spent and it has not been ready since
        self._services = services
        self._pending: deque[Event] = deque()
        self._feeding = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        """`scheduler`, `tokenizer_worker:3`."""
        return self.spec.name

    @property
    def waits_for_spawn(self) -> bool:
        """The machine asked for a process and has no answer yet."""
        return self.life.alive and self.run is None

    @property
    def probed(self) -> bool:
        """A worker's own request came back through every process."""
        return self.run is not None and self.run.probed

    @property
    def serves(self) -> bool:
        """Ready, and for a worker: proven so."""
        return self.life.state is State.RUNNING and (self.probed or self.spec.role is not Role.TOKENIZER_WORKER)

    def adopt(self, spec: ProcessSpec) -> None:
        """Other limits from now on."""
        self.spec = spec
        self.feed(PolicyChanged(spec.policy))

    def tail(self) -> list[str]:
        """The last lines of this life, and before them those of the previous one."""
        current = list(self.run.tail) if self.run is not None else []
        return [*self.last_tail, *current][-TAIL_LINES:]

    def feed(self, event: Event) -> None:
        """One event; its actions, and the events they cause, are done when this returns.

        Raises LifecycleError for what no correct shell can report.
        """
        self._pending.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._pending:
                self.life, actions = lifecycle.step(self.life, self._pending.popleft(), time.monotonic(), random.random)
                for action in actions:
                    self._perform(action)
        finally:
            self._feeding = False

    # --- actions ------------------------------------------------------------------------------------

    def _perform(self, action: Action) -> None:
        match action:
            case Spawn():
                self._services.request_spawn(self.key)
            case Signal(generation, sig):
                self._send(generation, sig)
            case DumpStacks(generation):
                self._send(generation, signal.SIGUSR2)
            case BeginDrain(generation, deadline_s):
                self._begin_drain(generation, deadline_s)
            case SetTimer(at_s):
                self._set_timer(at_s)
            case Report(level, text):
                self._services.log(level, "supervisor", text)
            case BecameFatal(_, reason):
                self._services.became_fatal(self, reason)

    def _begin_drain(self, generation: int, deadline_s: float) -> None:
        """Tell it until when requests may run (clients that are left must hear of it before the machine acts)."""
        if self.run is not None and self.run.generation == generation:
            requests_until_s = deadline_s - ABORT_ANSWERS_S
            self.run.slot[SlotWord.DRAIN_DEADLINE_NS] = max(1, int(requests_until_s * 1e9))
        self._send(generation, signal.SIGTERM)

    def _send(self, generation: int, sig: int) -> None:
        run = self.run
        if run is not None and run.generation == generation:  # not reaped yet, so the pid is still its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.child.pid, sig)

    def _set_timer(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        post, feed = self._services.post, self.feed
        self._timer = self._services.loop.call_at(at_s, lambda: post(lambda: feed(Tick())))

    # --- spawning -----------------------------------------------------------------------------------

    def spawn_now(self) -> None:
        """Its turn has come: answer the machine's Spawn, with a process or with the reason why not."""
        if not self.waits_for_spawn:
            return
        if self.life.state is not State.STARTING:
            self.feed(SpawnFailed("no longer wanted"))
            return
        generation = self.life.generation
        try:
            slot, child = self._services.spawn(self.spec, generation)
        except (OSError, SglmtError) as error:
            self._services.turn_finished(self.key)
            self.feed(SpawnFailed(str(error)))
            return
        run = Run(generation, child, slot, time.monotonic())
        self.run = run
        self._watch(run)
        self.feed(Spawned(child.pid, generation))

    def _watch(self, run: Run) -> None:
        loop, child = self._services.loop, run.child
        run.pipes = [
            LinePipe(loop, child.stdout_fd, lambda line: self._printed(run, line)),
            LinePipe(loop, child.stderr_fd, lambda line: self._printed(run, line)),
            LinePipe(loop, child.ready_fd, lambda line: self._reported(run, line)),
        ]
        if child.pid_fd is not None:
            loop.add_reader(child.pid_fd, self._ended, run)

    def _ended(self, run: Run) -> None:
        assert run.child.pid_fd is not None
        self._services.loop.remove_reader(run.child.pid_fd)
        self._services.post(self.reap)

    # --- what a child says ----------------------------------------------------------------------------

    def _printed(self, run: Run, line: bytes) -> None:
        level, text = split_level(line)
        run.tail.append(text)
        self._services.log(level, self.name, text)

    def _reported(self, run: Run, line: bytes) -> None:
        """One line of the ready pipe: `ready`, `probed`, `failed <why>`, `info <json>`, `applied <json>`."""
        word, _, rest = line.decode("utf-8", errors="replace").partition(" ")
        if word == "failed":
            run.failure = rest.strip()[:2048] or "it gave no reason"
        elif word == "info":
            self._services.post(lambda: self._services.told_info(self, rest))
        elif word == "applied":
            self._services.told_applied(self, run.generation, rest)
        elif word == "ready":
            self._services.post(lambda: self._became_ready(run.generation))
        elif word == "probed":
            self._services.post(lambda: self._became_probed(run.generation))
        else:
            self._services.log("warning", "supervisor", f"{self.name} reported {word[:40]!r}: not understood")

    def _became_ready(self, generation: int) -> None:
        self.feed(Ready(generation))
        if self.life.state is State.RUNNING:
            self.beyond_budget = False
            self._services.turn_finished(self.key)

    def _became_probed(self, generation: int) -> None:
        if self.run is not None and self.run.generation == generation:
            self.run.probed = True

    # --- its end --------------------------------------------------------------------------------------

    def reap(self) -> None:
        """If the process has ended: read its last words, end what is left of its group, tell the machine."""
        run = self.run
        if run is None or not has_ended(run.child.pid):
            return
        self._bury(run)
        code, sig = exit_status(run.child.pid)
        self.run = None
        self.last_failure, self.last_tail = run.failure or self.life.trouble, list(run.tail)
        if run.failure is not None:
            self._services.log("error", "supervisor", f"{self.name} gives the cause: {run.failure}")
        self._services.turn_finished(self.key)
        self.feed(Exited(run.generation, code, sig))
        life, now_s = self.life, time.monotonic()
        if life.state in (State.BACKOFF, State.STARTING):
            spent = budget_spent(life.policy, life.deaths_in_window(now_s), life.failures_in_a_row)
            self.beyond_budget = self.beyond_budget or spent

    def _bury(self, run: Run) -> None:
        """Everything of a life but its exit status. The zombie still reserves the number of its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(run.child.pid, signal.SIGKILL)
        for pipe in run.pipes:
            pipe.drain()
        if run.child.pid_fd is not None:
            self._services.loop.remove_reader(run.child.pid_fd)
        run.child.close()
        self._services.life_ended(self.spec, run.generation, run.slot)

    def kill(self) -> None:
        """KILL the process, if there is one, without telling the machine."""
        if self.run is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.run.child.pid, signal.SIGKILL)

    def destroy(self) -> None:
        """Kill and reap, whatever the machine thinks: nothing of it is left when this returns.

        Only for the very end; a healthy stop has nothing left to destroy.
        """
        if self._timer is not None:
            self._timer.cancel()
        self.kill()
        run, self.run = self.run, None
        if run is None:
            return
        deadline_s = time.monotonic() + _REAP_WITHIN_S
        while not has_ended(run.child.pid):
            if time.monotonic() > deadline_s:
                self._services.log("error", "supervisor", f"{self.name} (pid {run.child.pid}) survives KILL")
                break
            time.sleep(0.005)
        self._bury(run)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, run.child.pid, os.WEXITED | os.WNOHANG)
