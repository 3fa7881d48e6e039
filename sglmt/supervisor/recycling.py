"""Which worker has served long enough, or has grown too large. Pure; used by the supervisor.

A worker's lifetime is shortened by a random share of at most `JITTER`, drawn once a life, so that workers that
started together do not go together. Memory counts when it is above the limit in `SAMPLES` looks in a row: a single
large request is no reason. A worker that has just started is left alone for `YOUNG_S`, so that a limit below
what a fresh worker needs costs a replacement now and then, not a storm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

EVERY_S = 1.0
SAMPLES = 3
JITTER = 0.2
YOUNG_S = 15.0


@dataclass(frozen=True)
class WorkerSample:
    """One look at a serving worker. `life` is its name and generation; `rss_bytes` None: could not be read."""

    name: str
    life: tuple[str, int]
    ready_at_s: float
    rss_bytes: int | None


class Recycler:
    """Remembers what it saw of each life."""

    def __init__(self, rand: Callable[[], float], young_s: float = YOUNG_S) -> None:
        """`rand` draws from [0, 1)."""
        self._rand = rand
        self._young_s = young_s
        self._share: dict[tuple[str, int], float] = {}
        self._above: dict[tuple[str, int], int] = {}

    def look(
        self, samples: Sequence[WorkerSample], now_s: float, max_rss_bytes: int | None, max_lifetime_s: float | None
    ) -> list[tuple[str, str]]:
        """(name, reason) of every worker that is to be replaced. Call every `EVERY_S` with all serving workers."""
        lives = {sample.life for sample in samples}
        self._share = {life: share for life, share in self._share.items() if life in lives}
        self._above = {life: count for life, count in self._above.items() if life in lives}
        due: list[tuple[str, str]] = []
        for sample in samples:
            reason = self._too_old(sample, now_s, max_lifetime_s) or self._too_large(sample, now_s, max_rss_bytes)
            if reason is not None:
                due.append((sample.name, reason))
        return due

    def _too_old(self, sample: WorkerSample, now_s: float, max_lifetime_s: float | None) -> str | None:
        if sample.life not in self._share:
            self._share[sample.life] = 1.0 - JITTER * self._rand()
        age_s = now_s - sample.ready_at_s
        if max_lifetime_s is None or age_s < max_lifetime_s * self._share[sample.life]:
            return None
        return f"has served {age_s:.0f} s (--max-worker-lifetime {max_lifetime_s:g})"

    def _too_large(self, sample: WorkerSample, now_s: float, max_rss_bytes: int | None) -> str | None:
        large = max_rss_bytes is not None and sample.rss_bytes is not None and sample.rss_bytes > max_rss_bytes
        if not large or now_s - sample.ready_at_s < self._young_s:
            self._above[sample.life] = 0
            return None
        count = self._above[sample.life] = self._above.get(sample.life, 0) + 1
        if count < SAMPLES:
            return None
        assert sample.rss_bytes is not None
        assert max_rss_bytes is not None
        return f"holds {sample.rss_bytes / 2**20:.0f} MiB (--max-worker-rss {max_rss_bytes / 2**20:.0f} MiB)"
