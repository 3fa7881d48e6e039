"""Aborts by rid, or of all requests, as the scheduler carries them out and answers them. Owned by the scheduler.

One that comes while this life does not know all requests yet (it has taken over from a dead one) stands until it does:
it ends what it names when that is submitted again, and is answered only then.
"""

from __future__ import annotations

from collections.abc import Callable

from sglmt.delivery.aborts import SeenAborts
from sglmt.delivery.keys import split_life
from sglmt.messages.to_scheduler import AbortReq
from sglmt.messages.to_worker import AbortsDone
from sglmt.workers.child import ChildContext
from sglmt.workers.peers import worker_is_dead
from sglmt.workers.recovery import Recovery
from sglmt.workers.request_book import RequestBook


class Aborts:
    """Every numbered abort once, and an answer to each copy of it."""

    def __init__(
        self, child: ChildContext, book: RequestBook, recovery: Recovery, reply: Callable[[int, AbortsDone], None]
    ) -> None:
        """`reply(life, message)` sends to a worker; it may be lost."""
        self._book = book
        self._recovery = recovery
        self._reply = reply
        self._worker_is_dead = worker_is_dead(child.page)
        self._seen = SeenAborts()

    def take(self, request: AbortReq) -> None:
        """An abort has come, perhaps not for the first time. One without a number wants no answer."""
        if not request.number:
            self._book.abort(request)
            return
        if self._worker_is_dead(*split_life(request.life)):
            return  # nobody waits for it, and its copies could not be told from news
        if self._seen.is_news(request.life, request.number, request.settled):
            self._book.abort(request)
            if not self._recovery.knows_all:
                self._book.standing.append(request)
        if not any(_is_same(request, standing) for standing in self._book.standing):
            self._reply(request.life, AbortsDone(numbers=[request.number]))

    def look(self) -> None:
        """Answer what has stood until all requests were known; forget workers that are gone."""
        if self._book.standing and self._recovery.knows_all:
            for request in self._book.standing:
                if not self._worker_is_dead(*split_life(request.life)):
                    self._reply(request.life, AbortsDone(numbers=[request.number]))
            self._book.standing.clear()
        for life in self._seen.lives():
            if self._worker_is_dead(*split_life(life)):
                self._seen.forget_life(life)


def _is_same(one: AbortReq, other: AbortReq) -> bool:
    return (one.life, one.number) == (other.life, other.number)
