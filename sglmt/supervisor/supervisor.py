"""The supervisor process: claims, starts, watches, restarts, reports, stops. One per instance.

`Supervisor.run` is the whole life of an instance. Everything that happens (signals, timers, exits, what children
report, requests of the control socket) is posted to one inbox and handled there, one thing at a time; after each,
`_evaluate` asks the pure modules what follows. Decisions are theirs: lifecycle (one process), topology (which
processes, which order), health (hung or not), instance_state (ready or not), stopping (what ends next).

It ends by request (control socket, INT, TERM), by a process it cannot do without, or by an error at start;
in each case nothing is left behind, and the exit code says which.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from sglmt.control.protocol import OperationReport
from sglmt.control.state import ControlChange, ControlChangeError, ControlOutcome, ControlState
from sglmt.errors import ExitCode, SglmtError
from sglmt.ipc.state_page import UNTIL_STOPPED_NS, HeaderWord
from sglmt.messages.frame import Role
from sglmt.server_args import ServerArgs
from sglmt.status.snapshot import InstanceSnapshot
from sglmt.supervisor.changes import Changes
from sglmt.supervisor.control_plane import ControlPlane
from sglmt.supervisor.crew import Crew
from sglmt.supervisor.endings import Ending, failed_start, no_worker_left
from sglmt.supervisor.environment import raise_open_files_limit, seal_inherited_descriptors
from sglmt.supervisor.inbox import Inbox
from sglmt.supervisor.instance_state import Verdict, judge_instance
from sglmt.supervisor.lifecycle import State, StopRequested
from sglmt.supervisor.live_operations import LiveOperations
from sglmt.supervisor.operations import OperationError, Operations
from sglmt.supervisor.operator_signals import OperatorSignals
from sglmt.supervisor.reaper import reap_strangers
from sglmt.supervisor.report import Reporter
from sglmt.supervisor.resolve_model import cache_directory, resolve_model
from sglmt.supervisor.resources import Claims, Resources
from sglmt.supervisor.service_manager import ServiceManager
from sglmt.supervisor.services import Log
from sglmt.supervisor.spawn import child_command
from sglmt.supervisor.stop_signals import StopSignals
from sglmt.supervisor.stopping import StopPlan
from sglmt.supervisor.topology import wanted_processes
from sglmt.supervisor.zygote import Zygote

TICK_S = 0.1
CALM_TICK_S = 0.5  # while all is well; deaths, signals and commands wake it at once anyway
ZYGOTE_LOADS_WITHIN_S = 10.0
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
        reread: Callable[[], ServerArgs] | None = None,
        reopen_logs: Callable[[], None] = lambda: None,
    ) -> None:
        """`log(level, source, text)` must not wait. `command` and `resolver` replace the programs that children
        and the model resolver are started with. `reread` gives the configuration from its sources, as they are now;
        `reopen_logs` is called when somebody has moved the log files."""
        self.args = args
        self.failure: str | None = None
        self.verdict = Verdict("starting", False, "resolving the model")
        self.url = ""
        self._log = log
        self._on_ready = on_ready
        self._control_factory = control_factory
        self._command = tuple(command or child_command())
        self._resolver = resolver
        self._zygote = Zygote(log) if command is None else None
        self._handle_signals = handle_signals
        self._exit_code = ExitCode.OK.value
        self._reporter = Reporter(args)
        self._stop: StopPlan | None = None
        self._was_ready = False
        self._next_second_s = 0.0
        self._others: set[int] = set()
        self._claims: Claims | None = None
        self._resources: Resources | None = None
        self._control: ControlPlane | None = None
        self._crew: Crew | None = None
        self._inbox: Inbox | None = None
        self._stopped = asyncio.Event()
        self._draining = False
        self._reread = reread
        self._reopen_logs = reopen_logs
        self._changes: Changes | None = None
        self._manager = ServiceManager(os.environ, log)

    # --- the whole life -----------------------------------------------------------------------------

    async def run(self) -> int:
        """Start, serve, stop. The exit code of the instance; `failure` says why when it is not 0.

        An exception that is no SglmtError is a bug and is raised, after everything is cleaned up.
        """
        async with contextlib.AsyncExitStack() as cleanup:
            self._inbox = Inbox(asyncio.get_running_loop(), self._log)
            cleanup.callback(self._stopped.set)
            cleanup.callback(self._inbox.close)
            cleanup.callback(self._manager.close)
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
            signals = StopSignals(lambda name, first: self.inbox.post(lambda: self._signalled(name, first)))
            signals.install(self.inbox.loop)
            cleanup.callback(signals.remove, self.inbox.loop)
            asked = OperatorSignals(self._hangup, self._step, self._reopen)
            asked.install(self.inbox.loop)
            cleanup.callback(asked.remove, self.inbox.loop)
        claims = self._claims = Claims(self.args, self._log)
        self.url = claims.listener.url
        cleanup.callback(claims.release)
        if self._control_factory is not None:
            control = self._control_factory(self)
            await control.start()
            cleanup.push_async_callback(control.close)
        cleanup.callback(self._stopped.set)
        cleanup.callback(claims.listener.close)
        zygote = self._zygote
        if zygote is not None:
            zygote.start()
            cleanup.callback(zygote.close)
        model = await self._resolve(claims)
        if model is None:
            return
        if zygote is not None:
            await zygote.prepare(model, self.args.tokenizer_backend, time.monotonic() + ZYGOTE_LOADS_WITHIN_S)
        self._resources = Resources(self.args, claims, model, self._log, zygote)
        cleanup.callback(self._forget)
        initial = ControlState(log_level=self.args.log_level)
        self._control = ControlPlane(self.run_dir, self._resources.page, initial)
        self._crew = Crew(self.args, self._command, self.inbox, self._resources, self._control, self._log, self._fail)
        cleanup.callback(self._crew.destroy)
        self._changes = Changes(self, self._log, self._manager, lambda: self._resolver, self._reread)
        cleanup.push_async_callback(self._changes.operations.close)
        self._crew.converge(wanted_processes(self.args))
        self.inbox.tick(self._tick_every_s, self._tick)
        await self.inbox.pump_until(self._is_done, self._evaluate)

    async def _resolve(self, claims: Claims) -> dict[str, Any] | None:
        """What the model is; None when a stop was asked for meanwhile. Raises ModelError."""
        deadline_s = time.monotonic() + self.args.start_timeout
        cache_dir = cache_directory(claims.run_dir.path)
        task = asyncio.create_task(resolve_model(self.args, cache_dir, deadline_s, self._resolver))
        task.add_done_callback(lambda _: self.inbox.post(lambda: None))
        try:
            await self.inbox.pump_until(lambda: task.done() or self._stop is not None, lambda: None)
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # seen: a stop may have come first
        return None if self._stop is not None else task.result()

    def _is_done(self) -> bool:
        return self._stop is not None and self._stop.is_done(self.crew.unfinished_roles())

    def _forget(self) -> None:
        """Give back what children were told through. From here on there is nothing to tell about."""
        if self._resources is not None:
            self._resources.release()
        self._resources = self._crew = None

    @property
    def run_dir(self) -> Path:
        """The claimed run directory; the control socket goes into it."""
        assert self._claims is not None
        return self._claims.run_dir.path

    @property
    def inbox(self) -> Inbox:
        """The queue of this run."""
        assert self._inbox is not None
        return self._inbox

    @property
    def crew(self) -> Crew:
        """The processes, while there are any."""
        assert self._crew is not None
        return self._crew

    @property
    def resources(self) -> Resources:
        """Segment and state page, while they exist."""
        assert self._resources is not None
        return self._resources

    # --- what follows from what happened --------------------------------------------------------------

    def _evaluate(self) -> None:
        if self._stop is None:
            self.crew.converge_workers(time.monotonic())
        self.crew.settle()
        if self._stop is None:
            self._judge()
        if self._stop is not None:
            self._advance_stop(self._stop)
        if self._changes is not None:
            self._changes.operations.turned()

    def _judge(self) -> None:
        """Ready, degraded, or beyond hope."""
        before = self.verdict
        self.verdict = judge_instance(self.crew.members(), self._was_ready, self.crew.recovering())
        if self._draining:
            self.verdict = Verdict("draining", False, "drain requested; it waits to be stopped")
        everybody = self.crew.current()
        if self._claims is not None and any(process.probed for process in everybody):
            self._claims.listener.start_listening()
        self.resources.page.set_header(HeaderWord.READY, int(self.verdict.ready))
        if self.verdict.ready and not self._was_ready:
            self._was_ready = True
            self._log("info", "supervisor", f"READY: serving {self.args.model_name!r} on {self.url}")
            self._manager.ready()
            self._on_ready()
        elif self._was_ready and (self.verdict.state, self.verdict.ready) != (before.state, before.ready):
            level = "info" if self.verdict.state == "running" else "warning"
            reason = f": {self.verdict.reason}" if self.verdict.reason else ""
            self._log(level, "supervisor", f"instance is {self.verdict.state}{reason}")
        self._tell_manager()
        ending = no_worker_left(everybody) if self._was_ready else failed_start(everybody)
        if ending is not None:
            self._fail(ending)

    def _tell_manager(self) -> None:
        """The state in one line, for the service manager."""
        if self._manager.wanted:
            reason = f": {self.verdict.reason}" if self.verdict.reason else ""
            self._manager.status(f"{self.verdict.state}{reason}; {self.args.model_name!r} on {self.url}")

    def _tick_every_s(self) -> float:
        is_calm = self.verdict.state == "running" and self._stop is None and not self._draining
        beat_s = self._manager.beats_every_s or CALM_TICK_S
        return max(TICK_S, min(CALM_TICK_S, beat_s / 2)) if is_calm else TICK_S

    def _tick(self, now_s: float) -> None:
        self._manager.tick(now_s)
        self.crew.look_around(now_s)
        if now_s >= self._next_second_s:
            self._next_second_s = now_s + 1.0
            self._reporter.sample(now_s, self.crew.everybody(), self.resources)
            if self._changes is not None and self._stop is None and not self._draining:
                self._changes.recycle(now_s)
            if self._zygote is not None:
                self._zygote.look_after(now_s)
            if strangers := reap_strangers(self._is_ours):
                self._log("debug", "supervisor", f"reaped {len(strangers)} orphans of other processes")

    # --- changes while it runs --------------------------------------------------------------------------

    @property
    def changes(self) -> Changes:
        """What operations act on. Raises OperationError before anything runs."""
        if self._changes is None:
            raise OperationError("nothing is running yet; try again when it is ready", ExitCode.STARTING)
        return self._changes

    @property
    def operations(self) -> Operations:
        """The changes under way. Raises OperationError before anything runs."""
        return self.changes.operations

    @property
    def live(self) -> LiveOperations:
        """Scale, restart, reload. Raises OperationError before anything runs."""
        return self.changes.live

    def begin_scale(self, count: int) -> int:
        """Begin to have `count` workers; the number of the operation. Raises OperationError to refuse."""
        return self.live.scale(count).number

    def begin_restart(self, target: str) -> int:
        """Begin to restart `all`, a role or `role:index`; the number of the operation. Raises OperationError."""
        return self.live.restart(target).number

    def begin_reload(self) -> int:
        """Begin to read the configuration again and apply it; the number of the operation. Raises OperationError."""
        return self.live.reload().number

    async def operation_report(self, number: int, seen: int, until_s: float) -> OperationReport:
        """Wait for news of an operation, at most until monotonic `until_s`. Raises OperationError."""
        return await self.operations.report(number, seen, until_s)

    def request_drain(self) -> None:
        """Take no more work, finish what runs, and wait to be stopped. Harmless when it drains already."""
        self.inbox.post(self._begin_drain)

    def _begin_drain(self) -> None:
        if self._stop is not None or self._draining or self._resources is None:
            return
        self._draining = True
        self._log("info", "supervisor", "draining: no new requests; running ones go on until the instance is stopped")
        self._resources.page.set_header(HeaderWord.READY, 0)
        self._resources.page.set_header(HeaderWord.DRAIN_DEADLINE_NS, UNTIL_STOPPED_NS)

    def _hangup(self, terminal_is_gone: bool) -> None:
        """HUP: the terminal went away, which ends what ran in it; else read the configuration again."""
        if terminal_is_gone:
            self.inbox.post(lambda: self._signalled("HUP, the terminal is gone", True))
        else:
            self.inbox.post(lambda: self._by_signal("HUP", lambda: self.live.reload()))

    def _reopen(self) -> None:
        """USR1: the log files were moved."""
        self._reopen_logs()
        self._log("info", "supervisor", "USR1: log files are opened anew")

    def _step(self, delta: int) -> None:
        """TTIN, TTOU: one worker more or less."""
        self.inbox.post(lambda: self._by_signal("TTIN" if delta > 0 else "TTOU", lambda: self.live.step(delta)))

    def _by_signal(self, name: str, begin: Callable[[], object]) -> None:
        try:
            begin()
        except OperationError as error:
            self._log("warning", "supervisor", f"{name}: {error}")

    # --- children of others -----------------------------------------------------------------------------

    def leave_alone(self, pid: int) -> None:
        """A child of this process that somebody else started here and will reap."""
        self._others.add(pid)

    @contextlib.contextmanager
    def leaving_alone(self) -> Iterator[Callable[[int], None]]:
        """The same for children that are reaped when the block ends."""
        pids: list[int] = []

        def leave_alone(pid: int) -> None:
            pids.append(pid)
            self.leave_alone(pid)

        try:
            yield leave_alone
        finally:
            self._others.difference_update(pids)

    def _is_ours(self, pid: int) -> bool:
        return pid in self.crew.pids() or pid in self._others or (self._zygote is not None and pid == self._zygote.pid)

    # --- stopping -------------------------------------------------------------------------------------

    def request_stop(self, drain_s: float | None = None, now: bool = False) -> None:
        """Begin to stop: `drain_s` seconds (None: as configured) for running requests, or `now`, by force.

        From the loop's thread; returns at once. Repeating it only ever brings the end nearer.
        """
        self.inbox.post(lambda: self._begin_stop(drain_s, now))

    async def change_control(self, change: ControlChange, deadline_s: float) -> ControlOutcome:
        """Change what every process must agree on; returns when all have confirmed, or at monotonic `deadline_s`.

        Raises ControlChangeError for what makes no sense now, the time before anything runs included.
        """
        if self._crew is None or self._control is None:
            raise ControlChangeError("nothing is running yet, or any more")
        outcome = await self._control.change(change, deadline_s, self._crew.serving)
        told = f"control state version {outcome.version}"
        for name, error in outcome.errors.items():
            self._log("warning", "supervisor", f"{told}: {name}: {error}")
        self._log("info", "supervisor", f"{told}: applied by {len(outcome.confirmed)} processes")
        return outcome

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
        self._stop.immediate = self._stop.immediate or now
        self.verdict = Verdict("draining", False, self.failure or "stop requested")
        self._manager.stopping()
        self._tell_manager()
        if self._changes is not None:
            self._changes.operations.refuse("the instance is stopping")
        if self._resources is None or self._crew is None:
            return
        self._resources.page.set_header(HeaderWord.READY, 0)
        deadline_ns = max(1, int(self._stop.drain_deadline_s * 1e9))
        self._resources.page.set_header(HeaderWord.DRAIN_DEADLINE_NS, deadline_ns)
        if now:
            self._crew.tell_all(StopRequested(time.monotonic(), now_immediately=True))
        elif nearer is not None:
            self._crew.tell(Role.TOKENIZER_WORKER, nearer)

    def _advance_stop(self, plan: StopPlan) -> None:
        for role, command in plan.advance(self.crew.unfinished_roles(), time.monotonic()):
            self.crew.tell(role, command)
        if plan.past_workers and self._claims is not None:
            self._claims.listener.close()
            self.verdict = Verdict("stopping", False, self.verdict.reason)

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
        for process in self._crew.current() if self._crew is not None else []:
            if (process.spec.role, process.spec.index) == (role, index):
                return process.tail()
        return []

    def snapshot(self) -> InstanceSnapshot:
        """The instance now. Cheap; never waits for anybody."""
        instance_id = self._claims.instance_id if self._claims is not None else 0
        processes = self._crew.everybody() if self._crew is not None else []
        wanted = self._crew.wanted_workers if self._crew is not None else None
        running = self._changes.operations.running if self._changes is not None else None
        operation = running.progress if running is not None else None
        return self._reporter.snapshot(
            instance_id, self.url, self.verdict, processes, self._resources, wanted, operation
        )
