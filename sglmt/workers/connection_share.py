"""How many of the clients' connections are a worker's share. Runs in tokenizer workers; reads the state page.

Connections are shared among the workers that serve and whose loops turn: by those that are open, and by those that were
accepted in the last moments (many short ones come faster than they close). Nothing is looked up while nobody connects.
"""

from __future__ import annotations

import time

from sglmt.ipc.state_page import Slot, SlotWord, StatePage
from sglmt.messages.frame import Role

LOOK_EVERY_NS = 50_000_000
SILENT_NS = 500_000_000  # a worker without a heartbeat for so long takes no connections: nobody waits for it
RECENT_NS = 1_000_000_000


class ConnectionShare:
    """This worker's connections beside those of the others; `slot` is its own."""

    def __init__(self, page: StatePage, slot: Slot) -> None:
        self._page = page
        self._slot = slot
        self._others_and_self = [slot]
        self._looked_ns = 0
        self._accepted_before: dict[tuple[int, int], int] = {}
        self._recent_since_ns = 0

    def count(self, open_connections: int, accepted: int) -> None:
        """Publish how many connections this worker holds, and how many it has accepted in all."""
        self._slot[SlotWord.CONNECTIONS] = open_connections
        self._slot[SlotWord.CONNECTIONS_TOTAL] = accepted

    def open_connections(self) -> list[int]:
        """Of every worker among whom connections are shared, this one included."""
        self._look(time.monotonic_ns())
        return [slot[SlotWord.CONNECTIONS] for slot in self._others_and_self]

    def recent_accepts(self) -> tuple[int, float]:
        """(this worker's, mean of all) accepted connections in the last moments."""
        self._look(time.monotonic_ns())
        own, total = 0, 0
        for slot in self._others_and_self:
            accepted = slot[SlotWord.CONNECTIONS_TOTAL]
            recent = accepted - self._accepted_before.setdefault(_life_of(slot), accepted)
            total += recent
            if slot.number == self._slot.number:
                own = recent
        return own, total / len(self._others_and_self)

    def _look(self, now_ns: int) -> None:
        if now_ns - self._looked_ns < LOOK_EVERY_NS:
            return
        self._looked_ns = now_ns
        serving = [
            slot
            for slot in self._page.serving_slots(Role.TOKENIZER_WORKER)
            if slot.number == self._slot.number or now_ns - slot[SlotWord.HEARTBEAT_NS] < SILENT_NS
        ]
        self._others_and_self = serving or [self._slot]
        if now_ns - self._recent_since_ns >= RECENT_NS:
            self._recent_since_ns = now_ns
            self._accepted_before = {_life_of(slot): slot[SlotWord.CONNECTIONS_TOTAL] for slot in serving}


def _life_of(slot: Slot) -> tuple[int, int]:
    """Slots are used again."""
    return slot.number, slot[SlotWord.GENERATION]
