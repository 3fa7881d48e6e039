"""A Supervisor with fake children: in the test's own event loop, or in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

from sglmt.ipc.shared_memory import SHM_DIR
from sglmt.messages.frame import Role
from sglmt.server_args import ServerArgs
from sglmt.supervisor.process import ManagedProcess
from sglmt.supervisor.supervisor import Supervisor

HERE = Path(__file__).parent
RESOLVER = (sys.executable, str(HERE / "fake_resolver.py"))
T = TypeVar("T")


def fake_command(plan: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """The command prefix of fake children that follow `plan` (see fake_child)."""
    return (sys.executable, str(HERE / "fake_child.py"), json.dumps(plan))


class Supervised:
    """A supervisor being run, and what it said."""

    def __init__(
        self,
        args: ServerArgs,
        plan: dict[str, dict[str, Any]],
        resolver: tuple[str, ...],
        reread: Callable[[], ServerArgs] | None = None,
    ) -> None:
        self.lines: list[tuple[str, str, str]] = []
        self.ready = False
        self.supervisor = Supervisor(
            args, self._log, self._on_ready, command=fake_command(plan), resolver=resolver, reread=reread
        )
        self.exit_code: int | None = None

    def _log(self, level: str, source: str, text: str) -> None:
        self.lines.append((level, source, text))

    def _on_ready(self) -> None:
        self.ready = True

    def process(self, name: str) -> ManagedProcess:
        """The managed process of this name."""
        return next(p for p in self.supervisor.crew.everybody() if p.name == name)

    def pids(self) -> list[int]:
        """All children that run now."""
        return sorted(self.supervisor.crew.pids()) if self.supervisor._crew is not None else []

    def generation(self, role: Role, index: int) -> int:
        """The one that is published in the state page."""
        return self.supervisor.resources.page.generation(role, index)

    def said(self, words: str) -> bool:
        """Whether a line of the log contains these words."""
        return any(words in text for _, _, text in self.lines)

    async def until(self, predicate: Callable[[], T], within_s: float, why: str) -> T:
        """Wait in the loop for a condition. Raises AssertionError with `why` and the log."""
        end_s = time.monotonic() + within_s
        while not (result := predicate()):
            log = "\n".join(f"{level} {source}: {text}" for level, source, text in self.lines[-40:])
            assert time.monotonic() < end_s, f"not within {within_s:g} s: {why}; log:\n{log}"
            assert self.exit_code is None, f"ended with {self.exit_code} before: {why}; log:\n{log}"
            await asyncio.sleep(0.02)
        return result


@contextlib.asynccontextmanager
async def supervised(
    args: ServerArgs,
    plan: dict[str, dict[str, Any]] | None = None,
    resolver: tuple[str, ...] = RESOLVER,
    reread: Callable[[], ServerArgs] | None = None,
) -> AsyncIterator[Supervised]:
    """Run a supervisor around the block; it is stopped, by force if need be, when the block ends."""
    running = Supervised(args, plan or {}, resolver, reread)

    async def run() -> None:
        running.exit_code = await running.supervisor.run()

    task = asyncio.create_task(run())
    try:
        yield running
    finally:
        if not task.done() and running.supervisor._inbox is not None:
            running.supervisor.request_stop(0.0, now=True)
        async with asyncio.timeout(20):
            await task


async def run_to_end(
    args: ServerArgs, plan: dict[str, dict[str, Any]] | None = None, resolver: tuple[str, ...] = RESOLVER
) -> Supervised:
    """Run a supervisor that ends by itself, within 30 s."""
    running = Supervised(args, plan or {}, resolver)
    async with asyncio.timeout(30):
        running.exit_code = await running.supervisor.run()
    return running


def segments_of(pid: int) -> list[str]:
    """The shared-memory segments that a launcher of this pid has made."""
    return [path.name for path in SHM_DIR.glob(f"multi_tokenizer_args_{pid}_*")]


def start_apart(args: ServerArgs, plan: dict[str, dict[str, Any]]) -> subprocess.Popen[str]:
    """A supervisor with fake children in a process of its own; prints `READY <pids>` when it is."""
    told = json.dumps({"plan": plan, "args": {"workers": args.workers, "port": args.port, "name": args.name,
                                              "runtime_dir": args.runtime_dir}})  # fmt: skip
    command = [sys.executable, "-m", "tests.support.supervised", told]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1])


def main() -> None:
    """Run one supervisor as `start_apart` says; the exit code is its own."""
    told = json.loads(sys.argv[1])
    running = Supervised(ServerArgs(**told["args"]), told["plan"], RESOLVER)

    def on_ready() -> None:
        print("READY", *running.pids(), flush=True)

    running.supervisor._on_ready = on_ready
    sys.exit(asyncio.run(running.supervisor.run()))


if __name__ == "__main__":
    main()
