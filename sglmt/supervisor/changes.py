"""What may be changed in a running instance: the part of the supervisor that operations act on.

Runs in the supervisor, owned by it from the moment there are processes. It holds the queue of operations, knows what
a change touches (crew, segment, state page, service manager), and asks for workers to be recycled.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sglmt.control.state import ControlChange, LogLevel
from sglmt.ipc.state_page import HeaderWord
from sglmt.server_args import ServerArgs
from sglmt.supervisor.crew import Crew
from sglmt.supervisor.live_operations import LiveOperations
from sglmt.supervisor.observe import rss_bytes
from sglmt.supervisor.operations import Operations
from sglmt.supervisor.recycling import Recycler, WorkerSample
from sglmt.supervisor.resolve_model import cache_directory, resolve_model
from sglmt.supervisor.service_manager import ServiceManager
from sglmt.supervisor.services import Log

if TYPE_CHECKING:
    from sglmt.supervisor.supervisor import Supervisor

CONTROL_WITHIN_S = 10.0


class Changes:
    """The operations of one instance, and their `Host`."""

    def __init__(
        self,
        supervisor: Supervisor,
        log: Log,
        manager: ServiceManager,
        resolver: Callable[[], Sequence[str] | None],
        reread: Callable[[], ServerArgs] | None,
    ) -> None:
        """`resolver` gives the program that reads models; `reread` the configuration from its sources, as they are."""
        self._supervisor = supervisor
        self._manager = manager
        self._resolver = resolver
        self._recycler = Recycler(random.random)
        self.operations = Operations(supervisor.inbox.post, log)
        self.live = LiveOperations(self, self.operations, reread, supervisor.args)

    # --- Host -------------------------------------------------------------------------------------------

    @property
    def args(self) -> ServerArgs:
        """What the supervisor goes by now."""
        return self._supervisor.args

    @property
    def crew(self) -> Crew:
        """The processes."""
        return self._supervisor.crew

    def set_wanted_workers(self, count: int) -> None:
        """From now on the instance is to have so many workers."""
        self.crew.wanted_workers = count
        self._supervisor.resources.page.set_header(HeaderWord.WORKERS_REQUESTED, count)

    def adopt(self, args: ServerArgs, model: dict[str, Any]) -> None:
        """Other arguments, for what is started from now on and for our own limits. Raises ResourceError."""
        self._supervisor.resources.adopt(args, model)
        self._supervisor.args = args
        self.crew.adopt(args)

    def model_info(self) -> dict[str, Any]:
        """The model as the processes were told."""
        return self._supervisor.resources.arguments.model_info

    async def resolve(self, args: ServerArgs) -> dict[str, Any]:
        """What the model of `args` is now. Raises ModelError."""
        deadline_s = time.monotonic() + args.start_timeout
        with self._supervisor.leaving_alone() as leave_alone:
            cache_dir = cache_directory(self._supervisor.run_dir)
            return await resolve_model(args, cache_dir, deadline_s, self._resolver(), leave_alone)

    async def set_log_level(self, level: LogLevel) -> None:
        """Everywhere, at once."""
        change = ControlChange(log_level=level)
        await self._supervisor.change_control(change, time.monotonic() + CONTROL_WITHIN_S)

    def reload_begins(self) -> None:
        """Tell the service manager that the configuration is being applied."""
        self._manager.reloading()

    def reload_ended(self) -> None:
        """It is applied, or refused; either way what serves goes on. Nothing to tell in a stop."""
        self._manager.reloaded()

    # --- by itself --------------------------------------------------------------------------------------

    def recycle(self, now_s: float) -> None:
        """Once a second: replace a worker that has served long enough or grown too large."""
        limits = (self.args.max_worker_rss_bytes, self.args.max_worker_lifetime)
        if limits == (None, None):
            return
        samples = [
            WorkerSample(p.name, (p.name, p.run.generation), p.life.ready_at_s, rss_bytes(p.run.child.pid))
            for p in self.crew.workers()
            if p.serves and p.run is not None and p.life.ready_at_s is not None
        ]
        for name, reason in self._recycler.look(samples, now_s, *limits):
            self.live.recycle(name, reason)
