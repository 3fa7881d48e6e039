"""Worker life → the outbox its rows and replies are sent through. Runs in detokenizers and the router.

Lazy: a life is registered on first sight, so a restarted or added worker needs no ceremony. A life the state
page no longer names as current *and* that is dead (or has left) is removed: its socket closed, what was kept
for it dropped and counted. The address holds the generation, so a dead life's traffic can never reach its
successor. During a roll two lives of an index coexist: the caller says who is dead.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sglmt.delivery.keys import split_life
from sglmt.ipc.addresses import http_worker_ipc
from sglmt.ipc.queues import Outbox, Transport


class SocketMapping:
    """The outboxes of one process, by worker life."""

    def __init__(
        self,
        transport: Transport,
        run_dir: Path,
        is_dead: Callable[[int, int], bool],
    ) -> None:
        """`is_dead(index, generation)` tells whether the state page shows a worker life as gone."""
        self._transport = transport
        self._run_dir = run_dir
        self._is_dead = is_dead
        self._outboxes: dict[int, Outbox] = {}
        self._dead_lives: dict[int, None] = {}
        self.unroutable = 0
        self.late = 0
        self._dropped_by_closed = 0

    def send(self, life: int, frame: bytes | bytearray) -> bool:
        """Send a frame to a worker life. False when it was dropped (dead life, or its backlog is full)."""
        outbox = self._outboxes.get(life)
        if outbox is None:
            index, generation = split_life(life)
            if generation == 0:
                self.unroutable += 1
                return False
            if life in self._dead_lives or self._is_dead(index, generation):
                self.late += 1
                return False
            outbox = self._transport.outbox(http_worker_ipc(self._run_dir, life))
            self._outboxes[life] = outbox
        return outbox.send(frame)

    def sweep(self) -> list[int]:
        """Flush what was kept, close the outboxes of dead lives, and return those lives."""
        gone = [life for life in self._outboxes if self._is_dead(*split_life(life))]
        for life in gone:
            self.remove(life)
        self.flush()
        return gone

    def flush(self) -> None:
        """Send what was kept, as far as the workers take it."""
        for outbox in self._outboxes.values():
            if outbox.backlog_bytes:
                outbox.flush()

    def remove(self, life: int) -> None:
        """Close the outbox of a life; later frames for it are dropped and counted as late."""
        outbox = self._outboxes.pop(life, None)
        if outbox is not None:
            outbox.close()
            self._dropped_by_closed += outbox.dropped
        self._dead_lives[life] = None
        while len(self._dead_lives) > 4096:
            del self._dead_lives[next(iter(self._dead_lives))]

    def take_unroutable(self) -> int:
        """Frames that named no life that could be, since the last call."""
        count, self.unroutable = self.unroutable, 0
        return count

    def lives(self) -> list[int]:
        """The lives with an open outbox."""
        return list(self._outboxes)

    @property
    def dropped(self) -> int:
        """Frames dropped because a peer did not take them or went away."""
        return self._dropped_by_closed + sum(outbox.dropped for outbox in self._outboxes.values())

    @property
    def backlog_bytes(self) -> int:
        """Bytes kept back for peers that do not take them now."""
        return sum(outbox.backlog_bytes for outbox in self._outboxes.values())

    def close(self) -> None:
        """Close everything."""
        for life in list(self._outboxes):
            self.remove(life)
