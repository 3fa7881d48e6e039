"""What an operator may change in a running instance: number of workers, restarts, configuration.

Runs in the supervisor. Each method checks and begins an operation (see `operations`), which changes what is wanted
and waits until it is so; the crew leads there. Nothing here signals or starts a process itself, but an operator's
restart of a process that exists once, which its lifecycle carries out.
"""

from __future__ import annotations

import filecmp
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from sglmt.control.state import LogLevel
from sglmt.errors import ConfigError, ExitCode
from sglmt.messages.frame import Role
from sglmt.server_args import ServerArgs
from sglmt.supervisor.crew import Crew
from sglmt.supervisor.endings import START_ATTEMPTS, because_of
from sglmt.supervisor.lifecycle import RestartRequested, State
from sglmt.supervisor.operations import Operation, OperationError, Operations
from sglmt.supervisor.process import ManagedProcess
from sglmt.supervisor.reloading import check_model, plan_reload
from sglmt.supervisor.stopping import STAGE_GRACE_S
from sglmt.supervisor.topology import START_ORDER, most_workers

_WORKERS = frozenset({"worker", "workers"})  # what people call a tokenizer_worker
_SLACK_S = 10.0
RECYCLE_PAUSE_S = 60.0  # after a replacement that failed


class Host(Protocol):
    """The supervisor, as far as operations change it."""

    @property
    def args(self) -> ServerArgs:
        """What it goes by now."""

    @property
    def crew(self) -> Crew:
        """The processes."""

    def set_wanted_workers(self, count: int) -> None:
        """From now on the instance is to have so many."""

    def adopt(self, args: ServerArgs, model: dict[str, Any]) -> None:
        """Other arguments, for what is started from now on and for the supervisor's own limits."""

    def model_info(self) -> dict[str, Any]:
        """The model that the processes were told."""

    async def resolve(self, args: ServerArgs) -> dict[str, Any]:
        """What the model of `args` is now. Raises ModelError."""

    async def set_log_level(self, level: LogLevel) -> None:
        """Everywhere, at once."""

    def reload_begins(self) -> None:
        """For the service manager: a configuration is being applied."""

    def reload_ended(self) -> None:
        """For the service manager: it is applied, or refused."""


class LiveOperations:
    """The operations of one instance. `reread` gives the configuration from its sources, as they are now."""

    def __init__(
        self, host: Host, operations: Operations, reread: Callable[[], ServerArgs] | None, launched: ServerArgs
    ) -> None:
        self._host = host
        self._operations = operations
        self._reread = reread
        self._launched = launched
        self._scaled_to: int | None = None
        self._signalled = 0
        self._scalings_asked = 0
        self._recycle_not_before_s = 0.0

    # --- how many workers -------------------------------------------------------------------------------

    def scale(self, count: int) -> Operation:
        """To `count` workers. A scaling that is still under way gives way to it. Raises OperationError, naming the
        limits, or `--router always` in single mode."""
        self._check_count(count)
        self._scalings_asked += 1
        return self._operations.begin(f"scale to {count}", lambda op: self._scale(op, count))

    def step(self, delta: int) -> None:
        """One more worker or one less (TTIN, TTOU). Each counts; the sum is kept within the limits, so that a burst
        leads to one scaling, not to one after the other."""
        self._signalled += delta
        self._scalings_asked += 1
        self._operations.begin("scale by signal", self._scale_by_signals)

    async def _scale_by_signals(self, operation: Operation) -> None:
        delta, self._signalled = self._signalled, 0
        before = self._host.crew.wanted_workers
        if self._launched.mode == "single":
            raise OperationError(self._single(before + delta))
        count = min(max(before + delta, 1), most_workers(self._launched))
        if count != before + delta:
            operation.say(f"{before}{delta:+d} workers is outside 1 to {most_workers(self._launched)}: {count}")
        await self._scale(operation, count)

    def _check_count(self, count: int) -> None:
        if self._launched.mode == "single" and count != 1:
            raise OperationError(self._single(count), ExitCode.CONFIG)
        most = most_workers(self._launched)
        if not 1 <= count <= most:
            raise OperationError(
                f"scale to {count}: an instance launched with --workers {self._launched.workers} can have 1 to {most}",
                ExitCode.CONFIG,
            )

    def _single(self, count: int) -> str:
        return (
            f"scale to {count}: this instance runs in single mode (one worker, no router); "
            "launch it with `--router always` to scale it"
        )

    async def _scale(self, operation: Operation, count: int, gives_way: bool = True) -> None:
        asked = self._scalings_asked
        host, before = self._host, self._host.crew.wanted_workers
        self._scaled_to = count
        await self._operations.do(lambda: host.set_wanted_workers(count))
        operation.say(f"{count} workers already" if before == count else f"from {before} to {count} workers")
        deadline_s = time.monotonic() + host.args.start_timeout + host.args.drain_timeout + _SLACK_S

        def settled() -> bool:
            workers = host.crew.workers()
            serving = sum(worker.serves for worker in workers)
            leaving = len(host.crew.leaving_workers())
            if gives_way and self._scalings_asked != asked:
                raise OperationError("another number of workers was asked for meanwhile")
            self._check_new(workers, before)
            if serving == count == len(workers) and not leaving:
                return True
            more = f", {leaving} finish what they have" if leaving else ""
            operation.say(f"{serving} of {count} workers serve{more}")
            if time.monotonic() > deadline_s:
                raise OperationError(f"{serving} of {count} workers serve after all that time", ExitCode.TIMEOUT)
            return False

        await self._operations.until(settled)
        operation.say(f"{count} workers serve")

    @staticmethod
    def _check_new(workers: Iterable[ManagedProcess], before: int) -> None:
        for worker in workers:
            if worker.spec.index >= before and worker.life.failures_in_a_row >= START_ATTEMPTS:
                reason = because_of(worker, worker.life.last_exit.text if worker.life.last_exit else "failed").reason
                raise OperationError(f"{worker.name} does not start: {reason}; it is tried again and again")

    # --- restarts ---------------------------------------------------------------------------------------

    def restart(self, target: str) -> Operation:
        """`all`, a role, or `role:index`. Raises OperationError when there is no such process."""
        names = [process.name for process in self._chosen(target)]
        return self._operations.begin(f"restart {target}", lambda op: self._restart(op, names))

    def _chosen(self, target: str) -> list[ManagedProcess]:
        processes = self._host.crew.current()
        if target == "all":
            return sorted(processes, key=lambda p: (START_ORDER.index(p.spec.role), p.spec.index))
        role, _, index = target.partition(":")
        if role in _WORKERS:
            role = Role.TOKENIZER_WORKER.label
        chosen = [
            process for process in processes
            if process.spec.role.label == role and (not index or str(process.spec.index) == index)
        ]  # fmt: skip
        if not chosen:
            known = ", ".join(sorted({process.spec.role.label for process in processes}))
            raise OperationError(f"restart {target}: there is no such process; roles are: {known}", ExitCode.USAGE)
        return sorted(chosen, key=lambda process: process.spec.index)

    async def _restart(self, operation: Operation, names: list[str]) -> None:
        """Processes that exist once first: their restart delays requests, workers that are new do not mind."""
        current = {process.name: process for process in self._host.crew.current()}
        chosen = [current[name] for name in names if name in current]
        for process in chosen:
            if process.spec.role is not Role.TOKENIZER_WORKER:
                await self._restart_in_place(operation, process)
        workers = [process.name for process in chosen if process.spec.role is Role.TOKENIZER_WORKER]
        if workers:
            await self._roll(operation, workers)

    async def _restart_in_place(self, operation: Operation, process: ManagedProcess) -> None:
        """End it and start it again; delivery carries running requests over."""
        before, started_s = process.life.generation, time.monotonic()
        await self._operations.do(lambda: process.feed(RestartRequested(time.monotonic() + STAGE_GRACE_S)))
        deadline_s = started_s + self._host.args.start_timeout + 2 * STAGE_GRACE_S

        def back() -> bool:
            life = process.life
            last = life.last_exit
            if life.state is State.FATAL or (last is not None and last.generation > before and not last.asked):
                text = last.text if last is not None else "given up"
                raise OperationError(because_of(process, f"{process.name}: failed after its restart: {text}").reason)
            if time.monotonic() > deadline_s:
                raise OperationError(f"{process.name}: is {life.state} and not ready in time", ExitCode.TIMEOUT)
            return life.generation > before and process.serves

        operation.say(f"{process.name}: restarting")
        await self._operations.until(back)
        operation.say(
            f"{process.name}: ready again after {time.monotonic() - started_s:.1f} s (pid {process.life.pid})"
        )

    async def _roll(self, operation: Operation, names: list[str]) -> None:
        """Replace workers one at a time. Raises OperationError when a replacement fails: the roll ends there."""
        crew = self._host.crew
        await self._operations.do(lambda: crew.renew(names))
        total = len(names)

        def rolled() -> bool:
            if crew.failed_replacement is not None:
                raise OperationError(crew.failed_replacement)
            left = crew.renewals_left()
            operation.say(f"{total - left} of {total} workers replaced")
            return not left

        await self._operations.until(rolled)

    def recycle(self, name: str, reason: str) -> None:
        """Replace one worker because it is due; only while nothing else is done, and not soon after one failed."""
        if self._operations.idle and time.monotonic() >= self._recycle_not_before_s:
            self._operations.begin(f"recycle {name}", lambda op: self._recycle(op, name, reason))

    async def _recycle(self, operation: Operation, name: str, reason: str) -> None:
        operation.say(reason)
        try:
            await self._roll(operation, [name])
        except OperationError:
            self._recycle_not_before_s = time.monotonic() + RECYCLE_PAUSE_S
            raise

    # --- configuration ----------------------------------------------------------------------------------

    def reload(self) -> Operation:
        """Read the configuration again and apply it by replacing all workers."""
        return self._operations.begin("reload", self._reload)

    async def _reload(self, operation: Operation) -> None:
        self._host.reload_begins()
        try:
            await self._apply_configuration(operation)
        finally:
            self._host.reload_ended()

    async def _apply_configuration(self, operation: Operation) -> None:
        if self._reread is None:
            raise ConfigError("reload: this instance was not launched from a configuration that can be read again")
        host, before = self._host, self._host.args
        plan = plan_reload(before, self._reread(), self._scaled_to)
        operation.say("changed: " + (", ".join(plan.changed) if plan.changed else "nothing; replacing the workers"))
        model_before = host.model_info()
        model = await host.resolve(plan.args)
        check_model(model_before, model, _same_file(model_before.get("tokenizer_file"), model.get("tokenizer_file")))
        await self._operations.do(lambda: host.adopt(plan.args, model))
        try:
            await self._apply(operation, plan.workers)
        except OperationError:
            await self._operations.do(lambda: host.adopt(before, model_before))
            raise
        if plan.args.log_level != before.log_level:
            await host.set_log_level(plan.args.log_level)

    async def _apply(self, operation: Operation, workers: int) -> None:
        """The number of workers, then new ones for those that stay."""
        host = self._host
        if workers < host.crew.wanted_workers:
            await self._operations.do(lambda: host.set_wanted_workers(workers))
        staying = [worker.name for worker in host.crew.workers() if worker.spec.index < workers]
        await self._roll(operation, staying)
        if workers > host.crew.wanted_workers:
            scaled_to = self._scaled_to
            await self._scale(operation, workers, gives_way=False)
            self._scaled_to = scaled_to


def _same_file(one: str | None, other: str | None) -> bool:
    """Whether two cached files have the same content; unreadable ones have not."""
    if one is None or other is None or one == other:
        return one == other
    try:
        return filecmp.cmp(one, other, shallow=False)
    except OSError:
        return False
