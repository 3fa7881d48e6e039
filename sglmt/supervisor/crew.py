"""The processes of one instance, as a crew: who is wanted, whose turn it is to boot, who serves.

Owned by the supervisor and used in its loop only. The crew is what a ManagedProcess knows of the supervisor (its
`Services`): it starts lives through the instance's Resources and passes on what concerns the whole instance.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from sglmt.control.state import Applied
from sglmt.errors import ExitCode
from sglmt.ipc.state_page import Slot
from sglmt.messages.frame import Role
from sglmt.server_args import SchedulerInfo, ServerArgs
from sglmt.status.recovery import recovering_reason
from sglmt.supervisor.control_plane import ControlPlane
from sglmt.supervisor.convergence import Deed, Seat, Successor, next_steps
from sglmt.supervisor.endings import Ending, because_of
from sglmt.supervisor.inbox import Inbox
from sglmt.supervisor.instance_state import Member, backend_is_up
from sglmt.supervisor.lifecycle import (
    DrainRequested,
    Event,
    GenerationTaken,
    StartRequested,
    State,
    StopRequested,
)
from sglmt.supervisor.process import ManagedProcess
from sglmt.supervisor.resources import Resources
from sglmt.supervisor.services import Log
from sglmt.supervisor.spawn import SpawnedChild
from sglmt.supervisor.spawn_turns import SpawnTurns
from sglmt.supervisor.topology import ABORT_ANSWERS_S, ProcessSpec, spec_of
from sglmt.supervisor.watch import Watch

_ENDED = frozenset({State.STOPPED, State.FATAL})


class Crew:
    """Everybody, by name. `on_ending` is called when the instance has to end because of one of them."""

    def __init__(
        self,
        args: ServerArgs,
        command: Sequence[str],
        inbox: Inbox,
        resources: Resources,
        control: ControlPlane,
        log: Log,
        on_ending: Callable[[Ending], None],
    ) -> None:
        self._command = command
        self._inbox = inbox
        self._resources = resources
        self._control = control
        self._log = log
        self._on_ending = on_ending
        self._processes: dict[str, ManagedProcess] = {}
        self._successors: dict[str, ManagedProcess] = {}
        self._leaving: list[ManagedProcess] = []
        self._due: set[str] = set()  # workers that are to be replaced
        self._newest: dict[str, int] = {}  # name → the highest generation it ever had
        self._keys = itertools.count(1)
        self._args = args
        self.wanted_workers = args.workers
        self.failed_replacement: str | None = None  # why the last roll ended early
        self._turns = SpawnTurns(os.cpu_count() or 1)
        self._watch = Watch(args)
        self._backend_up_since_s: float | None = None

    def everybody(self) -> list[ManagedProcess]:
        """In start order; successors and those that leave at the end."""
        return [*self._processes.values(), *self._successors.values(), *self._leaving]

    def current(self) -> list[ManagedProcess]:
        """Who holds a place: one of each name."""
        return list(self._processes.values())

    def converge(self, wanted: Iterable[ProcessSpec]) -> None:
        """Start every wanted process that there is not."""
        for spec in wanted:
            if spec.name not in self._processes:
                self._processes[spec.name] = self._new_process(spec)
                self._processes[spec.name].feed(StartRequested())

    def _new_process(self, spec: ProcessSpec) -> ManagedProcess:
        key = f"{spec.name}/{next(self._keys)}"
        return ManagedProcess(spec, self, self._newest.get(spec.name, 0), key)

    # --- workers: as many as wanted, of the age that is wanted --------------------------------------------

    def adopt(self, args: ServerArgs) -> None:
        """New limits for everybody, from now on."""
        self._args = args
        self._watch.adopt(args)
        for process in self.everybody():
            process.adopt(spec_of(process.spec.role, process.spec.index, args))

    def renew(self, names: Iterable[str]) -> None:
        """Have these workers replaced, one at a time; `failed_replacement` says why it ended early."""
        self.failed_replacement = None
        self._due.update(name for name in names if name in self._processes)

    def renewals_left(self) -> int:
        """Workers whose replacement is not complete: due, under way, or the old one still leaving."""
        return len(self._due) + sum(process.was_replaced for process in self._leaving)

    def workers(self) -> list[ManagedProcess]:
        """The tokenizer workers that hold a place, by index."""
        found = [p for p in self.current() if p.spec.role is Role.TOKENIZER_WORKER]
        return sorted(found, key=lambda process: process.spec.index)

    def leaving_workers(self) -> list[ManagedProcess]:
        """Workers that have lost their place and finish what they have."""
        return list(self._leaving)

    def converge_workers(self, now_s: float) -> None:
        """The next steps to the workers that are wanted. Not while the instance stops."""
        seats = [Seat(p.spec.index, p.name in self._due, self._successor(p.name)) for p in self.workers()]
        still_leaving = sum(process.was_replaced for process in self._leaving)
        for step in next_steps(self.wanted_workers, seats, still_leaving):
            spec = spec_of(Role.TOKENIZER_WORKER, step.index, self._args)
            match step.deed:
                case Deed.START:
                    self.converge([spec])
                case Deed.RETIRE:
                    self._retire(spec.name, now_s)
                case Deed.REPLACE:
                    self._successors[spec.name] = self._new_process(spec)
                    self._successors[spec.name].feed(StartRequested())
                case Deed.PROMOTE:
                    self._promote(spec.name, now_s)
                case Deed.DISCARD:
                    self._discard(spec.name)

    def _successor(self, name: str) -> Successor:
        process = self._successors.get(name)
        if process is None:
            return Successor.NONE
        if process.life.last_exit is not None:
            return Successor.FAILED
        return Successor.SERVES if process.serves else Successor.STARTING

    def _retire(self, name: str, now_s: float) -> None:
        self._due.discard(name)
        for process in (self._successors.pop(name, None), self._processes.pop(name, None)):
            if process is not None:
                self._ask_to_leave(process, now_s)

    def _promote(self, name: str, now_s: float) -> None:
        old, new = self._processes[name], self._successors.pop(name)
        new.earlier_restarts = old.earlier_restarts + old.life.restarts
        old.was_replaced = True
        self._processes[name] = new
        self._due.discard(name)
        self._ask_to_leave(old, now_s)

    def _discard(self, name: str) -> None:
        failed = self._successors.pop(name)
        self._due.clear()
        why = because_of(failed, failed.life.last_exit.text if failed.life.last_exit is not None else "it failed")
        self.failed_replacement = f"{name}: its replacement failed: {why.reason}; the old one stays"
        self._leaving.append(failed)
        failed.feed(StopRequested(time.monotonic()))

    def _ask_to_leave(self, process: ManagedProcess, now_s: float) -> None:
        """Finish what it has, at most for the drain time."""
        self._leaving.append(process)
        process.feed(DrainRequested(now_s + self._args.drain_timeout + ABORT_ANSWERS_S))

    def tell(self, role: Role, event: Event) -> None:
        """Feed every process of a role."""
        for process in self.everybody():
            if process.spec.role is role:
                process.feed(event)

    def tell_all(self, event: Event) -> None:
        """Feed everybody."""
        for process in self.everybody():
            process.feed(event)

    def unfinished_roles(self) -> set[Role]:
        """Roles with a process that is not stopped or given up."""
        return {process.spec.role for process in self.everybody() if process.life.state not in _ENDED}

    def members(self) -> list[Member]:
        """What the state of the instance depends on."""
        return [Member(p.spec.role, p.name, p.life.state, p.serves) for p in self.current()]

    def recovering(self) -> str | None:
        """What a scheduler that serves has still to continue of its predecessor's; None when nothing is left."""
        for process in self.current():
            if process.spec.role is Role.SCHEDULER and process.serves and process.run is not None:
                return recovering_reason(process.run.slot)
        return None

    def settle(self) -> None:
        """After something has happened: let those boot whose turn it is, answer those that shall not any more."""
        for process in self.everybody():
            if process.waits_for_spawn and process.life.state is not State.STARTING:
                self._turns.cancel(process.key)
                process.spawn_now()
        by_key = {process.key: process for process in self.everybody()}
        now_s = time.monotonic()
        for key in self._turns.due(now_s) if self._resources.may_start(now_s) else []:
            if key in by_key:
                by_key[key].spawn_now()
        for process in [process for process in self._leaving if process.life.state in _ENDED]:
            self._leaving.remove(process)
            process.destroy()
        if not backend_is_up(self.members()):
            self._backend_up_since_s = None
        elif self._backend_up_since_s is None:
            self._backend_up_since_s = time.monotonic()

    def look_around(self, now_s: float) -> None:
        """Replace who hangs. Call several times a second."""
        self._watch.round(self.everybody(), now_s, self._backend_up_since_s)

    def pids(self) -> Collection[int]:
        """All children that are not reaped."""
        return {process.run.child.pid for process in self.everybody() if process.run is not None}

    def destroy(self) -> None:
        """Kill and reap whoever is left; after an orderly stop nobody is."""
        for process in self.everybody():
            process.kill()
        for process in self.everybody():
            process.destroy()

    # --- Services ---------------------------------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The supervisor's event loop."""
        return self._inbox.loop

    def log(self, level: str, source: str, text: str) -> None:
        """A line for people."""
        self._log(level, source, text)

    def post(self, work: Callable[[], None]) -> None:
        """Do this in the supervisor's loop."""
        self._inbox.post(work)

    def request_spawn(self, key: str) -> None:
        """Queue a process for its turn to boot; others of its name go on behind its generation."""
        self._turns.request(key)
        for process in self.everybody():
            if process.key == key:
                name, generation = process.name, process.life.generation
                self._newest[name] = max(generation, self._newest.get(name, 0))
                for other in self.everybody():
                    if other.name == name and other is not process:
                        other.feed(GenerationTaken(generation))

    def turn_finished(self, key: str) -> None:
        """It is ready or gone."""
        self._turns.finished(key)

    def spawn(self, spec: ProcessSpec, generation: int) -> tuple[Slot, SpawnedChild]:
        """Start a life. Raises OSError or SglmtError."""
        return self._resources.start(self._command, spec, generation)

    def life_ended(self, spec: ProcessSpec, generation: int, slot: Slot) -> None:
        """A life was reaped."""
        self._resources.ended(spec, generation, slot)
        self._control.forget(spec.name, generation)

    def serving(self) -> dict[str, int]:
        """Name and generation of every process that runs, workers that drain included."""
        states = (State.RUNNING, State.DRAINING)
        return {p.name: p.run.generation for p in self.current() if p.run is not None and p.life.state in states}

    def told_applied(self, process: ManagedProcess, generation: int, text: str) -> None:
        """A process has applied a version of the control state."""
        try:
            self._control.confirmed(process.name, generation, msgspec.json.decode(text, type=Applied))
        except msgspec.MsgspecError as error:
            self._log("warning", "supervisor", f"{process.name} confirmed something unreadable: {error}")

    def told_info(self, process: ManagedProcess, text: str) -> None:
        """The scheduler says what its engine is: the second revision of the segment."""
        try:
            info = msgspec.json.decode(text, type=SchedulerInfo)
        except msgspec.MsgspecError as error:
            reason = f"{process.name} reported unreadable information: {error}"
            self._on_ending(Ending(int(ExitCode.CHILD_DEATH), reason))
            return
        if process.spec.role is Role.SCHEDULER:
            self._resources.publish(info)

    def became_fatal(self, process: ManagedProcess, reason: str) -> None:
        """A process the instance cannot do without was given up."""
        self._on_ending(because_of(process, reason))
