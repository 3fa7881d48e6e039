"""The worker's side of delivery: the requests it still waits for, and when to say so. Pure.

The worker names its live requests to the scheduler when a peer's generation changed, and regularly while
there are any (and once more after the last one ended, so that the scheduler can forget; in case that list was
lost, now and then without any, and soon when rows still come). A scheduler that has taken over from a dead one
asks for lists through the state page until it knows that everything continues: then they come often, from every
worker. An answer that names a request as unknown makes the worker submit it again under a higher attempt, with
what it has received.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

LIST_INTERVAL_S = 1.0
IDLE_LIST_INTERVAL_S = 10.0
RECOVERY_LIST_INTERVAL_S = 0.1
MIN_LIST_GAP_S = 0.02


class PeerGenerations(NamedTuple):
    """The lives a worker depends on, as the state page shows them; 0: none now."""

    scheduler: int
    router: int
    detokenizers: tuple[int, ...]


class ListClock:
    """Decides when the next list is due. No clock of its own."""

    def __init__(self) -> None:
        self._number = 0
        self._last_sent_s = float("-inf")
        self._scheduler_may_know_some = False
        self._seen: PeerGenerations | None = None
        self._urgent = False

    def next_number(self) -> int:
        """The number of the list that is made now; rises with every list of this life."""
        self._number += 1
        return self._number

    def mark_urgent(self) -> None:
        """Something is missing: send a list soon."""
        self._urgent = True

    def mark_submitted(self) -> None:
        """A request was sent: the scheduler is to hear of its end also when it is over before any list names it."""
        self._scheduler_may_know_some = True

    def mark_late_row(self) -> None:
        """A row came for a request nobody waits for: the scheduler has not heard that it is over."""
        self._scheduler_may_know_some = True

    def is_due(self, now_s: float, peers: PeerGenerations, live: int, asked: bool = False) -> bool:
        """Whether a list should be sent now, with `live` requests waiting. `asked`: the scheduler wants to hear of
        every worker, of those without requests too."""
        if peers != self._seen:
            self._seen = peers
            self._urgent = True
        elapsed_s = now_s - self._last_sent_s
        if asked and elapsed_s >= RECOVERY_LIST_INTERVAL_S:
            return True
        if not live and not self._scheduler_may_know_some:
            self._urgent = False
            return elapsed_s >= IDLE_LIST_INTERVAL_S
        return elapsed_s >= LIST_INTERVAL_S or (self._urgent and elapsed_s >= MIN_LIST_GAP_S)

    def sent(self, now_s: float, live: int) -> None:
        """A list naming `live` requests was sent."""
        self._last_sent_s = now_s
        self._scheduler_may_know_some = live > 0
        self._urgent = False


class ResubmitBudget:
    """How often a request may be submitted again without a new token in between."""

    __slots__ = ("_limit", "_tokens_at_last", "resubmits")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tokens_at_last = 0
        self.resubmits = 0

    def spend(self, tokens: int) -> bool:
        """Count one resubmission with `tokens` received so far; False when the limit is passed."""
        if tokens > self._tokens_at_last:
            self.resubmits = 0
        self._tokens_at_last = tokens
        self.resubmits += 1
        return self.resubmits <= self._limit


def columns_of_list(rows: Iterable[tuple[int, int, int]]) -> tuple[list[int], list[int], list[int]]:
    """(keys, attempts, offsets) of (key, attempt, offset) rows."""
    keys: list[int] = []
    attempts: list[int] = []
    offsets: list[int] = []
    for key, attempt, offset in rows:
        keys.append(key)
        attempts.append(attempt)
        offsets.append(offset)
    return keys, attempts, offsets
