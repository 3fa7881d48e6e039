"""Token rows in, text rows out: the detokenizer's work without its sockets. Pure but for the counters.

Holds one `TextState` per live request. A row at offset 0 starts its text anew (a first sending, a new attempt
or a replay); any other must continue exactly where the state stands. What was lost shows as a gap and is asked
for again; what ended by a stop string stays ended, whatever the engine still sends.

Rows that come as the batch before let expect are answered in columns (`steady_rows`). Every other is judged by
itself, here, and either way gives the same answer.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from sglmt.delivery.keys import COUNTER_BITS, life_of
from sglmt.ipc.state_page import Slot, SlotWord
from sglmt.messages.columns import Column, RaggedColumn, pack, ragged_bounds, unpack
from sglmt.messages.sampling import FinishReason, TextSpec
from sglmt.messages.to_detokenizer import BatchTokenIDOutput
from sglmt.messages.to_scheduler import FinishReq
from sglmt.messages.to_worker import BatchStrOutput
from sglmt.tokenizer.detokenize import TokenIdError
from sglmt.tokenizer.text_stream import RequestText
from sglmt.tokenizer.token_table import TokenTable
from sglmt.workers.outgoing_rows import PASSED_COLUMNS, OutgoingRows
from sglmt.workers.steady_rows import LENT, SteadyRows, TextState

MAX_ENDED = 65536  # requests ended here that the scheduler may not have heard of; losing one costs a replay


class RowText:
    """All live requests of one detokenizer. Never evicts one."""

    def __init__(self, table: TokenTable, slot: Slot) -> None:
        self._table = table
        self._slot = slot
        self._states: dict[int, TextState] = {}
        self._ended: OrderedDict[int, FinishReq] = OrderedDict()
        self._steady = SteadyRows(table.skip)
        self._order = b""  # keys of the last batch, while nothing is steady
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
        lent: list[int] = []
        for key in keys:
            state = self._states.pop(key, None)
            self._ended.pop(key, None)
            if state is not None and state.next_offset == LENT:
                lent.append(key)
        if lent:
            self._steady.discard([pack("Q", [key]) for key in lent])

    def forget_lives(self, lives: set[int]) -> None:
        """These worker lives are gone, and their requests with them."""
        if lives:
            self.forget([key for key in self.held() if life_of(key) in lives])

    def turn(self, batch: BatchTokenIDOutput) -> dict[int, BatchStrOutput]:
        """The text rows of a batch, by worker life. Raises ValueError for a batch whose columns do not fit."""
        rows = len(batch.keys) // 8
        others: Iterable[int] = range(rows)
        outgoing: dict[int, OutgoingRows] = {}
        passed: list[Column] = []
        if self._steady.is_all_of(batch):
            first: int | None = 0
        else:
            passed = [column for column in batch.check() if column[0] in PASSED_COLUMNS]
            first = self._find_steady(batch)
        if first is not None:
            end = first + len(self._steady)
            if self._take_steady(batch, first, outgoing):
                others = (*range(first), *range(end, rows))
        if others:
            self._take_others(batch, others, outgoing)
        self._slot.add(SlotWord.ROWS_IN, rows)
        return {life: made.batch(passed) for life, made in outgoing.items() if made.texts}

    def _find_steady(self, batch: BatchTokenIDOutput) -> int | None:
        """The row of `batch` at which the steady rows begin. Those that did not come as expected are no longer steady;
        None when none is."""
        steady = self._steady
        if not len(steady):
            return None
        first = steady.find(batch)
        if first is None:
            if 8 * len(batch.text_specs) == len(batch.keys):
                return None  # nothing but new requests: the others pause
            self._order = steady.keys
            first = steady.find_most(batch)
        if first and self._any_is_lent(unpack("Q", batch.keys[: 8 * first])):
            first = None  # a request has two rows: only their order says what they mean
        if first is None:
            steady.give_back()
        return first

    def _any_is_lent(self, keys: Iterable[int]) -> bool:
        states = (self._states.get(key) for key in keys)
        return any(state is not None and state.next_offset == LENT for state in states)

    def _take_steady(self, batch: BatchTokenIDOutput, first: int, outgoing: dict[int, OutgoingRows]) -> bool:
        """Turn the steady rows, which begin at row `first`. False, and nothing has changed, when one of their ids
        stands for no text: then none is steady any longer."""
        steady = self._steady
        ids = array("I", batch.output_ids.values)
        if len(ids) > len(steady):
            lengths = batch.output_ids.lengths
            at = first if lengths is None else sum(unpack("I", lengths[: 4 * first]))
            ids = ids[at : at + len(steady)]
        try:
            texts = steady.look_up(ids)
        except IndexError:
            steady.give_back()
            return False
        end = first + len(steady)
        finishes = {row - first: finish for row, finish in batch.finish_reasons.items() if first <= row < end}
        special = steady.special(texts, finishes)
        ended = self._push_special(special, ids, texts, finishes) if special else {}
        before = steady.text_offsets()
        for lane in steady.lanes:
            outgoing[lane.life] = OutgoingRows.of_lane(lane, first, ids, texts, before)
        steady.advance(texts)
        if ended:
            for row, finish in ended.items():
                lane = steady.lane_of(row)
                outgoing[lane.life].finishes[lane.place(row)] = finish
            steady.remove(list(ended))
        return True

    def _push_special(
        self, rows: Iterable[int], ids: Sequence[int], texts: list[str], finishes: dict[int, FinishReason]
    ) -> dict[int, FinishReason]:
        """Fill in the texts of special steady rows (rising); returns how those that ended have, in the same order."""
        steady = self._steady
        odd: list[int] = []
        ended: dict[int, FinishReason] = {}
        for row in rows:
            state = steady.states[row]
            text_state = state.text
            text = text_state.push_one(ids[row])
            finish = finishes.get(row)
            if finish is not None and text_state.matched is None:
                text += text_state.finish()
            texts[row] = text
            if finish is not None or text_state.matched is not None:
                state.next_offset, state.chars = steady.position(row)
                finish = self._settle(state, text, 1, finish)
                assert finish is not None
                ended[row] = finish
            elif not text_state.looks_up(self._table.skip):
                odd.append(row)
        steady.odd = odd
        return ended

    def _take_others(self, batch: BatchTokenIDOutput, rows: Iterable[int], outgoing: dict[int, OutgoingRows]) -> None:
        """Judge each row by itself. Those that go on in the expected way are steady from now on."""
        keys, attempts, offsets = array("Q", batch.keys), array("I", batch.attempts), array("I", batch.offsets)
        ids = array("I", batch.output_ids.values)
        single = batch.output_ids.lengths is None
        bounds = range(len(ids) + 1) if single else ragged_bounds(batch.output_ids, "I")
        finishes = batch.finish_reasons
        states = self._states
        going_on: list[TextState] = []
        for row in rows:
            key, offset = keys[row], offsets[row]
            state = states.get(key)
            life = key >> COUNTER_BITS
            made = outgoing.get(life)
            if made is None:
                made = outgoing[life] = OutgoingRows()
            if (
                single
                and state is not None
                and offset
                and state.next_offset == offset
                and state.attempt == attempts[row]
                and row not in finishes
                and state.plain
            ):
                token_id = ids[row]
                try:
                    text = state.text.push_one(token_id)
                except TokenIdError:
                    pass
                else:
                    made.add_one(row, key, state.attempt, offset, token_id, text, state.chars)
                    state.next_offset = offset + 1
                    state.chars += len(text)
                    going_on.append(state)
                    continue
            state = self._take_row(made, batch, row, key, attempts[row], offset, ids[bounds[row] : bounds[row + 1]])
            if state is not None:
                going_on.append(state)
        self._note_order(batch, going_on)

    def _note_order(self, batch: BatchTokenIDOutput, going_on: list[TextState]) -> None:
        """Expect these rows to come again in this order: behind those that are steady or, when none is, if the last
        batch had the same order. So an engine that has no order of its own, or brings several ids a row, costs nothing
        here."""
        if not len(self._steady) and (self._order not in batch.keys or not _has_single_ids(batch.output_ids)):
            self._order = pack("Q", [state.key for state in going_on])
            return
        self._order = b""
        for state in going_on:
            if state.next_offset > 0 and self._states.get(state.key) is state:  # else it is lent, or was replaced
                self._steady.append(state)

    def _take_row(
        self,
        made: OutgoingRows,
        batch: BatchTokenIDOutput,
        row: int,
        key: int,
        attempt: int,
        offset: int,
        ids: Sequence[int],
    ) -> TextState | None:
        """Judge one row, whatever it brings; returns its state when it goes on."""
        finish = batch.finish_reasons.get(row)
        state = self._state_for(batch.text_specs.get(row), key, attempt, offset, ids, finish is not None)
        if state is None:
            return None
        skip = state.next_offset - offset
        chars_before = state.chars
        text_state = state.text
        new_ids, error = self._split_at_bad_id(ids[skip:])
        text = text_state.push(new_ids)
        used = text_state.used
        if (finish is not None or error is not None) and text_state.matched is None:
            text += text_state.finish()
        if error is not None and text_state.matched is None:
            finish = self._end_with_error(state, used, error)
            made.add(row, key, attempt, offset, ids, text, chars_before, finish, skip + used)
            return None
        finish = self._settle(state, text, len(ids) - skip, finish)
        cut = skip + used if used < len(ids) - skip else None
        made.add(row, key, attempt, offset, ids, text, chars_before, finish, cut)
        return state if finish is None else None

    def _settle(self, state: TextState, text: str, count: int, finish: FinishReason | None) -> FinishReason | None:
        """Account for `count` ids that were pushed and brought `text`; `finish`: how the engine ended the request.
        Returns how it has ended."""
        text_state = state.text
        state.chars += len(text)
        state.next_offset += text_state.used
        if text_state.matched is not None:
            stop = FinishReason(kind="stop", matched=text_state.matched)
            if finish is None or text_state.used < count:
                self._end_here(state, state.next_offset, stop)
            finish = stop
        if finish is not None:
            self._states.pop(state.key, None)
        return finish

    def _state_for(
        self, spec: TextSpec | None, key: int, attempt: int, offset: int, ids: Sequence[int], finishes: bool
    ) -> TextState | None:
        """The state a row continues (made anew at offset 0), None when the row is to be dropped."""
        state = self._states.get(key)
        if state is not None and state.next_offset == LENT:  # a second row of it, or one that does not continue it
            self._steady.give_back()
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
                key,
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

    def _split_at_bad_id(self, ids: Sequence[int]) -> tuple[Sequence[int], str | None]:
        """The ids before the first that stands for no text, and what is wrong with that one.

        So an answer ends at the same id however its ids are grouped, a replay included.
        """
        size = self._table.size
        if ids and max(ids) >= size:
            at = next(i for i, token_id in enumerate(ids) if token_id >= size)
            return ids[:at], str(TokenIdError(ids[at], size))
        return ids, None

    def _end_with_error(self, state: TextState, used: int, message: str) -> FinishReason:
        """An id that stands for no text costs its request an error, nobody else anything."""
        finish = FinishReason(kind="error", status=500, code="invalid_token_id", message=message)
        self._end_here(state, state.next_offset + used, finish)
        del self._states[state.key]
        return finish

    def _end_here(self, state: TextState, output_tokens: int, finish: FinishReason) -> None:
        said = FinishReq(key=state.key, attempt=state.attempt, output_tokens=output_tokens, finish=finish)
        self.finished.append(said)
        self._ended[state.key] = said
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)


def _has_single_ids(column: RaggedColumn) -> bool:
    """Whether most rows have exactly one id."""
    return column.lengths is None or 8 * array("I", column.lengths).count(1) > len(column.lengths)
