"""The rows that the next batch is expected to bring, in columns. Part of `RowText`; runs in the detokenizer; pure.

While requests run, every batch has the same keys in the same order as the one before, one id a row, each offset one
higher. What must be known of such rows is kept here as whole columns: a batch is compared with them, and answered
from them, in a few calls, whatever the number of rows. The reason is not the number of instructions: a detokenizer
sleeps between two steps and finds its caches lost, so that each object it touches costs more than the work on it.

The state of a row is *lent* to this class as long as the row is in here: `next_offset` and `chars` of its `TextState`
mean nothing then, and giving it back sets them. Whatever comes in another way than expected is not judged here but
given back.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import itemgetter
from typing import Any

from sglmt.delivery.keys import life_of
from sglmt.messages.columns import RaggedColumn
from sglmt.messages.packed import ONE_U32, add_u32, common_items, find_item, item_u32, ones_u32
from sglmt.messages.to_detokenizer import BatchTokenIDOutput
from sglmt.tokenizer.text_stream import RequestText

LENT = -1  # `next_offset` of a state that is lent: no row continues it


class TextState:
    """One live request's text."""

    __slots__ = ("attempt", "chars", "key", "next_offset", "plain", "text")

    def __init__(self, key: int, attempt: int, text: RequestText, plain: bool) -> None:
        self.key = key
        self.attempt = attempt
        self.plain = plain  # no stop strings: a single id can never end it
        self.text = text
        self.next_offset = 0
        self.chars = 0


class Lane:
    """The steady rows of one worker life: columns of what is sent to it that need not be gathered at each step."""

    __slots__ = ("attempts", "keys", "life", "offsets", "ones", "pick", "rows")

    def __init__(self, life: int) -> None:
        self.life = life
        self.rows: list[int] = []  # among the steady rows, rising
        self.keys, self.attempts, self.offsets = bytearray(), bytearray(), bytearray()
        self.ones = 0  # packed, as one number; 0 as long as `rows` changes

    def settle(self) -> None:
        """`rows` is complete, and not empty."""
        if not self.ones:
            self.pick = _picker(self.rows)
            self.ones = ones_u32(len(self.rows))

    def place(self, row: int) -> int:
        """Where a steady row is in this lane."""
        return bisect_left(self.rows, row)


class SteadyRows:
    """Rows expected to come next, in this order, one behind the other. Row numbers are those in here.

    `lookup` is the list of texts most requests look their ids up in; rows that cannot (an unfinished character, stop
    strings, shown special tokens) are `odd` and have each id pushed by itself.
    """

    def __init__(self, lookup: list[str | None]) -> None:
        self._lookup = lookup
        self._clear()

    def _clear(self) -> None:
        self.states: list[TextState] = []
        self.odd: list[int] = []  # rising
        self._lanes: dict[int, Lane] = {}
        self._lane_of: list[Lane] = []
        self._are_numbered = True  # whether `rows` of the lanes is up to date
        self._all = Lane(0)
        self._expected = BatchTokenIDOutput(  # of the same bytearrays, which compare as bytes do
            keys=self._all.keys,  # type: ignore[arg-type]
            attempts=self._all.attempts,  # type: ignore[arg-type]
            offsets=self._all.offsets,  # type: ignore[arg-type]
            output_ids=RaggedColumn(None, b""),
        )
        self._chars = bytearray()

    def __len__(self) -> int:
        return len(self.states)

    @property
    def keys(self) -> bytes:
        """Packed keys of all rows."""
        return bytes(self._all.keys)

    @property
    def lanes(self) -> Collection[Lane]:
        """All lanes, settled; none is empty."""
        self._number_lanes()
        for lane in self._lanes.values():
            lane.settle()
        return self._lanes.values()

    # what comes

    def is_all_of(self, batch: BatchTokenIDOutput) -> bool:
        """Whether `batch` is these rows exactly as expected and, whatever columns there are, nothing else."""
        expected = self._expected
        ids = expected.output_ids = batch.output_ids
        return batch == expected and ids.lengths is None and len(ids.values) == len(expected.offsets)

    def find(self, batch: BatchTokenIDOutput) -> int | None:
        """The row of `batch` at which all rows in here follow as expected, whatever is before and after them."""
        expected = self._all
        first = 0 if batch.keys.startswith(expected.keys) else self._first(batch)
        if first is None or not self.states:
            return None
        at, lengths = 4 * first, batch.output_ids.lengths
        if (
            batch.keys.startswith(expected.keys, 2 * at)
            and batch.attempts.startswith(expected.attempts, at)
            and batch.offsets.startswith(expected.offsets, at)
            and (lengths is None or lengths.startswith(ONE_U32 * len(self.states), at))
        ):
            return first
        return None

    def find_most(self, batch: BatchTokenIDOutput) -> int | None:
        """The same; rows that did not come, or came in another place, are given back, if that is the smaller part."""
        if batch.finish_reasons:  # they move behind those that go on
            keys = batch.keys
            self.discard([keys[8 * row : 8 * row + 8] for row in batch.finish_reasons])
            first = self.find(batch)
            if first is not None or not self.states:
                return first
        self.keep_only(set(array("Q", batch.keys)))
        first = self._first(batch)
        matching = 0 if first is None else self._matching(batch, first)
        if 2 * matching < len(self.states):
            return None
        self.remove(list(range(matching, len(self.states))))
        return first

    def _first(self, batch: BatchTokenIDOutput) -> int | None:
        """The row of `batch` that has the first key of those in here."""
        row = find_item(batch.keys, bytes(self._all.keys[:8])) if self.states else -1
        return row if row >= 0 else None

    def _matching(self, batch: BatchTokenIDOutput, first: int) -> int:
        """How many rows of `batch` are as expected, one behind the other, from row `first` on."""
        expected, count = self._all, len(self.states)
        end = first + count
        matching = common_items(expected.keys, batch.keys[8 * first : 8 * end], 8)
        matching = min(matching, common_items(expected.attempts, batch.attempts[4 * first : 4 * end], 4))
        matching = min(matching, common_items(expected.offsets, batch.offsets[4 * first : 4 * end], 4))
        lengths = batch.output_ids.lengths
        return (
            matching
            if lengths is None
            else min(matching, common_items(ONE_U32 * count, lengths[4 * first : 4 * end], 4))
        )

    # one step

    def look_up(self, ids: Iterable[int]) -> list[str]:
        """The texts of `ids`; wrong (maybe None) where a row is special. Raises IndexError for a bad id."""
        return list(map(self._lookup.__getitem__, ids))  # type: ignore[arg-type]

    def special(self, texts: Sequence[str], finishing: Collection[int]) -> Sequence[int]:
        """The rows that have to be looked at one by one, in rising order: odd ones, those whose id has no text of its
        own (or an empty one), and those that are `finishing`."""
        special = self.odd
        if not all(texts):
            special = sorted({*special, *(row for row, text in enumerate(texts) if not text)})
        return sorted({*special, *finishing}) if finishing else special

    def position(self, row: int) -> tuple[int, int]:
        """(next offset, characters so far) of a row."""
        return item_u32(self._all.offsets, row), item_u32(self._chars, row)

    def text_offsets(self) -> array[int]:
        """Characters before each row."""
        return array("I", self._chars)

    def lane_of(self, row: int) -> Lane:
        """The lane a row is in."""
        return self._lane_of[row]

    def advance(self, texts: Iterable[str]) -> None:
        """Every row has got one id, and its text."""
        add_u32(self._all.offsets, ones_u32(len(self.states)))
        add_u32(self._chars, int.from_bytes(array("I", map(len, texts)), "little"))
        for lane in self.lanes:
            add_u32(lane.offsets, lane.ones)

    # who comes

    def append(self, state: TextState) -> None:
        """This one is expected behind the others."""
        lane = self._lanes.get(life_of(state.key))
        if lane is None:
            lane = self._lanes[life_of(state.key)] = Lane(life_of(state.key))
        key, attempt = state.key.to_bytes(8, "little"), state.attempt.to_bytes(4, "little")
        offset = state.next_offset.to_bytes(4, "little")
        for columns in (self._all, lane):
            columns.keys += key
            columns.attempts += attempt
            columns.offsets += offset
        self._chars += state.chars.to_bytes(4, "little")
        lane.rows.append(len(self.states))
        if not state.text.looks_up(self._lookup):
            self.odd.append(len(self.states))
        self.states.append(state)
        self._lane_of.append(lane)
        lane.ones = 0
        state.next_offset = LENT

    def remove(self, rows: list[int]) -> None:
        """Give back some rows (rising)."""
        self._number_lanes()
        for row in reversed(rows):
            self._give_back(row)
            lane = self._lane_of[row]
            place = lane.place(row)
            for columns, at in ((self._all, row), (lane, place)):
                del columns.keys[8 * at : 8 * at + 8]
                del columns.attempts[4 * at : 4 * at + 4]
                del columns.offsets[4 * at : 4 * at + 4]
            del self._chars[4 * row : 4 * row + 4]
            del self.states[row], self._lane_of[row], lane.rows[place]
        if rows:
            self._are_numbered = False
            if self.odd:
                gone = set(rows)
                self.odd = [row - bisect_left(rows, row) for row in self.odd if row not in gone]

    def _number_lanes(self) -> None:
        if self._are_numbered:
            return
        for lane in self._lanes.values():
            lane.rows.clear()
            lane.ones = 0
        for row, lane in enumerate(self._lane_of):
            lane.rows.append(row)
        self._lanes = {life: lane for life, lane in self._lanes.items() if lane.rows}
        self._are_numbered = True

    def discard(self, keys: Iterable[bytes]) -> None:
        """Give back the rows of these packed keys, where they have one."""
        found = {find_item(self._all.keys, key) for key in keys}
        self.remove(sorted(found - {-1}))

    def keep_only(self, keys: Collection[int]) -> None:
        """Give back the rows of other keys."""
        self.remove([row for row, key in enumerate(array("Q", self._all.keys)) if key not in keys])

    def give_back(self) -> None:
        """Give back all rows."""
        for row in range(len(self.states)):
            self._give_back(row)
        self._clear()

    def _give_back(self, row: int) -> None:
        state = self.states[row]
        state.next_offset, state.chars = self.position(row)


def _picker(rows: list[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Takes the items `rows` (not none) of a sequence."""
    if len(rows) > 1:
        return itemgetter(*rows)
    (row,) = rows
    return lambda items: items[row : row + 1]
