"""The one entry point of every child process: `python -m sglmt.workers.child --bootstrap-fd N LABEL`.

It reads the bootstrap pipe, takes its title, ties its life to the supervisor's (PDEATHSIG and a pipe whose
end of file means the supervisor is gone), maps the state page and the argument segment, and runs the role.
`ChildContext` is what a role gets; a role returns when it was asked to stop and has nothing left to do.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import setproctitle

from sglmt.control.state import Applied
from sglmt.errors import ExitCode, SegmentError, SglmtError
from sglmt.ipc.bootstrap import Bootstrap, read_bootstrap
from sglmt.ipc.queues import Transport
from sglmt.ipc.shared_memory import Arguments, read_arguments
from sglmt.ipc.state_page import HeaderWord, Phase, SlotWord, StatePage
from sglmt.messages.frame import FrameWriter, Role

ROLE_MODULES = {
    Role.ROUTER: "sglmt.workers.router",
    Role.SCHEDULER: "sglmt.workers.scheduler",
    Role.DETOKENIZER: "sglmt.workers.detokenizer",
    Role.TOKENIZER_WORKER: "sglmt.workers.tokenizer_worker",
}
_PR_SET_PDEATHSIG = 1
_SEGMENT_WITHIN_S = 3.0


class ChildContext:
    """What a role knows of itself and how it reports. One per process."""

    def __init__(self, bootstrap: Bootstrap, preloaded: object = None) -> None:
        self.bootstrap = bootstrap
        self.preloaded = preloaded  # a sglmt.workers.preloaded.Preloaded, where this process was forked with one
        self.role = bootstrap.role
        self.index = bootstrap.index
        self.generation = bootstrap.generation
        self.run_dir = Path(bootstrap.run_dir)
        self.cache_dir = Path(bootstrap.cache_dir)
        self.instance_id = bootstrap.instance_id
        self.page = StatePage.open(Path(bootstrap.state_page), bootstrap.instance_id)
        self.slot = self.page.slot(bootstrap.slot)
        self.slot.enter(Phase.BOOTING)
        self.writer = FrameWriter(bootstrap.instance_id, bootstrap.role, bootstrap.index, bootstrap.generation)
        self._segment = Path(bootstrap.segment_path)
        self.arguments, self.segment_revision = self._read_segment(time.monotonic() + _SEGMENT_WITHIN_S)
        self.args = self.arguments.server_args
        self.transport = Transport()
        self.clock: Callable[[], float] = time.monotonic
        self.death_fd = bootstrap.death_fd
        self.stop_requested = False
        self.log_level = bootstrap.log_level
        self._on_stop: Callable[[], object] | None = None

    def log(self, level: str, text: str) -> None:
        """One line for the supervisor's log (it adds time and process)."""
        if _LEVELS.index(level) >= _LEVELS.index(self.log_level):
            print(f"{level.upper()} {text}", file=sys.stderr, flush=True)

    def reread_arguments(self) -> Arguments:
        """What the segment holds; read again when the supervisor has written a newer revision. Never waits: as long as
        it cannot be read (somebody removed or damaged it) what is known stays."""
        if self.page.header(HeaderWord.SEGMENT_REVISION) != self.segment_revision:
            with contextlib.suppress(SegmentError):
                self.arguments, self.segment_revision = self._read_segment(0.0)
        return self.arguments

    def _read_segment(self, deadline_s: float) -> tuple[Arguments, int]:
        return read_arguments(self._segment.name, self.instance_id, self._segment.parent, deadline_s)

    def ready(self, info: Any = None) -> None:
        """Tell the supervisor that this process can do its work; a scheduler adds what its engine is."""
        if info is not None:
            self._report(f"info {msgspec.json.encode(info).decode()}")
        self.slot.enter(Phase.READY)
        self._report("ready")

    def probed(self) -> None:
        """A request of this worker's own came back through every process."""
        self._report("probed")

    def applied(self, report: Applied) -> None:
        """Tell the supervisor that a version of the control state is applied here, or why not."""
        self._report(f"applied {msgspec.json.encode(report).decode()}")

    def failed(self, reason: str) -> None:
        """Say in one line why this process is about to end."""
        self._report(f"failed {' '.join(reason.split())}")

    def _report(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the supervisor is going away; the death pipe ends this process
            os.write(self.bootstrap.ready_fd, f"{line}\n".encode())

    def on_stop(self, callback: Callable[[], object]) -> None:
        """Call this (in the main thread, between two bytecodes) at the first SIGTERM."""
        self._on_stop = callback

    def handle_stop(self, _signal: int = 0, _frame: FrameType | None = None) -> None:
        """SIGTERM: drain and end. Repeats change nothing."""
        if not self.stop_requested:
            self.stop_requested = True
            if self._on_stop is not None:
                self._on_stop()

    def drain_deadline_s(self, otherwise_s: float) -> float:
        """Monotonic time until which running requests may finish: this life's, the instance's, whichever is nearer;
        `otherwise_s` when the supervisor has set none (somebody else sent the TERM)."""
        words = (self.slot[SlotWord.DRAIN_DEADLINE_NS], self.page.header(HeaderWord.DRAIN_DEADLINE_NS))
        set_ns = [word for word in words if word]
        return min(set_ns) / 1e9 if set_ns else otherwise_s

    def supervisor_is_gone(self) -> None:
        """Called when the death pipe reports end of file: nobody would notice an orderly end."""
        os._exit(ExitCode.CHILD_DEATH)


_LEVELS = ("debug", "info", "warning", "error")


def main() -> None:
    """Run one role to its end; exit code 0 only when it was asked to stop."""
    parser = argparse.ArgumentParser(prog="sglmt-child")
    parser.add_argument("--bootstrap-fd", type=int, required=True)
    parser.add_argument("label", nargs="?")
    sys.exit(run_child(read_bootstrap(parser.parse_args().bootstrap_fd)))


def run_child(bootstrap: Bootstrap, preloaded: object = None) -> int:
    """Be the child that `bootstrap` describes, to its end; the exit code. `preloaded`: what it was forked with."""
    _tie_to_supervisor(bootstrap)
    setproctitle.setproctitle(title_of(bootstrap.role, bootstrap.index))
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the supervisor's matter
    return _run(bootstrap, preloaded)


def title_of(role: Role, index: int) -> str:
    """The process title: `sglmt::router`, `sglmt::tokenizer_worker:3`."""
    numbered = role in (Role.TOKENIZER_WORKER, Role.DETOKENIZER)
    return f"sglmt::{role.label}:{index}" if numbered else f"sglmt::{role.label}"


def _run(bootstrap: Bootstrap, preloaded: object) -> int:
    try:
        context = ChildContext(bootstrap, preloaded)
        signal.signal(signal.SIGTERM, context.handle_stop)
        run: Callable[[ChildContext], None] = importlib.import_module(ROLE_MODULES[bootstrap.role]).run
        run(context)
    except SglmtError as error:
        os.write(bootstrap.ready_fd, f"failed {' '.join(str(error).split())}\n".encode())
        print(f"ERROR {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)
    except Exception as error:
        traceback.print_exc()
        os.write(bootstrap.ready_fd, f"failed {type(error).__name__}: {error}\n".encode()[:2048])
        return int(ExitCode.FAILURE)
    context.slot.enter(Phase.EXITING)
    return int(ExitCode.OK)


def _tie_to_supervisor(bootstrap: Bootstrap) -> None:
    """Ask the kernel to kill this process when its parent dies; end now if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != bootstrap.supervisor_pid:
        os._exit(ExitCode.CHILD_DEATH)


if __name__ == "__main__":
    main()
