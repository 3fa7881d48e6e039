"""Ending requests by rid, or all: asked for until the scheduler has answered, carried out once. Pure.

An abort may be lost on its way, and so may the answer. So a worker numbers its aborts and repeats each one until it is
answered or given up; the scheduler remembers the numbers it has carried out, answers a repeated one, and does
nothing again: meanwhile another request may have the same rid. Each abort says up to which number none is open any
more, so that what is remembered stays small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

REPEAT_AFTER_S = 0.25


@dataclass
class OpenAbort:
    """One abort without an answer. `answered` is told True when it was carried out, False when it was given up."""

    number: int
    rid: str | None
    all_requests: bool
    deadline_s: float
    answered: Callable[[bool], object]
    sent_at_s: float = float("-inf")


class AskedAborts:
    """The worker's side: what it has asked for and not heard of."""

    def __init__(self) -> None:
        self._open: dict[int, OpenAbort] = {}
        self._last_number = 0

    @property
    def settled(self) -> int:
        """No abort up to this number is open."""
        return min(self._open, default=self._last_number + 1) - 1

    def ask(
        self, rid: str | None, all_requests: bool, deadline_s: float, answered: Callable[[bool], object]
    ) -> OpenAbort:
        """A new abort; it is due at once."""
        self._last_number += 1
        asked = OpenAbort(self._last_number, rid, all_requests, deadline_s, answered)
        self._open[asked.number] = asked
        return asked

    def due(self, now_s: float) -> list[OpenAbort]:
        """What is to be sent (again) now. What is past its deadline is given up."""
        for abort in [abort for abort in self._open.values() if now_s >= abort.deadline_s]:
            del self._open[abort.number]
            abort.answered(False)
        due = [abort for abort in self._open.values() if now_s - abort.sent_at_s >= REPEAT_AFTER_S]
        for abort in due:
            abort.sent_at_s = now_s
        return due

    def answer(self, number: int) -> None:
        """The scheduler has carried it out. Numbers that are not open are ignored: an answer may come twice."""
        abort = self._open.pop(number, None)
        if abort is not None:
            abort.answered(True)


class SeenAborts:
    """The scheduler's side: which numbers of which worker life were carried out."""

    def __init__(self) -> None:
        self._seen: dict[int, set[int]] = {}
        self._settled: dict[int, int] = {}

    def is_news(self, life: int, number: int, settled: int) -> bool:
        """Whether this one is to be carried out; asked once more it is no news. The life has no open abort up to
        `settled`: copies of those that are still under way are no news either, whoever has carried them out."""
        settled = max(settled, self._settled.get(life, 0))
        seen = {each for each in self._seen.get(life, ()) if each > settled}
        is_news = number > settled and number not in seen
        if is_news:
            seen.add(number)
        self._settled[life], self._seen[life] = settled, seen
        return is_news

    def lives(self) -> list[int]:
        """Worker lives that have asked for something."""
        return list(self._settled)

    def forget_life(self, life: int) -> None:
        """A worker life is gone."""
        self._settled.pop(life, None)
        self._seen.pop(life, None)
