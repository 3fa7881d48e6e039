"""Who is hit, how and when. Runs in the chaos command, beside the load.

Every half to two seconds one detokenizer, the router or the scheduler (and a worker, when asked for) is killed with
SIGKILL, or stopped with SIGSTOP until the supervisor has replaced it. After a hit on the scheduler the next one
waits until the instance says that it is ready again: then everything that ran continues, and no request can be taken
for the cause of two deaths.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable

import psutil

from sglmt.chaos.instance import ChaosInstance
from sglmt.status.snapshot import ProcessSnapshot

GAP_S = (0.5, 2.0)
READY_WITHIN_S = 120.0
READY_POLL_S = 0.1
SHARE_STOPPED = 0.3
CONTINUE_AFTER_S = 12.0  # a stopped process that was not replaced by then goes on, and counts as a failure


class Killer:
    """`hits` counts what was done, by role and signal; `not_replaced` names stopped processes nobody replaced."""

    def __init__(
        self,
        instance: ChaosInstance,
        seed: int,
        roles: list[str],
        before_worker_kill: Callable[[set[int]], None],
    ) -> None:
        """`before_worker_kill` gets the client ports a worker holds."""
        self._instance = instance
        self._dice = random.Random(seed)
        self._roles = roles
        self._first_round = sorted(set(roles))  # everybody is hit once before anybody is twice
        self._dice.shuffle(self._first_round)
        self._before_worker_kill = before_worker_kill
        self._stopped: dict[tuple[int, float], float] = {}  # (pid, start time) → since when
        self._scheduler_was_hit = False
        self.hits: Counter[str] = Counter()
        self.not_replaced: list[str] = []

    async def run(self, until_s: float) -> None:
        """Hit until monotonic `until_s`; at the end nothing is left stopped."""
        try:
            while time.monotonic() < until_s:
                await asyncio.sleep(self._dice.uniform(*GAP_S))
                self._check_stopped()
                role = self._first_round.pop() if self._first_round else self._dice.choice(self._roles)
                if role == "scheduler" and self._scheduler_was_hit:
                    await self.ready(time.monotonic() + READY_WITHIN_S)
                rows = [row for row in self._instance.rows(role) if row.pid is not None and row.state == "RUNNING"]
                if rows:
                    self._hit(self._dice.choice(rows))
            while self._stopped:
                await asyncio.sleep(READY_POLL_S)
                self._check_stopped()
        finally:
            for pid, started in self._stopped:
                _signal(pid, started, signal.SIGCONT)

    async def ready(self, deadline_s: float) -> None:
        """Wait until every process runs and nothing recovers. Raises TimeoutError with the states there are."""
        while True:
            snapshot = self._instance.snapshot()
            if snapshot.state == "running":
                return
            if time.monotonic() > deadline_s:
                states = ", ".join(f"{row.role}:{row.index} {row.state}" for row in snapshot.processes)
                raise TimeoutError(
                    f"not ready within {READY_WITHIN_S:g} s: {snapshot.state} ({snapshot.reason}): {states}"
                )
            await asyncio.sleep(READY_POLL_S)
            self._check_stopped()

    def _hit(self, row: ProcessSnapshot) -> None:
        assert row.pid is not None
        try:
            process = psutil.Process(row.pid)
            started = process.create_time()
        except psutil.NoSuchProcess:
            return
        if (row.pid, started) in self._stopped:
            return
        if row.role == "tokenizer_worker":
            self._kill_worker(process)
            self.hits["tokenizer_worker killed"] += 1
            return
        self._scheduler_was_hit |= row.role == "scheduler"
        if self._dice.random() < SHARE_STOPPED:
            if _signal(row.pid, started, signal.SIGSTOP):
                self._stopped[row.pid, started] = time.monotonic()
                self.hits[f"{row.role} stopped"] += 1
        elif _signal(row.pid, started, signal.SIGKILL):
            self.hits[f"{row.role} killed"] += 1

    def _kill_worker(self, process: psutil.Process) -> None:
        """Stopped first: so it is known exactly which connections it holds when it dies."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
            connections = process.net_connections("tcp")
            self._before_worker_kill({each.raddr.port for each in connections if each.raddr})
            process.kill()

    def _check_stopped(self) -> None:
        """Forget stopped processes that are gone: the supervisor has replaced them."""
        for (pid, started), since_s in list(self._stopped.items()):
            if not _lives(pid, started):
                del self._stopped[pid, started]
            elif time.monotonic() - since_s > CONTINUE_AFTER_S:
                self.not_replaced.append(f"pid {pid} stopped for {CONTINUE_AFTER_S:g} s")
                _signal(pid, started, signal.SIGCONT)
                del self._stopped[pid, started]


def _lives(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return bool(process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _signal(pid: int, started: float, number: signal.Signals) -> bool:
    """Signal a process if it is still the one that is meant."""
    if not _lives(pid, started):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False
