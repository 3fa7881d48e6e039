"""Launches whose supervisor is killed at any moment: does anything survive, does the next launch work? Runs as
`python -m sglmt.soak.launches`.

A round: `sglmt launch` on a fixed port; at an instant drawn uniformly between its first child and one second after
READY its supervisor gets SIGKILL; within a few seconds none of its processes may run and nobody listen. Then a
second launch on the same port has to become READY, stop with exit code 0, and leave nothing of either: no
process, no segment, no run directory.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import psutil

from sglmt.ipc.shared_memory import NAME_PREFIX, SHM_DIR

GONE_WITHIN_S = 5.0
READY_WITHIN_S = 60.0
STOPPED_WITHIN_S = 30.0
AFTER_READY_S = 1.0
POLL_S = 0.005
MARK = "SOAK_MARK"


class Launch:
    """One `sglmt launch` in the foreground, its log in a file. Its process is the supervisor."""

    def __init__(self, base: Path, port: int, workers: int, mark: str) -> None:
        self._log = base / "log"
        command = [
            sys.executable, "-m", "sglmt", "launch", "--engine", "simulator", "--name", "killed", "--port", str(port),
            "--workers", str(workers), "--runtime-dir", str(base / "run"), "--no-live",
        ]  # fmt: skip
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, MARK: mark}
            )
        self.began_s = time.monotonic()

    @property
    def log(self) -> str:
        """What it has printed."""
        return self._log.read_text(errors="replace")

    def wait_for_child(self) -> None:
        """Its first spawn. Raises RuntimeError when there is none."""
        supervisor = psutil.Process(self.process.pid)
        self._wait(lambda: bool(supervisor.children()), "no child")

    def wait_ready(self) -> float:
        """Seconds since the launch. Raises RuntimeError when it does not become READY."""
        self._wait(lambda: "READY" in self.log, "not READY")
        return time.monotonic() - self.began_s

    def _wait(self, reached: Callable[[], bool], what: str) -> None:
        while not reached():
            if self.process.poll() is not None or time.monotonic() - self.began_s > READY_WITHIN_S:
                raise RuntimeError(f"{what}, exit code {self.process.poll()}: {self.log[-1500:]}")
            time.sleep(POLL_S)

    def stop(self) -> int:
        """TERM; the exit code. Raises subprocess.TimeoutExpired."""
        self.process.terminate()
        return self.process.wait(STOPPED_WITHIN_S)

    def kill(self) -> None:
        """SIGKILL, to the supervisor alone."""
        self.process.kill()
        self.process.wait()


def marked(mark: str) -> list[str]:
    """Processes that were started below a launch with this mark, in words."""
    wanted = f"{MARK}={mark}".encode()
    found: list[str] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_other = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if is_other and wanted in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
    return found


def is_served(port: int) -> bool:
    """Whether somebody takes connections."""
    with socket.socket() as client:
        client.settimeout(1.0)
        return client.connect_ex(("127.0.0.1", port)) == 0


def free_port(dice: random.Random) -> int:
    """One that is free now, and below those the kernel gives to outgoing connections: one of these could be taken by
    a client between two launches, or even be connected to itself."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = dice.randrange(10_000, lowest)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Rounds:
    """All rounds of one run."""

    def __init__(self, workers: int, seed: int) -> None:
        self._workers = workers
        self._dice = random.Random(seed)
        self._mark = uuid.uuid4().hex
        self._base = Path(tempfile.mkdtemp(prefix="sglmt-kills-"))
        self._port = free_port(self._dice)
        self._pids: list[int] = []
        self.problems: list[str] = []
        self.instants_s: list[float] = []
        self.longest_survival_s = 0.0
        self.window_s = 0.0

    def launch(self) -> Launch:
        """One more."""
        launch = Launch(self._base, self._port, self._workers, self._mark)
        self._pids.append(launch.process.pid)
        return launch

    def measure(self) -> None:
        """How long the window is from which instants are drawn: an undisturbed launch."""
        launch = self.launch()
        launch.wait_for_child()
        first_child_s = time.monotonic() - launch.began_s
        self.window_s = launch.wait_ready() - first_child_s + AFTER_READY_S
        launch.stop()

    def one(self, number: int) -> None:
        """One round; what went wrong goes to `problems`."""
        launch = self.launch()
        instant_s = self._dice.uniform(0, self.window_s)
        try:
            launch.wait_for_child()
            time.sleep(instant_s)
        except RuntimeError as error:
            self.problems.append(f"round {number}: {error}")
        launch.kill()
        self.instants_s.append(instant_s)
        self._check_gone(f"round {number}, killed {instant_s:.3f} s after its first child")
        self._check_next(number)

    def _check_gone(self, when: str) -> None:
        killed_s = time.monotonic()
        while left := marked(self._mark) or self._listener():
            if time.monotonic() - killed_s > GONE_WITHIN_S:
                self.problems.append(f"{when}: survivors: {left}")
                return
            time.sleep(POLL_S)
        self.longest_survival_s = max(self.longest_survival_s, time.monotonic() - killed_s)

    def _listener(self) -> list[str]:
        """A process that is ending has lost its environment before its sockets."""
        return [f"somebody on port {self._port}"] if is_served(self._port) else []

    def _check_next(self, number: int) -> None:
        launch = self.launch()
        try:
            launch.wait_ready()
            code = launch.stop()
            if code != 0:
                self.problems.append(f"round {number}: the next launch ended with {code}: {launch.log[-1500:]}")
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            self.problems.append(f"round {number}: the next launch: {error}")
            launch.kill()
        left = [path.name for pid in self._pids for path in SHM_DIR.glob(f"{NAME_PREFIX}{pid}_*")]
        left += [str(path) for path in (self._base / "run").glob("*")]
        if left:
            self.problems.append(f"round {number}: left after the next launch: {left}")


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--rounds", type=click.IntRange(1), default=200, show_default=True, help="How many are killed.")
@click.option("--workers", type=click.IntRange(1, 32), default=4, show_default=True, help="Tokenizer workers.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the instants.")
def main(rounds: int, workers: int, seed: int) -> None:
    """Launch, kill the supervisor with SIGKILL at a random instant, check that nothing survives, launch again.

    The instant is drawn uniformly between the first child of the launch and one second after READY. Prints one line
    of JSON; the exit code is 0 when nothing ever survived and every next launch on the same port worked, else 1.
    """
    run = Rounds(workers, seed)
    run.measure()
    for number in range(1, rounds + 1):
        told = len(run.problems)
        run.one(number)
        for problem in run.problems[told:]:
            click.echo(problem, err=True)
        if number % 10 == 0 or number == rounds:
            click.echo(f"{number} of {rounds} rounds, {len(run.problems)} problems", err=True)
    report: dict[str, Any] = {
        "ok": not run.problems,
        "rounds": rounds,
        "workers": workers,
        "seed": seed,
        "window_s": round(run.window_s, 2),
        "longest_survival_s": round(run.longest_survival_s, 3),
        "problems": run.problems[:20],
    }
    click.echo(msgspec.json.encode(report).decode())
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main(prog_name="kill-launches")
