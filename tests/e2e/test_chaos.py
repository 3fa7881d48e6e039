"""`scripts/chaos`, short: processes die all the time and no client notices."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


def chaos(*options: str) -> dict[str, Any]:
    """The report of a run that must be good."""
    done = subprocess.run(
        [sys.executable, "-m", "sglmt.chaos", *options], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-8000:]}"
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.timeout(170)
def test_thirty_seconds_of_killed_and_stopped_processes() -> None:
    report = chaos("--seconds", "30", "--streams", "64")
    assert report["ok"] is True
    assert report["requests"] > 64
    assert 0 < report["streamed"] < report["requests"]
    assert {name.split()[0] for name in report["hits"]} == {"detokenizer", "router", "scheduler"}
    assert report["counters"]["resumes"] > 0
    assert report["counters"]["resubmissions"] > 0


@pytest.mark.timeout(120)
def test_killed_workers_cost_exactly_their_own_requests() -> None:
    report = chaos("--seconds", "10", "--streams", "32", "--kill-workers", "--step-ms", "10")
    assert 0 < report["cut_by_worker_kills"] <= report["held_by_killed_workers"]
    assert (report["errors"], report["hangs"]) == (0, 0)
