"""The state page as the supervisor uses it: hands out slots, publishes lives, keeps the totals of the dead.

Runs in the supervisor, which is the only writer of the header, the generations and the first words of a slot.
"""

from __future__ import annotations

from collections.abc import Iterable

from sglmt.errors import ResourceError
from sglmt.ipc.state_page import FIRST_COUNTER, SLOT_WORDS, Slot, SlotWord, StatePage
from sglmt.messages.frame import Role

COUNTERS = tuple(word for word in SlotWord if FIRST_COUNTER <= word < SlotWord.TTFT_BUCKETS)


class SlotTable:
    """Slots of one page. A slot belongs to one process life from before its spawn until it is reaped."""

    def __init__(self, page: StatePage) -> None:
        self._page = page
        self._free = list(range(page.slots - 1, -1, -1))
        self._totals: dict[Role, list[int]] = {role: [0] * (SLOT_WORDS - FIRST_COUNTER) for role in Role}

    def occupy(self, role: Role, index: int, generation: int) -> Slot:
        """A fresh slot for a life about to be spawned; the life is published as the current one.

        Raises ResourceError when the page is full.
        """
        if not self._free:
            raise ResourceError(f"state page: all {self._page.slots} slots are taken")
        slot = self._page.slot(self._free.pop())
        slot.clear()
        slot[SlotWord.ROLE] = role
        slot[SlotWord.INDEX] = index
        slot[SlotWord.GENERATION] = generation
        slot[SlotWord.OCCUPIED] = 1
        self._page.publish_generation(role, index, generation)
        return slot

    def release(self, slot: Slot) -> None:
        """The life has been reaped (or was never spawned): fold its counters into the totals, free the slot."""
        role, index = Role(slot[SlotWord.ROLE]), slot[SlotWord.INDEX]
        totals = self._totals[role]
        for offset in range(SLOT_WORDS - FIRST_COUNTER):
            totals[offset] += slot[FIRST_COUNTER + offset]
        if self._page.generation(role, index) == slot[SlotWord.GENERATION]:
            self._page.publish_generation(role, index, 0)
        slot.clear()
        self._free.append(slot.number)

    def total(self, role: Role, word: SlotWord, living: Iterable[Slot]) -> int:
        """A counter of a role: the dead, and those of `living` that have this role."""
        alive = sum(slot[word] for slot in living if slot[SlotWord.ROLE] == role)
        return self._totals[role][word - FIRST_COUNTER] + alive
