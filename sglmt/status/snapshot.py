"""The snapshot of one instance: the JSON of `sglmt status --json`, as types. Pure data.

Made by the supervisor, sent over the control socket, rendered by `sglmt.status`. Fields are only ever added
within a schema version.
"""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA_VERSION = 1

# recovering: requests are taken and served, those the engine had when it died do not all continue yet.
# stale: its owner is gone, only its files are left. unreachable: the owner runs and does not answer.
InstanceState = Literal["starting", "running", "degraded", "recovering", "draining", "stopping", "stale", "unreachable"]


class LastExit(msgspec.Struct, frozen=True, kw_only=True):
    """How the previous life of a process ended."""

    generation: int
    exit_code: int | None
    signal: str | None
    reason: str
    at_unix_s: float


class ProcessSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One row: a (role, index) and its current life. `state` uses the lifecycle's words."""

    role: str
    index: int
    pid: int | None
    generation: int
    state: str
    restarts: int
    uptime_s: float
    rss_bytes: int | None
    pss_bytes: int | None
    cpu_percent: float | None
    heartbeat_age_ms: float | None
    in_flight: int
    phase: str | None = None
    connections: int = 0
    next_try_in_s: float | None = None
    last_exit: LastExit | None = None
    counters: dict[str, int] = {}


class WorkersSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    requested: int
    ready: int


class SegmentSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    bytes: int
    path: str = ""  # in /dev/shm, or in the run directory where /dev/shm cannot be used


class TotalsSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Whole instance, dead lives folded in. Rates are over the last few seconds."""

    requests_total: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    running: int = 0
    queued: int = 0
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    ttft_ms_mean: float | None = None
    counters: dict[str, int] = {}


class InstanceSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything `status` knows of one instance."""

    name: str
    instance_id: str
    pid: int
    state: InstanceState
    url: str
    engine: str
    model: str
    mode: Literal["single", "multi"]
    workers: WorkersSnapshot
    shm: SegmentSnapshot | None
    processes: list[ProcessSnapshot]
    reason: str | None = None  # why it is not simply running
    operation: str | None = None  # the change under way: `reload: 2 of 4 workers replaced`
    uptime_s: float = 0.0
    version: str = ""
    simulator: bool = False
    totals: TotalsSnapshot = TotalsSnapshot()


class StatusDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The whole output of `status --json`."""

    schema_version: int = SCHEMA_VERSION
    instances: list[InstanceSnapshot]
