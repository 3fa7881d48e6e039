"""`sglmt launch --detach`: the supervisor in the background, the command waits until it is READY or has failed.

Two processes run this file. The command forks twice, so that the supervisor has a session of its own and no
terminal, before it has any thread or event loop; then it waits on a pipe for one report. The supervisor writes
its log to `<run directory>/log`, or to the file of `--log-file` or `--log-dir`; what it says before there is a run
directory goes to a nameless file that both processes hold, so that even a crash of the interpreter can be shown.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Literal

import msgspec

from sglmt.errors import ExitCode
from sglmt.ipc.process_identity import ProcessIdentity, identity_of
from sglmt.launching.logging_setup import RUN_LOG, bounded_file, log_sink, named_file, writer_to
from sglmt.launching.session import OUTPUT_WRITTEN_WITHIN_S, Ended, Session, SessionControl, run_supervisor
from sglmt.server_args import ServerArgs
from sglmt.supervisor.log_file import LogFile
from sglmt.supervisor.logs import LineWriter, LogSink
from sglmt.supervisor.supervisor import Supervisor

TAIL_LINES = 20
TAIL_BYTES = 16 * 1024


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor tells the waiting command, one JSON line each."""

    event: Literal["started", "ready", "failed"]
    pid: int = 0
    url: str = ""
    message: str = ""
    exit_code: int = 0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How the start ended, for the command to print."""

    exit_code: int
    url: str = ""
    message: str = ""
    tail: list[str] = []


def run_in_background(
    args: ServerArgs, warnings: list[str], log_file: str | None, reread: Callable[[], ServerArgs] | None = None
) -> Outcome:
    """Start the supervisor in the background and wait for READY. Returns in the command only.

    Ctrl-C, TERM and HUP while waiting stop the instance. Raises ConfigError or ResourceError for an unusable log file.
    """
    file = named_file(args, log_file)
    log_fd = os.memfd_create("sglmt-early-log") if file is None else file.fd
    report_fd, write_fd = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(report_fd)
        _become_daemon(log_fd)
        if file is None:
            os.close(log_fd)
        _supervise(args, warnings, write_fd, file, reread)
    os.close(write_fd)
    os.waitpid(middle, 0)
    try:
        return _wait_for_ready(report_fd, log_fd)
    finally:
        os.close(report_fd)
        os.close(log_fd)


def _become_daemon(log_fd: int) -> None:
    """Second half of the double fork: own session, no terminal, output to the log. Returns in the daemon only."""
    os.setsid()
    if os.fork():
        os._exit(0)
    null_fd = os.open(os.devnull, os.O_RDWR)
    os.dup2(null_fd, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(null_fd)


def _supervise(
    args: ServerArgs,
    warnings: list[str],
    report_fd: int,
    file: LogFile | None,
    reread: Callable[[], ServerArgs] | None,
) -> None:
    """The daemon's life. Never returns: what called us belongs to the command."""
    code = int(ExitCode.FAILURE)
    reporter = _Reporter(report_fd)
    try:
        reporter.send(Report(event="started", pid=os.getpid()))
        ended = _run(args, warnings, reporter, file, reread)
        code = ended.exit_code
        reporter.send(Report(event="failed", message=ended.failure or "stopped before it was ready", exit_code=code))
    except BaseException as error:  # the last frame of this process: whatever it was is told and logged
        traceback.print_exc()
        reporter.send(Report(event="failed", message=f"internal error: {error!r}", exit_code=code))
    finally:
        os._exit(code)


def _run(
    args: ServerArgs,
    warnings: list[str],
    reporter: _Reporter,
    file: LogFile | None,
    reread: Callable[[], ServerArgs] | None,
) -> Ended:
    if file is not None:
        file.follow(1, 2)
    writer = writer_to(1 if file is None else file, args)
    sink = log_sink(args)
    session = _BackgroundSession(args, sink, writer, early_log=file is None)
    for warning in warnings:
        sink.log("warning", "supervisor", warning)
    return run_supervisor(args, session, sink, lambda url: reporter.send(Report(event="ready", url=url)), reread)


class _BackgroundSession(Session):
    """A session that moves its output into the run directory once there is one."""

    def __init__(self, args: ServerArgs, sink: LogSink, writer: LineWriter, early_log: bool) -> None:
        super().__init__(args, sink, writer, live=False)
        self._early_log = early_log

    def control(self, instance: Supervisor) -> SessionControl:
        """As for any session; the log moves first, so that it holds everything from here on."""
        if self._early_log:
            self._writer.flush(time.monotonic() + OUTPUT_WRITTEN_WITHIN_S)
            file = bounded_file(instance.run_dir / RUN_LOG, self._args)
            copy_output(file)
            file.follow(1, 2)
            self._writer.redirect(file)
        return super().control(instance)


def copy_output(file: LogFile) -> None:
    """Copy what stdout (a file) holds so far into `file`."""
    with open("/proc/self/fd/1", "rb") as early:
        file.write(early.read())


class _Reporter:
    """Writes reports; the command may be gone. `ready` and `failed` are the last word."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def send(self, report: Report) -> None:
        """Send one report; after the last one the pipe is closed."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError):
            os.write(self._fd, msgspec.json.encode(report) + b"\n")
        if report.event != "started":
            os.close(self._fd)
            self._fd = None


class _Interrupted(Exception):
    """A signal asked the waiting command to give up."""


def _wait_for_ready(report_fd: int, log_fd: int) -> Outcome:
    daemon: ProcessIdentity | None = None
    buffer = b""
    interrupts = 0
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        while True:
            try:
                part = os.read(report_fd, 64 * 1024)
            except _Interrupted:
                interrupts += 1  # the second one means now, as everywhere
                _ask_to_stop(daemon)
                continue
            buffer += part
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                report = msgspec.json.decode(line, type=Report)
                if report.event == "started":
                    daemon = identity_of(report.pid)
                    if interrupts:
                        _ask_to_stop(daemon)
                elif report.event == "ready" and not interrupts:
                    return Outcome(exit_code=0, url=report.url)
                elif report.event == "failed" and not interrupts:
                    code = report.exit_code or int(ExitCode.FAILURE)
                    return Outcome(exit_code=code, message=report.message)
            if not part:
                return _ended_without_word(daemon, log_fd, interrupts)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: object) -> None:
    raise _Interrupted


def _ask_to_stop(daemon: ProcessIdentity | None) -> None:
    if daemon is not None and not daemon.is_proven_gone():
        with contextlib.suppress(ProcessLookupError):
            os.kill(daemon.pid, signal.SIGTERM)


def _ended_without_word(daemon: ProcessIdentity | None, log_fd: int, interrupts: int) -> Outcome:
    """The pipe is at its end. After an interrupt that is what was asked for; else the supervisor was killed."""
    if interrupts:
        while daemon is not None and not daemon.is_proven_gone():
            try:
                time.sleep(0.05)
            except _Interrupted:
                _ask_to_stop(daemon)
        return Outcome(exit_code=int(ExitCode.KILLED_NOW), message="interrupted; the instance was stopped")
    return Outcome(
        exit_code=int(ExitCode.FAILURE),
        message="the supervisor died before it was ready and could not say why",
        tail=_tail_of(log_fd),
    )


def _tail_of(log_fd: int) -> list[str]:
    try:
        size = os.fstat(log_fd).st_size
        with open(f"/proc/self/fd/{log_fd}", "rb") as log:
            log.seek(max(0, size - TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    except OSError:
        return []
