"""`scripts/mixed`, short: requests of every kind at once, every answer the one computed without a server."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


@pytest.mark.timeout(120)
def test_six_hundred_mixed_requests() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sglmt.chaos.mixed", "--requests", "600", "--seed", "3", "--tolerance-kib", "8192"],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-8000:]}"
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["ok"] is True
    assert sum(report["actions"].values()) == 600
    assert set(report["actions"]) == {"answer", "abort", "leave", "duplicate", "embed", "refused"}
    kinds = {f"{mode} {kind}" for mode in ("streamed", "whole") for kind in ("chats", "completions", "generates")}
    assert kinds <= set(report["outcomes"])
    assert report["held_after_each_half"] == [{}, {}]
    assert len(report["memory_growth_kib"]) >= 9  # supervisor, zygote, router, scheduler, everybody else
