"""Which waiting request enters the engine next. Pure; owned by the scheduler.

Ordinary requests go by priority, then in order of arrival. *Suspects* (they had yielded nothing when an
earlier life of the engine died) go one at a time, after everything that runs has moved: if the engine dies
again, it is known of whom.
"""

from __future__ import annotations

import heapq
from collections import deque

from sglmt.delivery.ledger import Record


class AdmissionQueue:
    """Waiting requests. Removal is lazy: a discarded key is skipped when its turn comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Record]] = []
        self._suspects: deque[Record] = deque()
        self._waiting: dict[int, Record] = {}
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, record: Record, priority: int, suspect: bool) -> None:
        """Queue a request; a higher `priority` goes first."""
        self._waiting[record.key] = record
        if suspect:
            self._suspects.append(record)
            return
        self._sequence += 1
        heapq.heappush(self._heap, (-priority, self._sequence, record))

    def discard(self, key: int) -> None:
        """Forget a waiting request."""
        self._waiting.pop(key, None)

    def pop(self) -> Record | None:
        """The next ordinary request, None when there is none."""
        while self._heap:
            record = heapq.heappop(self._heap)[2]
            if self._waiting.get(record.key) is record:
                del self._waiting[record.key]
                return record
        return None

    def pop_suspect(self) -> Record | None:
        """The next suspect, None when there is none."""
        while self._suspects:
            record = self._suspects.popleft()
            if self._waiting.get(record.key) is record:
                del self._waiting[record.key]
                return record
        return None

    def has_suspects(self) -> bool:
        """Whether any suspect waits."""
        return any(self._waiting.get(record.key) is record for record in self._suspects)
