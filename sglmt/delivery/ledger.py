"""The scheduler's side of delivery: every request its worker still names, and what was sent of it. Pure.

A record holds the request's whole output ids, so that any part can be sent again; it lives until the worker's
list no longer names it. Recovery is level-triggered: `reconcile` compares a worker's list with the records,
whatever was lost on the way, and says what to resume, what to forget and what nobody here knows.
"""

from __future__ import annotations

import enum
from array import array
from typing import NamedTuple

from sglmt.delivery.keys import counter_of, life_of

BEHIND_AFTER_S = 0.4


class Stage(enum.IntEnum):
    """How far a request has come in the scheduler."""

    QUEUED = 0
    RUNNING = 1
    FINISHED = 2


class Record:
    """One request. `payload` is the submission and `finish` the finish reason; the ledger reads neither."""

    __slots__ = (
        "attempt",
        "extra",
        "finish",
        "finish_sent",
        "group",
        "holds_rid",
        "key",
        "listed_at_s",
        "listed_offset",
        "moved",
        "output_ids",
        "payload",
        "plain",
        "prefix_tokens",
        "received",
        "rid",
        "sent",
        "sent_when_listed",
        "stage",
        "start_sent",
    )

    def __init__(self, key: int, attempt: int, rid: str, group: int, payload: object, prefix_ids: array[int]) -> None:
        self.key = key
        self.attempt = attempt
        self.rid = rid
        self.group = group
        self.holds_rid = False
        self.payload = payload
        self.stage = Stage.QUEUED
        self.output_ids = prefix_ids
        self.prefix_tokens = len(prefix_ids)
        self.received = 0  # tokens its worker has, as far as its lists have told
        self.sent = 0
        self.start_sent = False  # the row that starts the text was sent to the current detokenizer
        self.moved = False  # it has yielded something since it entered the engine
        self.plain = False  # it moved, all of it was sent, nothing goes with its ids: its next id is its next row
        self.finish: object | None = None
        self.finish_sent = False
        self.listed_offset = -1
        self.listed_at_s = 0.0
        self.sent_when_listed = -1
        self.extra: object | None = None

    def rewind(self) -> None:
        """Everything is to be sent again, from the first token."""
        self.plain = False
        self.sent = 0
        self.start_sent = False
        self.finish_sent = False
        self.listed_offset = -1
        self.sent_when_listed = -1

    @property
    def continues(self) -> bool:
        """Submitted again because an earlier life of the scheduler had it, and its worker has nothing new since.

        One that had yielded nothing and only waits to enter the engine is where it was, and does not count.
        """
        waits = self.stage == Stage.QUEUED and not self.prefix_tokens
        return self.attempt > 1 and self.received <= self.prefix_tokens and not waits

    def is_behind(self, offset: int, now_s: float) -> bool:
        """Note that the worker has `offset` tokens; True when nothing came through for `BEHIND_AFTER_S`
        although more had been sent. Rows under way are not behind."""
        progressed = offset != self.listed_offset or self.sent_when_listed <= offset
        if progressed:
            self.listed_offset = offset
            self.listed_at_s = now_s
            self.sent_when_listed = self.progress()
            return False
        return now_s - self.listed_at_s >= BEHIND_AFTER_S

    def progress(self) -> int:
        """A number that rises with everything sent, the finish included."""
        return self.sent + self.finish_sent


class Reconciliation(NamedTuple):
    """What a worker's list brought to light."""

    resume: list[Record]
    forget: list[Record]
    unknown: list[tuple[int, int]]  # (key, attempt) to be submitted again


class Ledger:
    """All records of one scheduler life, by key."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}
        self._by_life: dict[int, dict[int, Record]] = {}
        self._group_of_rid: dict[str, tuple[int, int]] = {}  # rid → (group key, records)
        self._list_numbers: dict[int, int] = {}
        self._unsubmitted: dict[int, set[int]] = {}  # life → keys it was asked to submit again

    def get(self, key: int, attempt: int) -> Record | None:
        """The record of exactly this submission."""
        record = self.records.get(key)
        return record if record is not None and record.attempt == attempt else None

    def rid_is_taken(self, rid: str, group: int) -> bool:
        """Whether a live request of another group has this rid."""
        owner = self._group_of_rid.get(rid)
        return owner is not None and owner[0] != group

    def keys_of_rid(self, rid: str) -> list[int]:
        """The live keys that carry exactly this rid."""
        owner = self._group_of_rid.get(rid)
        if owner is None:
            return []
        life = self._by_life.get(life_of(owner[0]), {})
        return [record.key for record in life.values() if record.rid == rid and record.stage != Stage.FINISHED]

    def is_news(self, key: int, attempt: int) -> bool:
        """False for a submission that was already seen, or replaced by a later one."""
        known = self.records.get(key)
        return known is None or attempt > known.attempt

    def add(self, record: Record) -> Record | None:
        """Take a submission that is news; returns the record it replaces."""
        replaced = self.remove(record.key)
        self.records[record.key] = record
        life = life_of(record.key)
        self._by_life.setdefault(life, {})[record.key] = record
        if life in self._unsubmitted:
            self._unsubmitted[life].discard(record.key)
        group, count = self._group_of_rid.get(record.rid, (record.group, 0))
        if group == record.group:
            self._group_of_rid[record.rid] = (group, count + 1)
            record.holds_rid = True
        return replaced

    def remove(self, key: int) -> Record | None:
        """Forget a request."""
        record = self.records.pop(key, None)
        if record is None:
            return None
        life = self._by_life[life_of(key)]
        del life[key]
        if not life:
            del self._by_life[life_of(key)]
        self.release_rid(record)
        return record

    def release_rid(self, record: Record) -> None:
        """The rid may be used again: its request has ended or is forgotten."""
        if not record.holds_rid:
            return
        record.holds_rid = False
        group, count = self._group_of_rid[record.rid]
        if count == 1:
            del self._group_of_rid[record.rid]
        else:
            self._group_of_rid[record.rid] = (group, count - 1)

    def lives(self) -> list[int]:
        """Worker lives something is known of."""
        return list(self._by_life.keys() | self._list_numbers.keys())

    def of_life(self, life: int) -> list[Record]:
        """All records of a worker life."""
        return list(self._by_life.get(life, {}).values())

    def forget_life(self, life: int) -> list[Record]:
        """A worker life is gone: forget its requests and return them."""
        records = self.of_life(life)
        for record in records:
            self.remove(record.key)
        self._list_numbers.pop(life, None)
        self._unsubmitted.pop(life, None)
        return records

    def has_listed(self, life: int) -> bool:
        """Whether a list of this worker life has come."""
        return life in self._list_numbers

    def unsubmitted(self) -> int:
        """Requests that lists have named, nobody here knows, and that have not been submitted again yet."""
        return sum(map(len, self._unsubmitted.values()))

    def reconcile(
        self, life: int, number: int, up_to_counter: int, listed: list[tuple[int, int, int]], now_s: float
    ) -> Reconciliation:
        """Compare a worker's list, (key, attempt, tokens received) each, with the records.

        Older lists than one already seen are ignored.
        """
        result = Reconciliation([], [], [])
        if number <= self._list_numbers.get(life, -1):
            return result
        self._list_numbers[life] = number
        records = self._by_life.get(life, {})
        named: set[int] = set()
        for key, attempt, offset in listed:
            named.add(key)
            record = records.get(key)
            if record is None or record.attempt < attempt:
                result.unknown.append((key, attempt))
                continue
            if record.attempt > attempt:
                continue
            record.received = offset
            if record.is_behind(offset, now_s):
                result.resume.append(record)
        for key, record in list(records.items()):
            if key not in named and counter_of(key) <= up_to_counter:
                result.forget.append(record)
                self.remove(key)
        self._unsubmitted[life] = {key for key, _ in result.unknown}
        return result
