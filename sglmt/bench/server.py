"""An instance under measurement: started and asked by the `sglmt` command, as a user does it.

Runs in `scripts/bench`. Owns the instance it started: whatever happens, it is stopped at the end, by force when
asking does not help.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import psutil

from sglmt.errors import SglmtError
from sglmt.status.snapshot import InstanceSnapshot, StatusDocument

LAUNCH_WITHIN_S = 120.0
COMMAND_WITHIN_S = 60.0


def sglmt_command(*arguments: str) -> list[str]:
    """The command line of `sglmt ARGUMENTS` in this environment."""
    return [sys.executable, "-m", "sglmt", *arguments]


class Server:
    """One instance with the simulator engine, on any free port, as a context manager."""

    def __init__(self, runtime_dir: Path, *options: str) -> None:
        self.name = f"bench{uuid.uuid4().hex[:8]}"
        self.runtime_dir = runtime_dir
        self._options = options
        self.launch_wall_s = 0.0
        self.port = 0

    @property
    def run_dir(self) -> Path:
        """The instance's run directory."""
        return self.runtime_dir / self.name

    def __enter__(self) -> Self:
        common = ["--engine", "simulator", "--port", "0", "--name", self.name, "--runtime-dir", str(self.runtime_dir)]
        began_s = time.monotonic()
        try:
            done = self._run("launch", *common, "--detach", *self._options, within_s=LAUNCH_WITHIN_S)
            self.launch_wall_s = time.monotonic() - began_s
            if done.returncode:
                raise SglmtError(f"launch failed with exit code {done.returncode}: {done.stderr.strip()}")
            self.port = int(self.snapshot().url.rpartition(":")[2])
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        left = self._tree()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._verb("stop", "--now")
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)

    def snapshot(self) -> InstanceSnapshot:
        """The instance's part of `sglmt status --json`. Raises SglmtError when it does not run."""
        done = self._verb("status", "--json")
        instances = msgspec.json.decode(done.stdout, type=StatusDocument).instances if done.stdout else []
        if len(instances) != 1:
            raise SglmtError(f"the instance {self.name} does not run (any more): {done.stderr.strip()}")
        return instances[0]

    def processes(self) -> dict[int, str]:
        """Pid → role of all processes, the supervisor included."""
        snapshot = self.snapshot()
        rows = {row.pid: row.role for row in snapshot.processes if row.pid is not None}
        return {snapshot.pid: "supervisor", **rows}

    def command(self, verb: str, *options: str) -> subprocess.CompletedProcess[str]:
        """`sglmt VERB OPTIONS --name NAME`. Raises SglmtError when it fails."""
        done = self._run(verb, *options, "--name", self.name, "--runtime-dir", str(self.runtime_dir))
        if done.returncode:
            raise SglmtError(f"sglmt {verb} failed with exit code {done.returncode}: {done.stderr.strip()}")
        return done

    def _verb(self, verb: str, *options: str) -> subprocess.CompletedProcess[str]:
        return self._run(verb, self.name, "--runtime-dir", str(self.runtime_dir), *options)

    def _run(self, *arguments: str, within_s: float = COMMAND_WITHIN_S) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SGLMT_")}
        return subprocess.run(
            sglmt_command(*arguments), capture_output=True, text=True, timeout=within_s, check=False,
            stdin=subprocess.DEVNULL, env=environment,
        )  # fmt: skip

    def _tree(self) -> list[psutil.Process]:
        try:
            supervisor = psutil.Process(self.snapshot().pid)
            return [supervisor, *supervisor.children(recursive=True)]
        except (SglmtError, psutil.Error, subprocess.SubprocessError, msgspec.MsgspecError):
            return []


def has_verb(verb: str) -> bool:
    """Whether this version of the command knows a verb."""
    from sglmt.cli import main

    return verb in main.commands
