"""Every second a random child gets SIGKILL, SIGSTOP or SIGTERM. Runs in the soak command, beside the load.

Children are those the status names, of whatever state; the zygote, which the others are forked from and which nobody
needs to serve, is hit too, but rarely: it is started again now and then only. A worker is stopped before it is killed,
and what it holds then is remembered: exactly those requests may fail. The scheduler is hit again only after answers
have come since the last time: a request that is in the engine at two deaths is taken for their cause.
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

EVERY_S = 1.0
REPLACED_WITHIN_S = 15.0
ANSWERS_BETWEEN_SCHEDULER_HITS = 200
ZYGOTE = "sglmt::zygote"
ZYGOTE_EVERY_S = 45.0
_SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)


class Hits:
    """`counts` by role and signal; `not_replaced`: stopped processes that nobody replaced."""

    def __init__(
        self,
        instance: ChaosInstance,
        supervisor_pid: int,
        seed: int,
        doom: Callable[[set[int]], int],
        answers: Callable[[], int],
    ) -> None:
        """`doom` is told the client ports a worker holds that is about to die; `answers`: how many have come."""
        self._instance = instance
        self._supervisor = psutil.Process(supervisor_pid)
        self._dice = random.Random(seed)
        self._doom = doom
        self._answers = answers
        self._stopped: dict[psutil.Process, float] = {}
        self._scheduler_not_before = 0
        self._zygote_not_before_s = 0.0
        self.counts: Counter[str] = Counter()
        self.not_replaced: list[str] = []

    async def run(self, until_s: float) -> None:
        """Hit until monotonic `until_s`; what was stopped has been replaced when this returns."""
        next_s = time.monotonic()
        while time.monotonic() < until_s:
            self._check_stopped()
            self._hit_somebody()
            next_s += EVERY_S
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        while self._stopped:
            await asyncio.sleep(0.1)
            self._check_stopped()

    def _hit_somebody(self) -> None:
        children = self._children()
        if not children:
            return
        role, process = self._dice.choice(children)
        if role == "scheduler":
            if self._answers() < self._scheduler_not_before:
                return
            self._scheduler_not_before = self._answers() + ANSWERS_BETWEEN_SCHEDULER_HITS
        number = self._dice.choice(_SIGNALS)
        with contextlib.suppress(psutil.NoSuchProcess):
            if role == "tokenizer_worker" and number is not signal.SIGTERM:
                process.suspend()
                if not _stands_still(process):
                    return
                self._doom({each.raddr.port for each in process.net_connections("tcp") if each.raddr})
            os.kill(process.pid, number)
            if number is signal.SIGSTOP:
                self._stopped[process] = time.monotonic()
            self.counts[f"{role} {number.name}"] += 1
            if role == "zygote":
                self._zygote_not_before_s = time.monotonic() + ZYGOTE_EVERY_S

    def _children(self) -> list[tuple[str, psutil.Process]]:
        rows = [(row.role, row.pid) for row in self._instance.snapshot().processes if row.role != "supervisor"]
        found: list[tuple[str, psutil.Process]] = []
        for role, pid in rows:
            with contextlib.suppress(psutil.NoSuchProcess):
                if pid is not None and (process := psutil.Process(pid)) not in self._stopped:
                    found.append((role, process))
        if time.monotonic() < self._zygote_not_before_s:
            return found
        for child in self._supervisor.children():
            with contextlib.suppress(psutil.Error):
                if child.cmdline()[:1] == [ZYGOTE] and child not in self._stopped:
                    found.append(("zygote", child))
        return found

    def _check_stopped(self) -> None:
        for process, since_s in list(self._stopped.items()):
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                del self._stopped[process]
            elif time.monotonic() - since_s > REPLACED_WITHIN_S:
                title = " ".join(process.cmdline()[:1])
                del self._stopped[process]
                if title != ZYGOTE:  # nobody needs it until somebody is started
                    self.not_replaced.append(f"{title} (pid {process.pid}) stopped for {REPLACED_WITHIN_S:g} s")
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()


def _stands_still(process: psutil.Process) -> bool:
    """Wait until a stopped process has really stopped: until then it could accept another connection."""
    until_s = time.monotonic() + 1.0
    while process.status() != psutil.STATUS_STOPPED:
        if time.monotonic() > until_s:
            process.resume()
            return False
        time.sleep(0.0005)
    return True
