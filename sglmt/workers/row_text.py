"""Token rows in, text rows out: the detokenizer's work without its sockets. Pure but for the counters.

Holds one `TextState` per live request. A row at offset 0 starts its text anew (a first sending, a new attempt
or a replay); any other must continue exactly where the state stands. What was lost shows as a gap and is asked
for again; what ended by a stop string stays ended, whatever the engine still sends.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from sglmt.delivery.keys import life_of
from sglmt.ipc.state_page import Slot, SlotWord
from sglmt.messages.columns import RaggedColumn, Sparse, pack, ragged_bounds, unpack
from sglmt.messages.generation_rows import GenerationRows
from sglmt.messages.sampling import FinishReason, TextSpec
from sglmt.messages.to_detokenizer import BatchTokenIDOutput
from sglmt.messages.to_scheduler import FinishReq
from sglmt.messages.to_worker import BatchStrOutput
from sglmt.tokenizer.detokenize import TokenIdError
from sglmt.tokenizer.text_stream import RequestText
from sglmt.tokenizer.token_table import TokenTable

MAX_ENDED = 65536  # requests ended here that the scheduler may not have heard of; losing one costs a replay

# Columns of the rows that are not made here pass through unchanged, whatever they are.
_MADE_HERE = {"keys", "attempts", "offsets", "output_ids", "finish_reasons"}
PASSED_COLUMNS = tuple(name for name in GenerationRows.__struct_fields__ if name not in _MADE_HERE)


class TextState:
    """One live request's text."""

    __slots__ = ("attempt", "chars", "next_offset", "plain", "text")

    def __init__(self, attempt: int, text: RequestText, plain: bool) -> None:
        self.attempt = attempt
        self.plain = plain  # no stop strings: a single id can never end it
        self.text = text
        self.next_offset = 0
        self.chars = 0


class _TextRows:
    """The columns made here, while they are filled."""

    def __init__(self, finish_reasons: dict[int, FinishReason]) -> None:
        self.kept: list[int] = []
        self.texts: list[str] = []
        self.text_offsets: list[int] = []
        self.finish_reasons = finish_reasons
        self.cut: dict[int, int] = {}  # row of the incoming batch → ids that belong to the output


class RowText:
    """All live requests of one detokenizer. Never evicts one."""

    def __init__(self, table: TokenTable, slot: Slot) -> None:
        self._table = table
        self._slot = slot
        self._states: dict[int, TextState] = {}
        self._ended: OrderedDict[int, FinishReq] = OrderedDict()
        self.finished: list[FinishReq] = []  # for the scheduler; the caller takes and clears
        self.gaps: list[tuple[int, int]] = []  # (key, attempt) to be replayed; same

    def __len__(self) -> int:
        return len(self._states)

    @property
    def retained(self) -> int:
        """Of how many requests something is kept."""
        return len(self._states) + len(self._ended)

    def held(self) -> list[int]:
        """The keys something is kept of."""
        return [*self._states, *self._ended]

    def forget(self, keys: list[int]) -> None:
        """These requests ended without a row."""
        for key in keys:
            self._states.pop(key, None)
            self._ended.pop(key, None)

    def forget_lives(self, lives: set[int]) -> None:
        """These worker lives are gone, and their requests with them."""
        if lives:
            self.forget([key for key in self.held() if life_of(key) in lives])

    def turn(self, batch: BatchTokenIDOutput) -> BatchStrOutput | None:
        """The text rows of a batch that was checked, None when no row is left."""
        keys: tuple[int, ...] = unpack("Q", batch.keys)
        attempts: tuple[int, ...] = unpack("I", batch.attempts)
        offsets: tuple[int, ...] = unpack("I", batch.offsets)
        ids: tuple[int, ...] = unpack("I", batch.output_ids.values)
        single = batch.output_ids.lengths is None
        bounds = range(len(ids) + 1) if single else ragged_bounds(batch.output_ids, "I")
        finishes = batch.finish_reasons
        rows = _TextRows(dict(finishes))
        states = self._states
        kept, texts, text_offsets = rows.kept.append, rows.texts.append, rows.text_offsets.append
        for row, key in enumerate(keys):
            state = states.get(key)
            offset = offsets[row]
            if (
                single
                and state is not None
                and offset
                and state.next_offset == offset
                and state.attempt == attempts[row]
                and row not in finishes
                and state.plain
            ):
                try:
                    text = state.text.push_one(ids[row])
                except TokenIdError:
                    self._slow_row(rows, batch, row, key, attempts[row], offset, ids[row : row + 1])
                    continue
                kept(row)
                texts(text)
                text_offsets(state.chars)
                state.next_offset = offset + 1
                state.chars += len(text)
            else:
                self._slow_row(rows, batch, row, key, attempts[row], offset, ids[bounds[row] : bounds[row + 1]])
        self._slot.add(SlotWord.ROWS_IN, len(keys))
        return self._assemble(batch, rows, len(keys)) if rows.kept else None

    def _slow_row(
        self,
        rows: _TextRows,
        batch: BatchTokenIDOutput,
        row: int,
        key: int,
        attempt: int,
        offset: int,
        ids: tuple[int, ...],
    ) -> None:
        state = self._state_for(batch.text_specs.get(row), key, attempt, offset, ids, row in rows.finish_reasons)
        if state is None:
            rows.finish_reasons.pop(row, None)
            return
        skip = state.next_offset - offset
        chars_before = state.chars
        text_state = state.text
        finish = rows.finish_reasons.get(row)
        new_ids, error = self._split_at_bad_id(ids[skip:])
        text = text_state.push(new_ids)
        used = text_state.used
        if (finish is not None or error is not None) and text_state.matched is None:
            text += text_state.finish()
        if error is not None and text_state.matched is None:
            self._end_with_error(rows, row, key, state, skip, used, text, error)
            return
        state.chars += len(text)
        state.next_offset += used
        rows.kept.append(row)
        rows.texts.append(text)
        rows.text_offsets.append(chars_before)
        if skip or used < len(ids) - skip:
            rows.cut[row] = skip + used
        if text_state.matched is not None:
            stop = FinishReason(kind="stop", matched=text_state.matched)
            rows.finish_reasons[row] = stop
            if finish is None or used < len(ids) - skip:
                self._end_here(FinishReq(key=key, attempt=attempt, output_tokens=state.next_offset, finish=stop))
                finish = stop
        if finish is not None:
            self._states.pop(key, None)

    def _state_for(
        self, spec: TextSpec | None, key: int, attempt: int, offset: int, ids: tuple[int, ...], finishes: bool
    ) -> TextState | None:
        """The state a row continues (made anew at offset 0), None when the row is to be dropped."""
        state = self._states.get(key)
        if state is not None and attempt < state.attempt:
            self._slot.add(SlotWord.STALE_ATTEMPT_ROWS)
            return None
        if offset == 0 and spec is not None:
            ended = self._ended.pop(key, None)
            if ended is not None and attempt < ended.attempt:
                self._ended[key] = ended
                self._slot.add(SlotWord.STALE_ATTEMPT_ROWS)
                return None
            state = TextState(
                attempt,
                RequestText(
                    self._table,
                    spec.stop,
                    spec.no_stop_trim,
                    spec.skip_special_tokens,
                    spec.spaces_between_special_tokens,
                    spec.shown_ids,
                ),
                plain=not spec.stop,
            )
            self._states[key] = state
            return state
        ended = self._ended.get(key)
        if ended is not None and attempt == ended.attempt:
            self.finished.append(ended)  # the scheduler has not heard of it
            return None
        if ended is not None and attempt < ended.attempt:
            self._slot.add(SlotWord.STALE_ATTEMPT_ROWS)
            return None
        if state is None or attempt != state.attempt or offset > state.next_offset:
            self._slot.add(SlotWord.GAP_ROWS)
            self.gaps.append((key, attempt))
            return None
        if state.next_offset - offset > len(ids) or (state.next_offset - offset == len(ids) and not finishes):
            self._slot.add(SlotWord.DUPLICATE_ROWS)
            return None
        return state

    def _split_at_bad_id(self, ids: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
        """The ids before the first that stands for no text, and what is wrong with that one.

        So an answer ends at the same id however its ids are grouped, a replay included.
        """
        size = self._table.size
        if ids and max(ids) >= size:
            at = next(i for i, token_id in enumerate(ids) if token_id >= size)
            return ids[:at], str(TokenIdError(ids[at], size))
        return ids, None

    def _end_with_error(
        self, rows: _TextRows, row: int, key: int, state: TextState, skip: int, used: int, text: str, message: str
    ) -> None:
        """An id that stands for no text costs its request an error, nobody else anything."""
        finish = FinishReason(kind="error", status=500, code="invalid_token_id", message=message)
        rows.kept.append(row)
        rows.texts.append(text)
        rows.text_offsets.append(state.chars)
        rows.cut[row] = skip + used
        rows.finish_reasons[row] = finish
        output_tokens = state.next_offset + used
        self._end_here(FinishReq(key=key, attempt=state.attempt, output_tokens=output_tokens, finish=finish))
        del self._states[key]

    def _end_here(self, finish: FinishReq) -> None:
        self.finished.append(finish)
        self._ended[finish.key] = finish
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def _assemble(self, batch: BatchTokenIDOutput, rows: _TextRows, count: int) -> BatchStrOutput:
        """The outgoing batch: columns made here, and every shared column of the kept rows."""
        if len(rows.kept) < count:
            batch = batch.take(rows.kept)
            renumbered = {old: new for new, old in enumerate(rows.kept)}
            rows.finish_reasons = Sparse().take(rows.finish_reasons, rows.kept)
            rows.cut = {renumbered[row]: used for row, used in rows.cut.items()}
        passed: dict[str, Any] = {name: getattr(batch, name) for name in PASSED_COLUMNS}
        output_ids = batch.output_ids
        if rows.cut:
            output_ids = _cut(output_ids, rows.cut)
            for row, used in rows.cut.items():
                logprobs = batch.output_logprobs.get(row)
                if logprobs is not None:
                    passed["output_logprobs"] = {**passed["output_logprobs"], row: logprobs.slice(0, used)}
        return BatchStrOutput(
            keys=batch.keys,
            attempts=batch.attempts,
            offsets=batch.offsets,
            text_offsets=pack("I", rows.text_offsets),
            output_ids=output_ids,
            texts=rows.texts,
            finish_reasons=rows.finish_reasons,
            **passed,
        )


def _cut(column: RaggedColumn, cut: dict[int, int]) -> RaggedColumn:
    """`column` with row → first `cut[row]` ids only."""
    bounds = ragged_bounds(column, "I")
    ids = unpack("I", column.values)
    rows = [ids[bounds[row] : bounds[row + 1]] for row in range(len(bounds) - 1)]
    for row, used in cut.items():
        rows[row] = rows[row][:used]
    return RaggedColumn(pack("I", [len(row) for row in rows]), pack("I", [value for row in rows for value in row]))
