"""The processes of one instance, as a crew: who is wanted, whose turn it is to boot, who serves.

Owned by the supervisor and used in its loop only. The crew is what a ManagedProcess knows of the supervisor (its
`Services`): it starts lives through the instance's Resources and passes on what concerns the whole instance.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from sglmt.control.state import Applied
from sglmt.errors import ExitCode
from sglmt.ipc.state_page import HeaderWord, Slot, SlotWord
from sglmt.messages.frame import Role
from sglmt.server_args import SchedulerInfo, ServerArgs
from sglmt.supervisor.control_plane import ControlPlane
from sglmt.supervisor.endings import Ending, because_of
from sglmt.supervisor.inbox import Inbox
from sglmt.supervisor.instance_state import Member, backend_is_up
from sglmt.supervisor.lifecycle import Event, StartRequested, State
from sglmt.supervisor.process import ManagedProcess
from sglmt.supervisor.resources import Resources
from sglmt.supervisor.services import Log
from sglmt.supervisor.spawn import SpawnedChild
from sglmt.supervisor.spawn_turns import SpawnTurns
from sglmt.supervisor.topology import ProcessSpec
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
        self._turns = SpawnTurns(os.cpu_count() or 1)
        self._watch = Watch(args)
        self._backend_up_since_s: float | None = None

    def everybody(self) -> list[ManagedProcess]:
        """In start order."""
        return list(self._processes.values())

    def converge(self, wanted: Iterable[ProcessSpec]) -> None:
        """Start every wanted process that there is not."""
        for spec in wanted:
            if spec.name not in self._processes:
                self._processes[spec.name] = ManagedProcess(spec, self)
                self._processes[spec.name].feed(StartRequested())

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
        return [Member(p.spec.role, p.name, p.life.state, p.serves) for p in self.everybody()]

    def settle(self) -> None:
        """After something has happened: let those boot whose turn it is, answer those that shall not any more."""
        for process in self.everybody():
            if process.waits_for_spawn and process.life.state is not State.STARTING:
                self._turns.cancel(process.name)
                process.spawn_now()
        for name in self._turns.due(time.monotonic()):
            self._processes[name].spawn_now()
        if not backend_is_up(self.members()):
            self._backend_up_since_s = None
        elif self._backend_up_since_s is None:
            self._backend_up_since_s = time.monotonic()

    def look_around(self, now_s: float) -> None:
        """Ten times a second: publish what workers balance by, replace who hangs."""
        connections = [
            process.run.slot[SlotWord.CONNECTIONS]
            for process in self.everybody()
            if process.run is not None
            and process.spec.role is Role.TOKENIZER_WORKER
            and process.life.state is State.RUNNING
        ]
        mean_x1000 = sum(connections) * 1000 // len(connections) if connections else 0
        self._resources.page.set_header(HeaderWord.ACCEPT_MEAN_X1000, mean_x1000)
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

    def request_spawn(self, name: str) -> None:
        """Queue a process for its turn to boot."""
        self._turns.request(name)

    def turn_finished(self, name: str) -> None:
        """It is ready or gone."""
        self._turns.finished(name)

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
        return {p.name: p.run.generation for p in self.everybody() if p.run is not None and p.life.state in states}

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
