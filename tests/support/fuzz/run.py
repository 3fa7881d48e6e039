"""The run itself: launch, ask, judge, sum up. `python -m tests.support.fuzz.run --requests 10000 [--control]`."""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.fuzz.client import Client
from tests.support.fuzz.judge import HANG_S, complaint
from tests.support.fuzz.requests import Request, draw
from tests.support.instance import Instance

LEAVING_SHARE = 0.03  # requests whose client does not wait for the answer
LAUNCH_OPTIONS = (
    "--workers", "2", "--simulator-step-ms", "0", "--context-length", "256",
    "--max-request-bytes", "65536", "--max-prompts-per-request", "32",
)  # fmt: skip
SHOWN_COMPLAINTS = 40


@dataclass
class Findings:
    """What a run found."""

    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    complaints: list[str] = field(default_factory=list)
    left: int = 0
    slowest_s: float = 0.0

    def __str__(self) -> str:
        counts = ", ".join(f"{status}: {count}" for status, count in sorted(self.statuses.items()))
        answered = f"{self.statuses.total()} requests answered ({counts}), slowest {self.slowest_s * 1000:.0f} ms"
        return f"{answered}; {self.left} clients did not wait"


async def fuzz(url: str, requests: int, seed: int, control: bool, connections: int) -> Findings:
    """Send that many requests over that many connections."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    findings = Findings()
    rng = random.Random(seed)
    queue = iter(range(requests))

    async def work() -> None:
        client = Client(parts.hostname, parts.port, within_s=2 * HANG_S)
        for _ in queue:
            request = draw(rng, control)
            if rng.random() < LEAVING_SHARE:
                findings.left += 1
                await client.leave(request, rng.choice((0.5, 0.9, 1.0)))
            else:
                await _one(client, request, findings)
        client.close()

    await asyncio.gather(*(work() for _ in range(connections)))
    return findings


async def _one(client: Client, request: Request, findings: Findings) -> None:
    answer = await client.ask(request)
    findings.statuses[answer.status] += 1
    findings.slowest_s = max(findings.slowest_s, answer.took_s)
    wrong = complaint(request, answer)
    if wrong is not None:
        told = f"{wrong} ({answer.status}): {request.method} {request.path} {request.body[:300]!r}"
        findings.complaints.append(f"{told} → {answer.body[-200:]!r}")


def judge_instance(instance: Instance) -> list[str]:
    """What must hold of the processes afterwards: nobody died, nobody holds a request."""
    snapshot = instance.snapshot()
    wrong = [
        f"{row['role']}:{row['index']} restarted {row['restarts']} times ({row['last_exit']})"
        for row in snapshot["processes"]
        if row["restarts"]
    ]
    if snapshot["state"] != "running":
        wrong.append(f"the instance is {snapshot['state']}: {snapshot['reason']}")
    for name in ("unroutable", "undecodable"):
        if snapshot["totals"]["counters"].get(name):
            wrong.append(f"{name}: {snapshot['totals']['counters'][name]}")
    deadline_s = time.monotonic() + 5.0
    while held := sum(row["in_flight"] for row in instance.processes()):
        if time.monotonic() > deadline_s:
            wrong.append(f"{held} requests are still held")
            break
        time.sleep(0.1)
    return wrong


def main() -> int:
    """Exit code 1 when anything was wrong."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--control", action="store_true", help="control routes instead of all others")
    parser.add_argument("--engine", default="simulator")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sglmt-fuzz-") as directory, Instance(Path(directory)) as instance:
        instance.launch("--engine", options.engine, *LAUNCH_OPTIONS)
        started_s = time.monotonic()
        findings = asyncio.run(fuzz(instance.url, options.requests, options.seed, options.control, options.connections))
        print(f"{findings}; {options.requests / (time.monotonic() - started_s):.0f} requests a second")
        wrong = [*findings.complaints, *judge_instance(instance)]
    for line in wrong[:SHOWN_COMPLAINTS]:
        print(f"WRONG {line}")
    print(f"{len(wrong)} wrong; seed {options.seed}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
