"""The state page as the supervisor uses it: hands out slots, publishes lives, keeps the totals of the dead.

Runs in the supervisor, which is the only writer of the header, the generations, the first words of a slot and the
totals. Whoever reads counters (any worker, for /metrics) sees a dead life either in its slot or in the totals: the
sequence word in the header is odd while it moves from the one to the other.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglmt.errors import ResourceError
from sglmt.ipc.state_page import FIRST_COUNTER, SLOT_WORDS, HeaderWord, Slot, SlotWord, StatePage
from sglmt.messages.frame import Role

COUNTERS = tuple(word for word in SlotWord if FIRST_COUNTER <= word < SlotWord.TTFT_BUCKETS)


class SlotTable:
    """Slots of one page. A slot belongs to one process life from before its spawn until it is reaped."""

    def __init__(self, page: StatePage) -> None:
        self._page = page
        self._free = list(range(page.slots - 1, -1, -1))

    def occupy(self, role: Role, index: int, generation: int) -> Slot:
        """A fresh slot for a life about to be spawned; the life is published as the current one.

        Raises ResourceError when the page is full.
        """
        if not self._free:
            raise ResourceError(f"state page: all {self._page.slots} slots are taken")
        slot = self._page.occupy(self._free.pop(), role, index, generation)
        self._page.publish_generation(role, index, generation)
        return slot

    def release(self, slot: Slot) -> None:
        """The life has been reaped (or was never spawned): fold its counters into the totals, free the slot.

        Another life of the same index that is left (a rolling replacement that failed) is published again.
        """
        role, index = Role(slot[SlotWord.ROLE]), slot[SlotWord.INDEX]
        if self._page.generation(role, index) == slot[SlotWord.GENERATION]:
            others = [life for at, life in self._page.live(role) if at == index and life != slot[SlotWord.GENERATION]]
            self._page.publish_generation(role, index, max(others, default=0))
        totals, counters = self._page.totals(role), slot.values()
        sequence = self._page.header(HeaderWord.FOLD_SEQUENCE)
        self._page.set_header(HeaderWord.FOLD_SEQUENCE, sequence + 1)
        for word in range(FIRST_COUNTER, SLOT_WORDS):
            if counters[word]:
                totals[word] += counters[word]
        slot.clear()
        self._page.set_header(HeaderWord.FOLD_SEQUENCE, sequence + 2)
        self._free.append(slot.number)

    def count_restarts(self, role: Role, restarts: int) -> None:
        """This many lives of a role were started because another one died."""
        self._page.totals(role).add(SlotWord.RESTARTS, restarts)

    def total(self, role: Role, word: SlotWord, living: Iterable[Slot]) -> int:
        """A counter of a role: the dead, and those of `living` that have this role."""
        alive = sum(slot[word] for slot in living if slot[SlotWord.ROLE] == role)
        return self._page.totals(role)[word] + alive
