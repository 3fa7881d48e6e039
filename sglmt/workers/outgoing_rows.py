"""The text rows of one worker life while a batch is turned, and the message made of them. Used by `RowText`; pure.

Columns that are not made in a detokenizer pass through as the batch type declares them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from sglmt.messages.columns import Column, RaggedColumn
from sglmt.messages.generation_rows import GenerationRows
from sglmt.messages.sampling import FinishReason
from sglmt.messages.to_worker import BatchStrOutput
from sglmt.workers.steady_rows import Lane

# Columns of the rows that are not made here pass through unchanged, whatever they are.
_MADE_HERE = {"keys", "attempts", "offsets", "output_ids", "finish_reasons"}
PASSED_COLUMNS = frozenset(GenerationRows.__struct_fields__) - _MADE_HERE


class OutgoingRows:
    """Rows of one worker life: those of a lane, taken in columns, then those that were added one by one."""

    __slots__ = (
        "_attempts",
        "_cut",
        "_first",
        "_ids",
        "_keys",
        "_lane_rows",
        "_lengths",
        "_offsets",
        "_rows",
        "_text_offsets",
        "finishes",
        "texts",
    )

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.finishes: dict[int, FinishReason] = {}  # by place in here, as `_cut`
        self._keys = array("Q")
        self._attempts, self._offsets, self._text_offsets = array("I"), array("I"), array("I")
        self._ids = array("I")
        self._lengths: array[int] | None = None  # none as long as every row has one id
        self._first = 0
        self._lane_rows: Sequence[int] = ()
        self._rows: list[int] = []  # numbers in the incoming batch, of those added
        self._cut: dict[int, int] = {}  # how many ids of a row belong to the output, where not all do

    @classmethod
    def of_lane(
        cls, lane: Lane, first: int, ids: Sequence[int], texts: Sequence[str], text_offsets: Sequence[int]
    ) -> OutgoingRows:
        """All rows of a lane; the steady rows begin at row `first` of the incoming batch."""
        made = cls()
        made.texts += lane.pick(texts)
        made._keys.frombytes(lane.keys)
        made._attempts.frombytes(lane.attempts)
        made._offsets.frombytes(lane.offsets)
        made._ids.extend(lane.pick(ids))
        made._text_offsets.extend(lane.pick(text_offsets))
        made._first = first
        made._lane_rows = lane.rows.copy()
        return made

    def add(
        self,
        row: int,
        key: int,
        attempt: int,
        offset: int,
        ids: Sequence[int],
        text: str,
        text_offset: int,
        finish: FinishReason | None = None,
        used: int | None = None,
    ) -> None:
        """A row of the incoming batch; `used`: how many of its ids belong to the output, None for all."""
        place = len(self.texts)
        if used is not None:
            ids = ids[:used]
            self._cut[place] = used
        if len(ids) != 1 and self._lengths is None:
            self._lengths = array("I", [1]) * place
        if self._lengths is not None:
            self._lengths.append(len(ids))
        if finish is not None:
            self.finishes[place] = finish
        self._rows.append(row)
        self._keys.append(key)
        self._attempts.append(attempt)
        self._offsets.append(offset)
        self._ids.extend(ids)
        self._text_offsets.append(text_offset)
        self.texts.append(text)

    def add_one(
        self, row: int, key: int, attempt: int, offset: int, token_id: int, text: str, text_offset: int
    ) -> None:
        """`add` for a row of one id that goes on."""
        if self._lengths is not None:
            self._lengths.append(1)
        self._rows.append(row)
        self._keys.append(key)
        self._attempts.append(attempt)
        self._offsets.append(offset)
        self._ids.append(token_id)
        self._text_offsets.append(text_offset)
        self.texts.append(text)

    def batch(self, passed: list[Column]) -> BatchStrOutput:
        """The message. `passed`: the passed columns of the incoming batch."""
        return BatchStrOutput(
            keys=self._keys.tobytes(),
            attempts=self._attempts.tobytes(),
            offsets=self._offsets.tobytes(),
            text_offsets=self._text_offsets.tobytes(),
            output_ids=RaggedColumn(None if self._lengths is None else self._lengths.tobytes(), self._ids.tobytes()),
            texts=self.texts,
            finish_reasons=self.finishes,
            **(self._passed(passed) if passed else {}),
        )

    def _passed(self, passed: list[Column]) -> dict[str, Any]:
        rows = [*(self._first + row for row in self._lane_rows), *self._rows]
        columns = {name: kind.take(value, rows) for name, kind, value in passed}
        logprobs = columns.get("output_logprobs", {})
        for place, used in self._cut.items():  # log-probabilities end where the ids do
            if place in logprobs:
                logprobs[place] = logprobs[place].slice(0, used)
        return columns
