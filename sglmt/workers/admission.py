"""Which waiting request enters the engine next. Pure; owned by the scheduler.

Ordinary requests go by priority, then those that continue, then in order of arrival. *Suspects* (they had
yielded nothing when an earlier life of the engine died) go one at a time, after everything that runs has moved: if
the engine dies again, it is known of whom. New requests do not overtake a suspect, or one would never have its turn
on a busy server.
"""

from __future__ import annotations

import heapq
from collections import deque

from sglmt.delivery.ledger import Record

_FEW = 64  # discarded entries that are not worth a look


class AdmissionQueue:
    """Waiting requests. Removal is lazy: a discarded key is skipped when its turn comes, or left out when most are."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, bool, int, Record]] = []
        self._suspects: deque[tuple[int, Record]] = deque()
        self.waiting: dict[int, Record] = {}  # only to be looked at
        self._sequence = 0

    def __len__(self) -> int:
        return len(self.waiting)

    def push(self, record: Record, priority: int, suspect: bool) -> None:
        """Queue a request; a higher `priority` goes first."""
        self.waiting[record.key] = record
        self._sequence += 1
        if suspect:
            self._suspects.append((self._sequence, record))
            return
        heapq.heappush(self._heap, (-priority, record.attempt == 1, self._sequence, record))

    def discard(self, key: int) -> None:
        """Forget a waiting request."""
        self.waiting.pop(key, None)
        if len(self._heap) + len(self._suspects) > 2 * len(self.waiting) + _FEW:
            self._heap = [entry for entry in self._heap if self._waits(entry[-1])]
            heapq.heapify(self._heap)
            self._suspects = deque(entry for entry in self._suspects if self._waits(entry[-1]))

    def _waits(self, record: Record) -> bool:
        return self.waiting.get(record.key) is record

    def pop(self) -> Record | None:
        """The next ordinary request; None when there is none, or a suspect was here before it."""
        while self._heap:
            _, is_new, sequence, record = self._heap[0]
            if self._waits(record):
                if is_new and self._first_suspect_came_before(sequence):
                    return None
                del self.waiting[record.key]
                heapq.heappop(self._heap)
                return record
            heapq.heappop(self._heap)
        return None

    def _first_suspect_came_before(self, sequence: int) -> bool:
        while self._suspects and not self._waits(self._suspects[0][1]):
            self._suspects.popleft()
        return bool(self._suspects) and self._suspects[0][0] < sequence

    def pop_suspect(self) -> Record | None:
        """The next suspect, None when there is none."""
        while self._suspects:
            record = self._suspects.popleft()[1]
            if self._waits(record):
                del self.waiting[record.key]
                return record
        return None
