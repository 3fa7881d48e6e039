"""What every scenario gets: how often to repeat, where to write, the load client, and one measured load.

Runs in `scripts/bench`. Owns the working directory; servers are started by the scenarios themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sglmt.bench.cpu import BUSY_SHARE, Processes, Surroundings, cpu_by_role, own_cpu_s, spent
from sglmt.bench.figures import Result
from sglmt.bench.load_client import LoadClient, LoadReport, write_bodies

LOAD_WITHIN_S = 300.0


class Load(NamedTuple):
    """One load: what is sent and how."""

    path: str
    bodies: Path
    connections: int
    requests: int
    stream: bool


class Measured(NamedTuple):
    """What one load brought, and what it cost by role in CPU seconds."""

    report: LoadReport
    cpu_s: dict[str, float]
    others_share: float

    @property
    def total_cpu_s(self) -> float:
        """All processes together."""
        return sum(self.cpu_s.values())


@dataclass
class Bench:
    """Settings of one invocation."""

    client: LoadClient
    work_dir: Path
    repeats: int
    quick: bool
    say: Callable[[str], None]

    @property
    def runtime_dir(self) -> Path:
        """Where instances under measurement have their run directories."""
        return self.work_dir / "run"

    def scaled(self, full: int, quick: int) -> int:
        """A size: the full one, or that of a quick run."""
        return quick if self.quick else full

    def bodies(self, name: str, bodies: Sequence[dict[str, Any]]) -> Path:
        """Write request bodies to a file of that name."""
        return write_bodies(self.work_dir / f"{name}.jsonl", [msgspec.json.encode(body) for body in bodies])

    def measure(self, processes: Processes, port: int, load: Load) -> Measured:
        """Run one load and read the CPU before and after. Raises SglmtError when a request failed."""
        around, own_s, before = Surroundings.read(), own_cpu_s(), cpu_by_role(processes)
        report = self.client.run(
            port, load.path, load.bodies, connections=load.connections, requests=load.requests, stream=load.stream,
            timeout_s=LOAD_WITHIN_S,
        )  # fmt: skip
        cpu_s = spent(before, cpu_by_role(processes))
        known_s = sum(cpu_s.values()) + report.client_cpu_s + own_cpu_s() - own_s
        return Measured(report, cpu_s, around.others_share(Surroundings.read(), known_s))


def note_noise(result: Result, measured: Sequence[Measured]) -> None:
    """Record how much of the machine others used, and say so when it was much."""
    shares = [one.others_share for one in measured]
    for share in shares:
        result.add("others_cpu", "% of cores", 100 * share)
    if shares and max(shares) > BUSY_SHARE:
        result.notes.append(f"noisy machine: others used up to {100 * max(shares):.0f} % of the cores")
