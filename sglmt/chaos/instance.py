"""The instance under chaos: launched, asked and stopped by the installed command. Runs in the chaos command.

It has a runtime directory of its own, so that it meets no other instance; status is asked over the control socket,
as `sglmt status` does, because that costs no process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from sglmt.control.instances import ask_status, find_one
from sglmt.errors import SglmtError
from sglmt.status.snapshot import InstanceSnapshot, ProcessSnapshot
from sglmt.supervisor.rundir import FoundInstance

NAME = "chaos"
LAUNCH_WITHIN_S = 300.0
STOP_WITHIN_S = 90.0
STATUS_WITHIN_S = 5.0


class ChaosInstance:
    """Launched on entry, stopped on exit. `stopped_cleanly` is known afterwards."""

    def __init__(self, options: Sequence[str]) -> None:
        self._options = list(options)
        self._base = tempfile.TemporaryDirectory(prefix="sglmt-chaos-")
        self._found: FoundInstance | None = None
        self.url = ""
        self.stopped_cleanly = False

    def __enter__(self) -> Self:
        arguments = ["--name", NAME, "--port", "0", "--runtime-dir", self._base.name, "--detach", *self._options]
        try:
            done = self._run(["launch", *arguments], LAUNCH_WITHIN_S)
            if done.returncode != 0:
                raise SglmtError(f"sglmt launch {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr}")
            self._found = find_one(NAME, self._base.name)
            self.url = self.snapshot().url
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        done = self._run(["stop", NAME, "--runtime-dir", self._base.name, "--timeout", "5"], STOP_WITHIN_S)
        left = [path.name for path in Path(self._base.name).iterdir()]
        self.stopped_cleanly = done.returncode == 0 and not left
        self._base.cleanup()

    def snapshot(self) -> InstanceSnapshot:
        """What the supervisor says now."""
        assert self._found is not None
        return ask_status(self._found, time.monotonic() + STATUS_WITHIN_S)

    def rows(self, role: str) -> list[ProcessSnapshot]:
        """Rows of one role."""
        return [row for row in self.snapshot().processes if row.role == role]

    @property
    def run_dir(self) -> Path:
        """Its run directory."""
        assert self._found is not None
        return self._found.path

    def operate(self, command: Sequence[str]) -> tuple[int, str]:
        """`sglmt COMMAND` on this instance: exit code and what it printed."""
        done = self._run([command[0], "--name", NAME, "--runtime-dir", self._base.name, *command[1:]], LAUNCH_WITHIN_S)
        return done.returncode, done.stdout + done.stderr

    def log_tail(self, lines: int) -> str:
        """The last lines of its log."""
        return self._run(["logs", "--name", NAME, "--runtime-dir", self._base.name, "-n", str(lines)], 10.0).stdout

    @staticmethod
    def _run(arguments: Sequence[str], within_s: float) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sglmt", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=within_s, stdin=subprocess.DEVNULL, check=False
        )
