"""Whether everything that ran when an earlier life of the scheduler ended continues. Owned by the scheduler.

A life that took over from another is *recovering* until every worker that served at its start has named its
requests, all of these have been submitted again, and each has given its worker something new (or has ended). Only
then may the scheduler die again without one request paying twice: what is left is in the state page, the
supervisor does not call the instance ready meanwhile, and workers send their lists often. A worker that dies, or is
ended because it hangs, is not waited for.
"""

from __future__ import annotations

from collections.abc import Container

from sglmt.delivery.keys import make_life, split_life
from sglmt.delivery.ledger import Ledger, Stage
from sglmt.ipc.state_page import Phase, SlotWord
from sglmt.messages.frame import Role
from sglmt.workers.child import ChildContext
from sglmt.workers.peers import worker_is_dead

_SERVING = (Phase.READY, Phase.STEPPING, Phase.DRAINING)


class Recovery:
    """Made before the scheduler reports ready, and published at once: no moment looks recovered that is not."""

    def __init__(self, child: ChildContext, ledger: Ledger, suspects: Container[int]) -> None:
        """`suspects`: keys that are to be tried one at a time, as long as they are."""
        self._slot = child.slot
        self._ledger = ledger
        self._suspects = suspects
        self._worker_is_dead = worker_is_dead(child.page)
        self._unheard: set[int] = set()
        self._is_over = child.generation <= 1  # the first life has nobody's requests
        if not self._is_over:
            self._unheard = {
                make_life(slot[SlotWord.INDEX], slot[SlotWord.GENERATION])
                for slot in child.page.slots_of(Role.TOKENIZER_WORKER)
                if slot[SlotWord.PHASE] in _SERVING
            }
            self._publish(0)

    @property
    def knows_all(self) -> bool:
        """Whether every request that a worker waits for is known here."""
        return not self._unheard and (self._is_over or not self._ledger.unsubmitted())

    def look(self, paused: bool) -> None:
        """Count what is left. Once there is nothing, recovery is over for this life. While generation is
        `paused`, requests stand still because they shall: they are waited for when it goes on."""
        if self._is_over:
            return
        self._unheard = {
            life
            for life in self._unheard
            if not self._ledger.has_listed(life) and not self._worker_is_dead(*split_life(life))
        }
        requests = self._ledger.unsubmitted() + (0 if paused else self._continuing())
        self._publish(requests)
        self._is_over = not paused and not requests and not self._unheard

    def _continuing(self) -> int:
        return sum(
            record.continues or (record.stage != Stage.FINISHED and record.key in self._suspects)
            for record in self._ledger.records.values()
        )

    def _publish(self, requests: int) -> None:
        self._slot[SlotWord.WORKERS_UNHEARD] = len(self._unheard)
        self._slot[SlotWord.RECOVERING] = requests + len(self._unheard)
