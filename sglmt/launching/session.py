"""One run of the supervisor and everything about its output. Runs in the launcher, which becomes the supervisor.

A session owns the log sink and decides where lines go: straight to stdout, or to the live view (a process of
its own that is a client of the control socket) for as long as that lives. It hands the supervisor the control
server, so that the supervisor needs to know neither sockets nor terminals.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sglmt.control.commands import Context
from sglmt.control.protocol import Controlled
from sglmt.control.server import ControlServer
from sglmt.ipc.addresses import CONTROL_SOCKET
from sglmt.launching.title import SUPERVISOR_TITLE, set_title
from sglmt.server_args import ServerArgs
from sglmt.status.figures import totals_words
from sglmt.supervisor.environment import child_environment
from sglmt.supervisor.logs import LineWriter, LogSink
from sglmt.supervisor.supervisor import Supervisor

_SHOW_CURSOR = "\x1b[?25h"
DIGEST_EVERY_S = 60.0
LIVE_VIEW_ENDS_WITHIN_S = 1.0
OUTPUT_WRITTEN_WITHIN_S = 2.0


class LiveView:
    """The live view's process, seen from the supervisor. `on_end` is called on the event loop when it ended."""

    def __init__(self, socket_path: Path, on_end: Callable[[], None]) -> None:
        self._alive_fd, held = os.pipe()
        try:
            os.set_inheritable(held, True)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "sglmt.status.live", str(socket_path)],
                stdin=subprocess.DEVNULL,
                env=child_environment(None, os.environ),
                pass_fds=(held,),
                process_group=0,
            )
        finally:
            os.close(held)
        self._on_end = on_end
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._alive_fd, self._end)

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def _end(self) -> None:
        """The pipe only this child holds is at its end: it is gone, however it went."""
        asyncio.get_running_loop().remove_reader(self._alive_fd)
        os.close(self._alive_fd)
        with contextlib.suppress(ChildProcessError):
            self._process.wait()
        self._ended.set()
        self._on_end()

    async def ended(self, deadline_s: float) -> bool:
        """Wait for it to end by itself; at the deadline it is killed. False: it had to be."""
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                await self._ended.wait()
            return True
        except TimeoutError:
            self._process.kill()
            await self._ended.wait()
            return False


@dataclass(frozen=True)
class Ended:
    """How a run ended: its exit code and, when it failed, why (the first line says it all)."""

    exit_code: int
    failure: str | None


class Session:
    """The output side of one run."""

    def __init__(self, args: ServerArgs, sink: LogSink, writer: LineWriter, live: bool) -> None:
        self._args = args
        self._sink = sink
        self._writer = writer
        self._wants_live = live
        self._live: LiveView | None = None
        self._server: ControlServer | None = None
        self._instance: Supervisor | None = None
        sink.use_writer(None if live else writer)

    def control(self, instance: Supervisor) -> SessionControl:
        """The control factory the supervisor calls once its run directory exists."""
        socket_path = instance.run_dir / CONTROL_SOCKET
        context = Context(instance=instance, logs=self._sink, drain_s=lambda: instance.args.drain_timeout)
        self._server = ControlServer(socket_path, context)
        self._instance = instance
        return SessionControl(self, self._server, socket_path, Digest(instance, self._sink))

    def show_live(self, socket_path: Path) -> None:
        """Start the live view where one was asked for. A view that cannot start costs only itself."""
        if not self._wants_live:
            return
        try:
            self._live = LiveView(socket_path, self._live_ended)
            if self._instance is not None:
                self._instance.leave_alone(self._live.pid)
        except OSError as error:
            self._sink.log("warning", "supervisor", f"live view: cannot start: {error.strerror}")
            self._live_ended()

    def _live_ended(self) -> None:
        """From now on plain lines; all of them, when the live view never showed any."""
        self._sink.use_writer(self._writer)
        if self._server is None or not self._server.subscriptions:
            for line in self._sink.recent():
                self._writer.write(self._sink.render(line))
        self._wants_live = False

    async def close_live(self) -> None:
        """Let the live view finish its last drawing; a terminal that does not take it cannot hold us up."""
        if self._live is not None and not await self._live.ended(time.monotonic() + LIVE_VIEW_ENDS_WITHIN_S):
            self._writer.write(_SHOW_CURSOR)

    def finish(self) -> None:
        """Write what is left of the log."""
        if self._wants_live:  # it never came to a live view
            self._live_ended()
        deadline_s = time.monotonic() + OUTPUT_WRITTEN_WITHIN_S
        self._sink.close(deadline_s)
        self._writer.close(deadline_s)


class Digest:
    """One line a minute about what was done in it, for logs that nobody watches; none when nothing was done."""

    def __init__(self, instance: Controlled, sink: LogSink) -> None:
        self._instance = instance
        self._sink = sink
        self._told_requests = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Tell every minute from now on."""
        self._timer = asyncio.get_running_loop().call_later(DIGEST_EVERY_S, self._tell)

    def stop(self) -> None:
        """Tell no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _tell(self) -> None:
        totals = self._instance.snapshot().totals
        if totals.requests_total != self._told_requests or totals.running:
            words = [*totals_words(totals), f"{totals.requests_total} requests so far"]
            self._sink.log("info", "supervisor", ", ".join(words))
            self._told_requests = totals.requests_total
        self.start()


class SessionControl:
    """What the supervisor holds: the control server with the live view attached."""

    def __init__(self, session: Session, server: ControlServer, socket_path: Path, digest: Digest) -> None:
        self._session = session
        self._server = server
        self._socket_path = socket_path
        self._digest = digest

    async def start(self) -> None:
        """Answer commands from now on, then show the live view."""
        await self._server.start()
        self._session.show_live(self._socket_path)
        self._digest.start()

    async def close(self) -> None:
        """End all connections (subscribers get what was said so far), then wait for the live view."""
        self._digest.stop()
        await self._server.close()
        await self._session.close_live()


def run_supervisor(
    args: ServerArgs,
    session: Session,
    sink: LogSink,
    on_ready: Callable[[str], None],
    reread: Callable[[], ServerArgs] | None = None,
) -> Ended:
    """Run the supervisor to its end. `on_ready` gets the URL; `reread` gives the configuration again, for reloads."""
    set_title(SUPERVISOR_TITLE)

    def ready() -> None:
        on_ready(supervisor.url)

    supervisor: Supervisor = Supervisor(
        args, log=sink.log, on_ready=ready, control_factory=session.control, reread=reread, reopen_logs=sink.reopen
    )
    try:
        code = asyncio.run(supervisor.run())
    finally:
        session.finish()
    return Ended(code, supervisor.failure)
