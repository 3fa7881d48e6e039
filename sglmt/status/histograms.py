"""Latency histograms in the state page: one word a bucket, bucket bounds shared by writers and readers. Pure."""

from __future__ import annotations

from bisect import bisect_left
from typing import Protocol

# Upper bounds in microseconds: 31 buckets and one for everything above.
LATENCY_BUCKETS = (
    500, 1_000, 1_500, 2_000, 3_000, 5_000, 7_500, 10_000, 15_000, 20_000, 25_000, 30_000, 40_000, 50_000, 75_000,
    100_000, 150_000, 200_000, 300_000, 500_000, 750_000, 1_000_000, 1_500_000, 2_000_000, 3_000_000, 5_000_000,
    10_000_000, 20_000_000, 30_000_000, 60_000_000, 120_000_000,
)  # fmt: skip


class Words(Protocol):
    """A slot of the state page."""

    def add(self, word: int, amount: int = 1) -> None:
        """Add to a counter word."""
        ...


def observe(slot: Words, first_word: int, value_us: int, bounds_us: tuple[int, ...]) -> None:
    """Count one value in the histogram that begins at `first_word`."""
    slot.add(first_word + bisect_left(bounds_us, value_us))


class Tally:
    """Counts many values of one histogram, most of which fall into the same bucket: one look-up a run of them."""

    __slots__ = ("_bounds_us", "_bucket", "_count", "_first_word", "_high_us", "_low_us", "_slot", "sum_us")

    def __init__(self, slot: Words, first_word: int, bounds_us: tuple[int, ...]) -> None:
        self._slot = slot
        self._first_word = first_word
        self._bounds_us = bounds_us
        self._low_us, self._high_us = 0, -1  # no bucket yet
        self._bucket = 0
        self._count = 0
        self.sum_us = 0

    def add(self, value_us: int) -> None:
        """Count one value."""
        self.add_many(value_us, 1)

    def add_many(self, value_us: int, times: int) -> None:
        """Count one value several times."""
        if not times:
            return
        self.sum_us += value_us * times
        if self._low_us < value_us <= self._high_us:
            self._count += times
            return
        self.flush()
        bounds_us, bucket = self._bounds_us, bisect_left(self._bounds_us, value_us)
        self._bucket = bucket
        self._low_us = bounds_us[bucket - 1] if bucket else -1
        self._high_us = bounds_us[bucket] if bucket < len(bounds_us) else 1 << 62
        self._count = times

    def flush(self) -> None:
        """Write what was counted."""
        if self._count:
            self._slot.add(self._first_word + self._bucket, self._count)
            self._count = 0
