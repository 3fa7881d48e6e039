"""The launcher's output: nothing about it (no reader, a blocked or lost terminal) ever delays the serving."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from sglmt.errors import ExitCode
from tests.support.instance import COMMAND, Instance
from tests.support.wait import wait_until

SIMULATOR = ("--engine", "simulator", "--workers", "2")
WRITE_CALLS = ("1", "64")  # x86-64, aarch64


class Terminal:
    """A pseudo terminal whose screen is read only when a test says so."""

    def __init__(self) -> None:
        self.master, self.slave = pty.openpty()
        os.set_blocking(self.master, False)
        self.seen = b""

    def read(self) -> bytes:
        """Everything written so far."""
        try:
            while part := os.read(self.master, 65536):
                self.seen += part
        except (BlockingIOError, OSError):
            pass
        return self.seen

    def close(self) -> None:
        """Hang up."""
        for fd in (self.master, self.slave):
            try:
                os.close(fd)
            except OSError:
                continue  # closed by the test


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


@contextmanager
def foreground(
    instance: Instance, stdout: int, *options: str, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """`sglmt launch` in the foreground with this standard output; ended by force if the test did not."""
    command = [COMMAND, *instance.launch_arguments(*SIMULATOR, *options)]
    variables = {**os.environ, "TERM": "xterm-256color", **(environment or {})}
    with subprocess.Popen(
        command, stdout=stdout, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=variables
    ) as launcher:
        try:
            yield launcher
        finally:
            if launcher.poll() is None:
                instance.stop("--now")
                launcher.kill()


def is_running(instance: Instance) -> bool:
    instances = instance.status()["instances"]
    return bool(instances) and instances[0]["state"] == "running"


def live_views(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    return [
        child for child in psutil.Process(launcher.pid).children() if "sglmt.status.live" in " ".join(child.cmdline())
    ]


def kill_a_worker_and_wait(instance: Instance) -> None:
    """The thing that must not be delayed: a dead worker is noticed and replaced."""
    victim = instance.processes("tokenizer_worker")[0]["pid"]
    os.kill(victim, signal.SIGKILL)
    wait_until(
        lambda: is_running(instance) and instance.processes("tokenizer_worker")[0]["pid"] != victim,
        30, "the killed worker is replaced",
    )  # fmt: skip


def end(launcher: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=20)
    return launcher.returncode, errors


def test_plain_lines_into_a_file(instance: Instance, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file, foreground(instance, file.fileno()) as launcher:
        wait_until(lambda: "READY" in log.read_text(), 60, "READY in the file")
        assert live_views(launcher) == []
        assert end(launcher) == (0, "")
    text = log.read_text()
    assert "\x1b" not in text
    assert text.endswith("\n")
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \w+ +\S+ \| ", line) for line in text.splitlines())


def test_a_reader_that_is_gone_stops_nothing(instance: Instance) -> None:
    read_fd, write_fd = os.pipe()
    with foreground(instance, write_fd) as launcher:
        os.close(write_fd)
        os.read(read_fd, 1)
        os.close(read_fd)
        wait_until(lambda: is_running(instance), 60, "READY without a reader")
        kill_a_worker_and_wait(instance)
        assert end(launcher) == (0, "")


def test_a_live_view_on_a_terminal(instance: Instance, terminal: Terminal) -> None:
    with foreground(instance, terminal.slave) as launcher:
        wait_until(lambda: b"RUNNING" in terminal.read() and b"2/2 workers" in terminal.read(), 60, "the table")
        (view,) = live_views(launcher)
        assert os.getpgid(view.pid) != os.getpgid(launcher.pid)
        wait_until(lambda: b"READY" in terminal.read(), 10, "log lines above the table")
        code, errors = end(launcher, signal.SIGINT)
        assert (code, errors) == (0, "")
        assert not view.is_running()
    assert terminal.read().rstrip().endswith(b"\x1b[?25h") or b"\x1b[?25h" in terminal.read()


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_that_wants_plain_lines(instance: Instance, terminal: Terminal, environment: dict[str, str]) -> None:
    with foreground(instance, terminal.slave, environment=environment) as launcher:
        wait_until(lambda: b"READY" in terminal.read(), 60, "READY in plain lines")
        assert live_views(launcher) == []
        assert end(launcher) == (0, "")
    assert b"\x1b" not in terminal.read()


def test_a_blocked_terminal_delays_nothing(instance: Instance, terminal: Terminal) -> None:
    with foreground(instance, terminal.slave) as launcher:
        wait_until(lambda: is_running(instance), 60, "READY with a terminal nobody reads")
        (view,) = live_views(launcher)
        wait_until(lambda: blocked_in_write(view.pid), 60, "the live view is stuck")
        kill_a_worker_and_wait(instance)
        assert end(launcher)[0] == 0
        assert not view.is_running()


def blocked_in_write(pid: int) -> bool:
    """Whether the process is inside write(2) to its stdout, as /proc tells it: number of the call, descriptor."""
    try:
        number, descriptor = (*Path(f"/proc/{pid}/syscall").read_text().split(), "", "")[:2]
        return number in WRITE_CALLS and descriptor == "0x1"
    except OSError:
        return False


def test_a_live_view_that_dies_is_replaced_by_plain_lines(instance: Instance, terminal: Terminal) -> None:
    with foreground(instance, terminal.slave) as launcher:
        wait_until(lambda: is_running(instance) and b"READY" in terminal.read(), 60, "READY")
        (view,) = live_views(launcher)
        view.kill()
        wait_until(lambda: not view.is_running(), 10, "the live view is reaped")
        before = len(terminal.read())
        kill_a_worker_and_wait(instance)
        wait_until(lambda: b"SIGKILL" in terminal.read()[before:], 10, "plain lines about the killed worker")
        assert end(launcher) == (0, "")


def test_an_error_at_start_is_the_last_word(instance: Instance, terminal: Terminal) -> None:
    with foreground(instance, terminal.slave, "--model-path", __file__) as launcher:
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == ExitCode.MODEL
    assert errors.startswith("sglmt: error: ")
    assert errors.count("\n") == 1
