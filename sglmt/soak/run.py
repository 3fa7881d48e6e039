"""One soak from launch to verdict: load, hits and operations together, and what is left at the end.

The restart budget is raised for the run, and the report says so: the deaths are ours.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from sglmt.chaos.client import Client
from sglmt.chaos.instance import ChaosInstance
from sglmt.soak.belongings import Belongings
from sglmt.soak.hits import Hits
from sglmt.soak.load import Load

MAX_RESTARTS = 100_000
BACKOFF_MAX_S = 0.5
ATTEMPTS = 12
HEALTHY_WITHIN_S = 60.0
LOG_LINES_ON_FAILURE = 80


@dataclass(frozen=True)
class Settings:
    """What was asked for on the command line."""

    seconds: float
    workers: int
    rate: float
    seed: int

    def launch_options(self) -> list[str]:
        """Options of `sglmt launch`."""
        return [
            "--engine", "simulator", "--simulator-step-ms", "5", "--workers", str(self.workers), "--detokenizers", "2",
            "--max-restarts", str(MAX_RESTARTS), "--restart-backoff-max", str(BACKOFF_MAX_S),
            "--max-resubmits", "100",
        ]  # fmt: skip

    def operations(self) -> list[tuple[float, list[str]]]:
        """(share of the time, command): scaled up and down twice, two rolling restarts."""
        more, fewer = str(self.workers * 2), str(max(2, self.workers // 2))
        return [
            (0.1, ["scale", more]), (0.25, ["restart", "tokenizer_worker"]), (0.4, ["scale", fewer]),
            (0.55, ["scale", more]), (0.7, ["restart", "tokenizer_worker"]), (0.85, ["scale", str(self.workers)]),
        ]  # fmt: skip


def run(settings: Settings) -> dict[str, Any]:
    """Launch, hit, operate, stop; the report. Raises SglmtError when the instance does not start."""
    say(f"launching: sglmt launch {' '.join(settings.launch_options())} (restart budget raised for the run)")
    with ChaosInstance(settings.launch_options()) as instance:
        report = asyncio.run(_run(settings, instance))
        if not report["ok"]:
            say(instance.log_tail(LOG_LINES_ON_FAILURE))
    report["stopped_cleanly"] = instance.stopped_cleanly
    report["ok"] = report["ok"] and instance.stopped_cleanly
    return report


async def _run(settings: Settings, instance: ChaosInstance) -> dict[str, Any]:
    load = Load(Client(instance.url), settings.rate)
    await Load(Client(instance.url), settings.rate).run(time.monotonic() + 1.0)  # everything has been used once
    supervisor_pid, run_dir = instance.snapshot().pid, instance.run_dir
    before = Belongings.of(supervisor_pid, run_dir)
    say(f"{settings.seconds:g} s of hits; at the start {asdict(before)}")
    hits = Hits(instance, supervisor_pid, settings.seed, load.client.doom, lambda: load.answers)
    began_s = time.monotonic()
    until_s = began_s + settings.seconds
    done: list[str] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(until_s))
        group.create_task(hits.run(until_s))
        group.create_task(_operate(settings, instance, began_s, done))
    unhealthy = await _becomes_healthy(instance, settings.workers)
    after = Belongings.of(supervisor_pid, run_dir)
    snapshot = instance.snapshot()
    leaked = after.more_than(before)
    failed = sum(load.failures.values())
    refused = [line for line in done if not line.endswith(": done")]
    return {
        "ok": not (failed or hits.not_replaced or unhealthy or leaked or refused) and load.answers > 0,
        "seconds": round(time.monotonic() - began_s, 1),
        "restart_budget": MAX_RESTARTS,
        "workers": settings.workers,
        "rate": settings.rate,
        "seed": settings.seed,
        "sent": load.sent,
        "answers": load.answers,
        "in_killed_workers": load.explained,
        "unexplained_failures": failed,
        "failures": dict(load.failures),
        "longest_answer_s": round(load.longest_s, 1),
        "hits": dict(sorted(hits.counts.items())),
        "not_replaced": hits.not_replaced,
        "operations": done,
        "restarts": sum(row.restarts for row in snapshot.processes),
        "unhealthy": unhealthy,
        "before": asdict(before),
        "after": asdict(after),
        "leaked": leaked,
        "problems": load.problems,
    }


async def _operate(settings: Settings, instance: ChaosInstance, began_s: float, done: list[str]) -> None:
    """Each operation at its time; one that a hit made fail is asked for again."""
    for share, command in settings.operations():
        await asyncio.sleep(max(0.0, began_s + share * settings.seconds - time.monotonic()))
        for attempt in range(1, ATTEMPTS + 1):
            code, output = await asyncio.to_thread(instance.operate, command)
            if code == 0:
                break
            say(f"{' '.join(command)}, attempt {attempt}: {output.strip().splitlines()[-1:]}")
        done.append(f"{' '.join(command)} ({attempt} attempts): {'done' if code == 0 else f'exit code {code}'}")
        say(done[-1])


async def _becomes_healthy(instance: ChaosInstance, workers: int) -> str | None:
    """Why it is not healthy and idle at the end; None when it is."""
    until_s = time.monotonic() + HEALTHY_WITHIN_S
    while True:
        snapshot = instance.snapshot()
        busy = sum(row.in_flight for row in snapshot.processes) + snapshot.totals.running + snapshot.totals.queued
        rows = [row for row in snapshot.processes if row.role == "tokenizer_worker"]
        if snapshot.state == "running" and not busy and len(rows) == workers and snapshot.operation is None:
            await asyncio.sleep(1.0)  # the zygote, sockets and exits of what has just ended
            return None
        if time.monotonic() > until_s:
            return f"{snapshot.state} ({snapshot.reason}), {busy} in flight, {len(rows)} workers"
        await asyncio.sleep(0.2)


def say(text: str) -> None:
    """Progress goes to stderr: stdout has the report and nothing else."""
    print(text, file=sys.stderr, flush=True)
