"""The supervisor process: claims, starts, watches, restarts, reports, stops. One per instance.

`Supervisor.run` is the whole life of an instance. Everything that happens (signals, timers, exits, what children
report, requests of the control socket) is posted to one inbox and handled there, one thing at a time; after each,
`_evaluate` asks the pure modules what follows. Decisions are theirs: lifecycle (one process), topology (which
processes, which order), health (hung or not), instance_state (ready or not), stopping (what ends next).

It ends by request (control socket, INT, TERM, HUP), by a process it cannot do without, or by an error at start;
in each case nothing is left behind, and the exit code says which.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from sglmt.errors import ExitCode, SglmtError
from sglmt.ipc.state_page import HeaderWord, Slot, SlotWord
from sglmt.messages.frame import Role
from sglmt.server_args import SchedulerInfo, ServerArgs
from sglmt.status.snapshot import InstanceSnapshot
from sglmt.supervisor.endings import Ending, because_of, failed_start, no_worker_left
from sglmt.supervisor.environment import raise_open_files_limit, seal_inherited_descriptors
from sglmt.supervisor.inbox import Inbox
from sglmt.supervisor.instance_state import Member, Verdict, backend_is_up, judge_instance
from sglmt.supervisor.lifecycle import StartRequested, State, StopRequested
from sglmt.supervisor.process import ManagedProcess
from sglmt.supervisor.reaper import is_init, reap_strangers
from sglmt.supervisor.report import Reporter
from sglmt.supervisor.resolve_model import cache_directory, resolve_model
from sglmt.supervisor.resources import Claims, Resources
from sglmt.supervisor.services import Log
from sglmt.supervisor.spawn import SpawnedChild, child_command
from sglmt.supervisor.spawn_turns import SpawnTurns
from sglmt.supervisor.stop_signals import StopSignals
from sglmt.supervisor.stopping import StopPlan
from sglmt.supervisor.topology import ProcessSpec, wanted_processes
from sglmt.supervisor.watch import Watch

TICK_S = 0.1
_ENDED = frozenset({State.STOPPED, State.FATAL})


class ControlEndpoint(Protocol):
    """The control server, made by the caller: the supervisor starts and closes it."""

    async def start(self) -> None:
        """Listen from now on. Raises SglmtError."""

    async def close(self) -> None:
        """Stop listening, remove the socket."""


class Supervisor:
    """One instance, for one `run`."""

    def __init__(
        self,
        args: ServerArgs,
        log: Log,
        on_ready: Callable[[], None] = lambda: None,
        *,
        control_factory: Callable[[Supervisor], ControlEndpoint] | None = None,
        command: Sequence[str] | None = None,
        resolver: Sequence[str] | None = None,
        handle_signals: bool = True,
    ) -> None:
        """`log(level, source, text)` must not wait. `command` and `resolver` replace the programs that children
        and the model resolver are started with."""
        self.args = args
        self.failure: str | None = None
        self.verdict = Verdict("starting", False, "resolving the model")
        self.url = ""
        self._log = log
        self._on_ready = on_ready
        self._control_factory = control_factory
        self._command = tuple(command or child_command())
        self._resolver = resolver
        self._handle_signals = handle_signals
        self._exit_code = ExitCode.OK.value
        self._processes: dict[str, ManagedProcess] = {}
        self._turns = SpawnTurns(os.cpu_count() or 1)
        self._watch = Watch(args)
        self._reporter = Reporter(args)
        self._stop: StopPlan | None = None
        self._was_ready = False
        self._backend_up_since_s: float | None = None
        self._next_second_s = 0.0
        self._others: set[int] = set()
        self._claims: Claims | None = None
        self._resources: Resources | None = None
        self._inbox: Inbox | None = None
        self._stopped = asyncio.Event()

    # --- the whole life -----------------------------------------------------------------------------

    async def run(self) -> int:
        """Start, serve, stop. The exit code of the instance; `failure` says why when it is not 0.

        An exception that is no SglmtError is a bug and is raised, after everything is cleaned up.
        """
        async with contextlib.AsyncExitStack() as cleanup:
            self._inbox = Inbox(asyncio.get_running_loop())
            cleanup.callback(self._stopped.set)
            cleanup.callback(self._inbox.close)
            try:
                await self._live(cleanup)
            except SglmtError as error:
                self._exit_code = int(error.exit_code)
                self._note_failure(str(error))
        return self._exit_code

    async def _live(self, cleanup: contextlib.AsyncExitStack) -> None:
        self.args.validate()
        seal_inherited_descriptors()
        raise_open_files_limit()
        if self._handle_signals:
            signals = StopSignals(lambda name, first: self.post(lambda: self._signalled(name, first)))
            signals.install(self.loop)
            cleanup.callback(signals.remove, self.loop)
        claims = self._claims = Claims(self.args, self._log)
        self.url = claims.listener.url
        cleanup.callback(claims.release)
        if self._control_factory is not None:
            control = self._control_factory(self)
            await control.start()
            cleanup.push_async_callback(control.close)
        cleanup.callback(self._stopped.set)
        cleanup.callback(claims.listener.close)
        model = await self._resolve(claims)
        if model is None:
            return
        resources = self._resources = Resources(self.args, claims, model, self._log)
        cleanup.callback(self._release_resources)
        cleanup.callback(self._destroy_processes)
        self._converge()
        self.inbox.tick(TICK_S, self._tick)
        await self.inbox.pump_until(self._is_done, self._evaluate)
        resources.page.set_header(HeaderWord.READY, 0)

    async def _resolve(self, claims: Claims) -> dict[str, Any] | None:
        """What the model is; None when a stop was asked for meanwhile. Raises ModelError."""
        deadline_s = time.monotonic() + self.args.start_timeout
        cache_dir = cache_directory(claims.run_dir.path)
        task = asyncio.create_task(resolve_model(self.args, cache_dir, deadline_s, self._resolver))
        task.add_done_callback(lambda _: self.post(lambda: None))
        try:
            await self.inbox.pump_until(lambda: task.done() or self._stop is not None, lambda: None)
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # seen: a stop may have come first
        return None if self._stop is not None else task.result()

    def _converge(self) -> None:
        """Start every wanted process that there is not."""
        for spec in wanted_processes(self.args):
            if spec.name not in self._processes:
                self._processes[spec.name] = ManagedProcess(spec, self)
                self._processes[spec.name].feed(StartRequested())

    def _is_done(self) -> bool:
        return self._stop is not None and self._stop.is_done(self._unfinished_roles())

    def _release_resources(self) -> None:
        assert self._resources is not None
        self._resources.release()
        self._resources = None

    def _destroy_processes(self) -> None:
        """Whatever is left, and after an orderly stop nothing is."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.destroy()

    @property
    def run_dir(self) -> Path:
        """The claimed run directory; the control socket goes into it."""
        assert self._claims is not None
        return self._claims.run_dir.path

    # --- Services for the processes -------------------------------------------------------------------

    @property
    def inbox(self) -> Inbox:
        """The queue of this run."""
        assert self._inbox is not None
        return self._inbox

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop of this run."""
        return self.inbox.loop

    def log(self, level: str, source: str, text: str) -> None:
        """A line for people."""
        self._log(level, source, text)

    def post(self, work: Callable[[], None]) -> None:
        """Do this in the supervisor's loop."""
        self.inbox.post(work)

    def request_spawn(self, name: str) -> None:
        """Queue a process for its turn to boot."""
        self._turns.request(name)

    def turn_finished(self, name: str) -> None:
        """It is ready or gone."""
        self._turns.finished(name)

    def spawn(self, spec: ProcessSpec, generation: int) -> tuple[Slot, SpawnedChild]:
        """Start a life. Raises OSError or SglmtError."""
        assert self._resources is not None
        return self._resources.start(self._command, spec, generation)

    def life_ended(self, spec: ProcessSpec, generation: int, slot: Slot) -> None:
        """A life was reaped."""
        if self._resources is not None:
            self._resources.ended(spec, generation, slot)

    def told_info(self, process: ManagedProcess, text: str) -> None:
        """The scheduler says what its engine is: the second revision of the segment."""
        try:
            info = msgspec.json.decode(text, type=SchedulerInfo)
        except msgspec.MsgspecError as error:
            reason = f"{process.name} reported unreadable information: {error}"
            self._fail(Ending(int(ExitCode.CHILD_DEATH), reason))
            return
        if self._resources is not None and process.spec.role is Role.SCHEDULER:
            self._resources.publish(info)

    def became_fatal(self, process: ManagedProcess, reason: str) -> None:
        """A process the instance cannot do without was given up."""
        self._fail(because_of(process, reason))

    # --- what follows from what happened --------------------------------------------------------------

    def _evaluate(self) -> None:
        for process in self._processes.values():
            if process.waits_for_spawn and process.life.state is not State.STARTING:
                self._turns.cancel(process.name)
                process.spawn_now()
        for name in self._turns.due(time.monotonic()):
            self._processes[name].spawn_now()
        if self._stop is None:
            self._judge()
        if self._stop is not None:
            self._advance_stop(self._stop)

    def _judge(self) -> None:
        """Ready, degraded, or beyond hope."""
        assert self._resources is not None
        assert self._claims is not None
        members = [Member(p.spec.role, p.name, p.life.state, p.serves) for p in self._processes.values()]
        before, self.verdict = self.verdict, judge_instance(members, self._was_ready)
        if not backend_is_up(members):
            self._backend_up_since_s = None
        elif self._backend_up_since_s is None:
            self._backend_up_since_s = time.monotonic()
        if any(process.probed for process in self._processes.values()):
            self._claims.listener.start_listening()
        self._resources.page.set_header(HeaderWord.READY, int(self.verdict.ready))
        if self.verdict.ready and not self._was_ready:
            self._was_ready = True
            self._log("info", "supervisor", f"READY: serving {self.args.model_name!r} on {self.url}")
            self._on_ready()
        elif self._was_ready and self.verdict != before:
            level = "info" if self.verdict.state == "running" else "warning"
            reason = f": {self.verdict.reason}" if self.verdict.reason else ""
            self._log(level, "supervisor", f"instance is {self.verdict.state}{reason}")
        everybody = list(self._processes.values())
        ending = no_worker_left(everybody) if self._was_ready else failed_start(everybody)
        if ending is not None:
            self._fail(ending)

    def _tick(self, now_s: float) -> None:
        assert self._resources is not None
        page = self._resources.page
        page.set_header(HeaderWord.SUPERVISOR_HEARTBEAT_NS, int(now_s * 1e9))
        serving = [
            p.run.slot[SlotWord.CONNECTIONS]
            for p in self._processes.values()
            if p.run is not None and p.spec.role is Role.TOKENIZER_WORKER and p.life.state is State.RUNNING
        ]
        mean_x1000 = sum(serving) * 1000 // len(serving) if serving else 0
        page.set_header(HeaderWord.ACCEPT_MEAN_X1000, mean_x1000)
        self._watch.round(self._processes.values(), now_s, self._backend_up_since_s)
        if now_s >= self._next_second_s:
            self._next_second_s = now_s + 1.0
            self._reporter.sample(now_s, list(self._processes.values()), self._resources)
            if is_init() and (strangers := reap_strangers(self._is_ours)):
                self._log("debug", "supervisor", f"reaped {len(strangers)} orphans of other processes")

    def leave_alone(self, pid: int) -> None:
        """A child of this process that somebody else started here and will reap."""
        self._others.add(pid)

    def _is_ours(self, pid: int) -> bool:
        own = {p.run.child.pid for p in self._processes.values() if p.run is not None}
        return pid in own or pid in self._others

    # --- stopping -------------------------------------------------------------------------------------

    def request_stop(self, drain_s: float | None = None, now: bool = False) -> None:
        """Begin to stop: `drain_s` seconds (None: as configured) for running requests, or `now`, by force.

        From the loop's thread; returns at once. Repeating it only ever brings the end nearer.
        """
        self.post(lambda: self._begin_stop(drain_s, now))

    async def wait_stopped(self) -> None:
        """Until no process, segment or port is held any more; the control socket goes last."""
        await self._stopped.wait()

    def _signalled(self, name: str, first: bool) -> None:
        if first:
            self._log("info", "supervisor", f"{name}: stopping; another one stops at once")
            if self._stop is None:  # else a stop that was asked for otherwise goes on as it is
                self._begin_stop(None, now=False)
        elif self._stop is None or not self._stop.immediate:
            self._log("warning", "supervisor", f"{name} while stopping: killing everything now")
            self._exit_code = self._exit_code or int(ExitCode.KILLED_NOW)
            self._begin_stop(0.0, now=True)

    def _begin_stop(self, drain_s: float | None, now: bool) -> None:
        drain_deadline_s = time.monotonic() + (self.args.drain_timeout if drain_s is None else drain_s)
        nearer = None
        if self._stop is None:
            self._stop = StopPlan(drain_deadline_s)
        else:
            nearer = self._stop.bring_nearer(drain_deadline_s)
        if self._resources is not None:
            self._resources.page.set_header(HeaderWord.READY, 0)
            deadline_ns = max(1, int(self._stop.drain_deadline_s * 1e9))
            self._resources.page.set_header(HeaderWord.DRAIN_DEADLINE_NS, deadline_ns)
        self.verdict = Verdict("draining", False, self.failure or "stop requested")
        for process in list(self._processes.values()):
            if now:
                process.feed(StopRequested(time.monotonic(), now_immediately=True))
            elif nearer is not None and process.spec.role is Role.TOKENIZER_WORKER:
                process.feed(nearer)
        self._stop.immediate = self._stop.immediate or now

    def _advance_stop(self, plan: StopPlan) -> None:
        for role, command in plan.advance(self._unfinished_roles(), time.monotonic()):
            for process in list(self._processes.values()):
                if process.spec.role is role:
                    process.feed(command)
        if plan.past_workers and self._claims is not None:
            self._claims.listener.close()
            self.verdict = Verdict("stopping", False, self.verdict.reason)

    def _unfinished_roles(self) -> set[Role]:
        return {p.spec.role for p in self._processes.values() if p.life.state not in _ENDED}

    def _fail(self, ending: Ending) -> None:
        """End the instance because of this. One that is ending already only ends sooner."""
        if self._stop is None:
            self._exit_code = ending.exit_code
            self._note_failure(ending.reason)
        else:
            self._log("error", "supervisor", ending.reason)
        self._begin_stop(0.0, now=False)

    def _note_failure(self, reason: str) -> None:
        self.failure = reason
        self._log("error", "supervisor", reason)

    # --- telling --------------------------------------------------------------------------------------

    def tail(self, role: Role, index: int) -> list[str]:
        """The last output lines of a process, its previous life's included; empty when there is none."""
        for process in self._processes.values():
            if (process.spec.role, process.spec.index) == (role, index):
                return process.tail()
        return []

    def snapshot(self) -> InstanceSnapshot:
        """The instance now. Cheap; never waits for anybody."""
        instance_id = self._claims.instance_id if self._claims is not None else 0
        return self._reporter.snapshot(
            instance_id, self.url, self.verdict, list(self._processes.values()), self._resources
        )
