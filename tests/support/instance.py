"""An instance started and stopped the way a user does it: by the installed `sglmt` command."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.support.leaks import note_launcher

COMMAND = Path(sys.executable).parent / "sglmt"
COMMAND_WITHIN_S = 60.0
LOG_LINES = 60
UNEXPLAINED = ("unroutable", "undecodable")


class Instance:
    """One name in one runtime directory. `launch` waits until it is READY.

    As a context manager it stops the instance at the end, by force when asking does not help, and shows the last
    log lines when the test failed.
    """

    def __init__(
        self, runtime_dir: Path, name: str | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.runtime_dir = runtime_dir
        self.name = name or f"t{uuid.uuid4().hex[:8]}"
        self.expects_unexplained = False
        self.url = ""
        self.pid = 0
        self._environment = {**os.environ, **(environment or {})}

    def run(self, *arguments: str, within_s: float = COMMAND_WITHIN_S) -> subprocess.CompletedProcess[str]:
        """`sglmt ARGUMENTS`, output captured. Raises subprocess.TimeoutExpired."""
        return subprocess.run(
            [str(COMMAND), *arguments], capture_output=True, text=True, timeout=within_s, env=self._environment,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip

    def launch_arguments(self, *options: str) -> list[str]:
        """The arguments of a launch under this name, on any free port unless `options` say otherwise."""
        return ["launch", "--name", self.name, "--port", "0", "--runtime-dir", str(self.runtime_dir), *options]

    def launch(self, *options: str, within_s: float = 180.0) -> Self:
        """Start in the background and wait for READY. Raises AssertionError with what the command said."""
        done = self.run(*self.launch_arguments("--detach", *options), within_s=within_s)
        assert done.returncode == 0, f"launch ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        snapshot = self.snapshot()
        self.url, self.pid = snapshot["url"], snapshot["pid"]
        note_launcher(self.pid)
        return self

    def status(self) -> dict[str, Any]:
        """The document of `status --json`, whatever the exit code."""
        document: dict[str, Any] = json.loads(self._verb("status", "--json").stdout)
        return document

    def snapshot(self) -> dict[str, Any]:
        """This instance's part of the status. Raises AssertionError when it does not run."""
        instances = self.status()["instances"]
        assert len(instances) == 1, f"{self.name} is not running"
        snapshot: dict[str, Any] = instances[0]
        return snapshot

    def processes(self, role: str | None = None) -> list[dict[str, Any]]:
        """The rows of the status, of one role or all."""
        return [row for row in self.snapshot()["processes"] if role in (None, row["role"])]

    def stop(self, *options: str, within_s: float = 90.0) -> subprocess.CompletedProcess[str]:
        """`sglmt stop`; the caller checks the exit code."""
        return self._verb("stop", *options, within_s=within_s)

    def logs(self, *options: str) -> str:
        """What `sglmt logs` prints."""
        done = self.run("logs", "--name", self.name, "--runtime-dir", str(self.runtime_dir), *options)
        return done.stdout + done.stderr

    def _verb(self, verb: str, *options: str, within_s: float = COMMAND_WITHIN_S) -> subprocess.CompletedProcess[str]:
        return self.run(verb, self.name, "--runtime-dir", str(self.runtime_dir), *options, within_s=within_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pids = self._pids()
        if kind is not None:
            print(f"--- last log lines of {self.name}\n{self.logs('-n', str(LOG_LINES))}")
        unexplained = self._unexplained() if kind is None and pids else {}
        if pids:
            self.stop("--now")
        self._end_by_force(pids)
        assert not unexplained, f"messages nobody can explain in {self.name}: {unexplained}"

    def _unexplained(self) -> dict[str, int]:
        """Counters that must be zero in every instance, unless a test said that they are its subject."""
        if self.expects_unexplained:
            return {}
        instances = self.status()["instances"]
        counters = instances[0]["totals"]["counters"] if instances else {}
        return {name: counters[name] for name in UNEXPLAINED if counters.get(name)}

    def _pids(self) -> Sequence[psutil.Process]:
        """The supervisor and all below it, as long as the run directory tells who that is."""
        try:
            record = json.loads((self.runtime_dir / self.name / "instance.json").read_bytes())
            supervisor = psutil.Process(int(record["process"]["pid"]))
            return [supervisor, *supervisor.children(recursive=True)]
        except (OSError, ValueError, KeyError, psutil.Error):
            return []

    @staticmethod
    def _end_by_force(processes: Sequence[psutil.Process]) -> None:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(list(processes), timeout=5)
