"""The simulator's requests that want nothing but their next id, as columns. Owned by the engine; pure.

They are nearly all of a load test. Between two steps the process sleeps and its caches are lost, so what a step
costs is how much memory it touches: here that is four bytes a request, and the ends of requests are looked up by the
tick they fall on instead of being asked of each at every tick.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from zlib import crc32

from sglmt.engines.base import EngineOutput, EngineStep
from sglmt.engines.token_source import INCREMENT, MASK, MULTIPLIER, NUMBER_SHIFT

_NO_ID = bytes(4)


class PlainRuns:
    """Requests that end by their token limit only. `ids`: what may be emitted, ascending."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._first_id = ids[0]
        self._count = len(ids)
        # Mostly the special ids are the first of the vocabulary, and no table is needed.
        self._table = None if ids[-1] - ids[0] + 1 == len(ids) else array("I", ids)
        self._tick = 0
        self.keys: list[int] = []
        self._states = array("I")
        self._last_ticks: list[int] = []  # the tick that brings the last id
        self._rows: dict[int, int] = {}  # key → its place in the three columns
        self._ending: dict[int, list[int]] = {}  # tick → keys whose last id it brings

    def __contains__(self, key: int) -> bool:
        return key in self._rows

    def add(self, key: int, state: int, tokens: int) -> None:
        """A request that gets `tokens` more ids, at least one."""
        last_tick = self._tick + tokens
        self._rows[key] = len(self.keys)
        self.keys.append(key)
        self._states.append(state)
        self._last_ticks.append(last_tick)
        self._ending.setdefault(last_tick, []).append(key)

    def discard(self, key: int) -> None:
        """Forget a request; unknown keys are ignored."""
        row = self._rows.pop(key, None)
        if row is not None:
            last_tick = self._last_ticks[row]
            ending = self._ending[last_tick]
            ending.remove(key)
            if not ending:
                del self._ending[last_tick]
            self._close_gap(row)

    def clear(self) -> None:
        """Forget all."""
        self.keys.clear()
        self._states = array("I")
        self._last_ticks.clear()
        self._rows.clear()
        self._ending.clear()

    def advance(self) -> EngineStep:
        """One id for each. In one pass: every operation that a step has not used before costs as much as ten rows.

        A state is the checksum of all ids so far; with one more it is that of four zero bytes after the id is in it.
        """
        self._tick += 1
        states, count, first, table = self._states, self._count, self._first_id, self._table
        ids: list[int] = []
        row = 0
        for state in states:
            number = (((state * MULTIPLIER + INCREMENT) & MASK) >> NUMBER_SHIFT) % count
            token_id = first + number if table is None else table[number]
            ids.append(token_id)
            states[row] = crc32(_NO_ID, state ^ token_id)
            row += 1  # noqa: SIM113 - cheaper than enumerate
        return EngineStep(self.keys, ids, self._end(ids) if self._tick in self._ending else ())

    def _end(self, ids: list[int]) -> list[EngineOutput]:
        """Take out, of the columns and of `ids`, the requests that this tick ends."""
        outputs: list[EngineOutput] = []
        for key in self._ending.pop(self._tick, ()):
            row = self._rows.pop(key)
            outputs.append(EngineOutput(key, [ids[row]], "length"))
            last_id = ids.pop()
            if row < len(ids):
                ids[row] = last_id
            self._close_gap(row)
        return outputs

    def _close_gap(self, row: int) -> None:
        """The last request takes the place of the one that was at `row`."""
        key, state, last_tick = self.keys.pop(), self._states.pop(), self._last_ticks.pop()
        if row < len(self.keys):
            self.keys[row], self._states[row], self._last_ticks[row] = key, state, last_tick
            self._rows[key] = row
