"""Who may be spawned now. Pure: caps the number of processes that boot at the same time by the cores.

A turn ends when its process is ready or gone, and at the latest after `turn_s`: one that waits for another
(a worker for the engine to load) no longer burns a core and must not keep that other from starting.
"""

from __future__ import annotations

from collections import deque


class SpawnTurns:
    """First come, first served."""

    def __init__(self, limit: int, turn_s: float = 2.0) -> None:
        self._limit = max(1, limit)
        self._turn_s = turn_s
        self._waiting: deque[str] = deque()
        self._booting: dict[str, float] = {}  # name → when its turn ends, monotonic seconds

    def request(self, name: str) -> None:
        """Queue a process; a second request of the same name changes nothing."""
        if name not in self._waiting:
            self._waiting.append(name)

    def cancel(self, name: str) -> bool:
        """Take a waiting process out of the queue; False when it does not wait."""
        if name not in self._waiting:
            return False
        self._waiting.remove(name)
        return True

    def finished(self, name: str) -> None:
        """The process is ready or gone."""
        self._booting.pop(name, None)

    def due(self, now_s: float) -> list[str]:
        """Whose turn it is now; they count as booting from here on."""
        for name in [name for name, ends_s in self._booting.items() if ends_s <= now_s]:
            del self._booting[name]
        names: list[str] = []
        while self._waiting and len(self._booting) < self._limit:
            name = self._waiting.popleft()
            self._booting[name] = now_s + self._turn_s
            names.append(name)
        return names
