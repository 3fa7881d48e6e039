"""Talking to the *current* life of a peer role, as the state page names it. Used by every child.

A peer that dies gets a new generation, hence a new address; `refresh` notices the change in the page and
connects anew. What was kept for the dead life is dropped: recovery finds it by comparing state, not by
trusting queues.
"""

from __future__ import annotations

from collections.abc import Callable

from sglmt.delivery.keys import MAX_GENERATION, make_life
from sglmt.ipc.addresses import ipc_address
from sglmt.ipc.queues import Outbox
from sglmt.ipc.state_page import MAX_WORKERS_ON_PAGE, StatePage
from sglmt.messages.frame import Prefix, Role
from sglmt.workers.child import ChildContext


class PeerOutbox:
    """The outbox to (role, index), whichever life that is now."""

    def __init__(self, child: ChildContext, role: Role, index: int) -> None:
        self._page = child.page
        self._run_dir = child.run_dir
        self._transport = child.transport
        self._role = role
        self._index = index
        self._outbox: Outbox | None = None
        self._dropped_before = 0
        self.generation = 0
        self.refresh()

    def refresh(self) -> bool:
        """Follow the state page and flush what was kept. True when the peer is another life than before."""
        generation = self._page.generation(self._role, self._index)
        if generation == self.generation:
            if self._outbox is not None and self._outbox.backlog_bytes:
                self._outbox.flush()
            return False
        if self._outbox is not None:
            self._outbox.close()
            self._dropped_before += self._outbox.dropped
            self._outbox = None
        self.generation = generation
        if generation:
            address = ipc_address(self._run_dir, self._role, self._index, generation)
            self._outbox = self._transport.outbox(address)
        return True

    def send(self, frame: bytes | bytearray) -> bool:
        """Send to the life known now; False when there is none or its backlog is full."""
        if self._outbox is None:
            self._dropped_before += 1
            return False
        return self._outbox.send(frame)

    @property
    def backlog_bytes(self) -> int:
        """Bytes kept back because the peer does not take them now."""
        return 0 if self._outbox is None else self._outbox.backlog_bytes

    @property
    def dropped(self) -> int:
        """Frames dropped, earlier lives of the peer included."""
        return self._dropped_before + (0 if self._outbox is None else self._outbox.dropped)


def target_life(prefix: Prefix) -> int | None:
    """The worker life a frame is for; None when its prefix names none that could be."""
    if prefix.target_index >= MAX_WORKERS_ON_PAGE or not 0 < prefix.target_generation <= MAX_GENERATION:
        return None
    return make_life(prefix.target_index, prefix.target_generation)


def worker_is_dead(page: StatePage) -> Callable[[int, int], bool]:
    """A test whether a worker life has left the state page (reaped by the supervisor)."""

    def is_dead(index: int, generation: int) -> bool:
        if index >= MAX_WORKERS_ON_PAGE:
            return True
        if page.generation(Role.TOKENIZER_WORKER, index) == generation:
            return False
        return (index, generation) not in page.live(Role.TOKENIZER_WORKER)

    return is_dead
