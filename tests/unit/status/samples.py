"""Snapshots to render: one of each kind of trouble."""

from __future__ import annotations

from typing import Any

from sglmt.status.snapshot import (
    InstanceSnapshot,
    LastExit,
    ProcessSnapshot,
    SegmentSnapshot,
    TotalsSnapshot,
    WorkersSnapshot,
)


def process(role: str, index: int = 0, state: str = "RUNNING", **changes: Any) -> ProcessSnapshot:
    """One row; a running process unless told otherwise."""
    fields: dict[str, Any] = {
        "role": role, "index": index, "pid": 4_190_000 + index, "generation": 1, "state": state, "restarts": 0,
        "uptime_s": 192.3, "rss_bytes": 99 << 20, "pss_bytes": 61 << 20, "cpu_percent": 3.2,
        "heartbeat_age_ms": 12.0, "in_flight": 3,
    }  # fmt: skip
    return ProcessSnapshot(**{**fields, **changes})


def killed(index: int = 1, state: str = "BACKOFF") -> ProcessSnapshot:
    """A worker that was killed and waits for its next try."""
    last = LastExit(
        generation=3, exit_code=None, signal="SIGKILL", reason="killed by SIGKILL, perhaps out of memory",
        at_unix_s=1.0,
    )  # fmt: skip
    return process(
        "tokenizer_worker", index, state, pid=None, restarts=3, next_try_in_s=1.3 if state == "BACKOFF" else None,
        last_exit=last,
    )  # fmt: skip


def instance(**changes: Any) -> InstanceSnapshot:
    """An instance with all roles, two workers, one of them down."""
    rows = [process("supervisor"), process("router"), process("scheduler", pss_bytes=1500 << 20)]
    rows += [process("detokenizer"), process("tokenizer_worker"), killed()]
    fields: dict[str, Any] = {
        "name": "demo", "instance_id": "00c0ffee", "pid": 4_190_000, "state": "degraded",
        "url": "http://127.0.0.1:31000", "engine": "openvino", "model": "/models/SmolLM2-135M-Instruct.Q4_1.gguf",
        "mode": "multi", "workers": WorkersSnapshot(requested=2, ready=1), "processes": rows,
        "shm": SegmentSnapshot(name="multi_tokenizer_args_1_00", bytes=262144), "uptime_s": 3723.0,
        "reason": "tokenizer_worker:1 is BACKOFF",
        "totals": TotalsSnapshot(requests_per_s=1.2, tokens_per_s=12800.0, ttft_ms_mean=41.2, running=3),
    }  # fmt: skip
    return InstanceSnapshot(**{**fields, **changes})
