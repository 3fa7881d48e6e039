"""Rows in: each token to its request's sink, once and in order. Part of `Frontend`; no HTTP here.

A batch is taken in three ways, from the cheapest to the one that judges: requests that continue as expected, as
columns (`SteadyRequests`); rows of one token that continue exactly where their request stands, in one loop; and every
other row by itself. New text goes straight to the request's sink: no queue, no task switch a token. A row behind which
something is missing is not delivered; it is noted in `gaps`, to be sent again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from sglmt.delivery.progress import Verdict, judge_row
from sglmt.ipc.state_page import Slot, SlotWord
from sglmt.messages.columns import RaggedColumn, ragged_bounds, unpack
from sglmt.messages.sampling import FinishReason, TokenLogprobs
from sglmt.messages.to_worker import BatchStrOutput
from sglmt.status.histograms import LATENCY_BUCKETS, Tally, observe
from sglmt.workers.live_request import LiveRequest
from sglmt.workers.steady_requests import SteadyRequests

# Looked up once: finding a member of an enumeration costs more than most of what is done with it.
_ROWS_IN, _OUTPUT_TOKENS = SlotWord.ROWS_IN, SlotWord.OUTPUT_TOKENS
_ITL_BUCKETS, _ITL_SUM_US = SlotWord.ITL_BUCKETS, SlotWord.ITL_SUM_US

PlainRow = tuple[int, int, int, int, int, str]
"""(key, attempt, offset, text offset, token id, text) of a row of one token."""


Finish = Callable[[LiveRequest, str, "array[int]", TokenLogprobs | None, FinishReason], None]
"""Ends a request with its last text and ids."""


class LiveRows:
    """Delivers to the requests in `live`. `gaps`: (key, attempt) to be sent again; the caller takes and clears."""

    def __init__(
        self,
        live: dict[int, LiveRequest],
        slot: Slot,
        clock: Callable[[], float],
        finish: Finish,
        note_late_row: Callable[[], None],
    ) -> None:
        """`finish` is called for a row that ends its request, `note_late_row` for one of a request nobody waits for."""
        self._live = live
        self._slot = slot
        self._clock = clock
        self._finish = finish
        self._note_late_row = note_late_row
        self.steady = SteadyRequests()
        self.gaps: list[tuple[int, int]] = []

    def take_batch(self, batch: BatchStrOutput, more_follow: bool = False) -> None:
        """Deliver the rows of one message. Raises ValueError for a malformed one. When `more_follow` at once, sinks
        collect the rows, so that all leave in one write."""
        _check_columns(batch)
        rows = len(batch.texts)
        gaps = Tally(self._slot, _ITL_BUCKETS, LATENCY_BUCKETS)
        special = _special_rows(batch)
        steady = self.steady.expect(batch, special)
        if steady:
            ids = array("I", batch.output_ids.values[: 4 * steady])
            texts = batch.texts if steady == rows else batch.texts[:steady]
            now_s = self._clock()
            gaps.add_many(int((now_s - self.steady.last_token_at_s) * 1e6), steady)
            self.steady.deliver(ids, texts, now_s, more_follow)
            self._slot.add(_OUTPUT_TOKENS, steady)
        if steady < rows:
            self._take_others(batch, steady, special, gaps, more_follow)
        gaps.flush()
        self._slot.add(_ROWS_IN, rows)
        self._slot.add(_ITL_SUM_US, gaps.sum_us)

    def _take_others(
        self, batch: BatchStrOutput, first: int, special: Collection[int], gaps: Tally, collect: bool
    ) -> None:
        """Deliver the rows from number `first` on."""
        keys: tuple[int, ...] = unpack("Q", batch.keys)
        attempts: tuple[int, ...] = unpack("I", batch.attempts)
        offsets: tuple[int, ...] = unpack("I", batch.offsets)
        text_offsets: tuple[int, ...] = unpack("I", batch.text_offsets)
        for key in keys[first:]:
            request = self._live.get(key)
            if request is not None and request.steady:  # it came in another way than expected
                self.steady.release(request)
        if len(special) < len(keys) - first:
            now_s = self._clock()
            ids = _first_ids(batch.output_ids)
            plain = islice(zip(keys, attempts, offsets, text_offsets, ids, batch.texts, strict=True), first, None)
            others = self._take_plain_rows(plain, first, special, gaps, now_s, collect)
            self._let_join(batch.keys[8 * first : 8 * (others[0] if others else len(keys))], now_s)
        else:
            others = list(range(first, len(keys)))
        if others:
            self._take_rows(batch, others, keys, attempts, offsets, text_offsets, gaps)

    def _let_join(self, order: bytes, now_s: float) -> None:
        """These packed keys, each of a request that has just got one plain token, are expected again."""
        requests = [self._live[key] for key in unpack("Q", order)]
        if requests and all(request.measured for request in requests) and len(set(requests)) == len(requests):
            self.steady.join(order, requests, now_s)

    def _take_rows(
        self,
        batch: BatchStrOutput,
        rows: Iterable[int],
        keys: tuple[int, ...],
        attempts: tuple[int, ...],
        offsets: tuple[int, ...],
        text_offsets: tuple[int, ...],
        gaps: Tally,
    ) -> None:
        """Deliver the rows with these numbers, whatever they are: the first and the last of a request, several tokens
        or none, duplicates, what comes behind a gap."""
        ids = array("I", batch.output_ids.values)
        bounds = ragged_bounds(batch.output_ids, "I")
        texts, finishes = batch.texts, batch.finish_reasons
        extras = bool(finishes or batch.output_logprobs or batch.input_logprobs or batch.cached_tokens)
        live_get = self._live.get
        now_s = self._clock()
        slot = self._slot
        new_tokens = 0
        for row in rows:
            request = live_get(keys[row])
            if request is None:
                slot.add(SlotWord.LATE_ROWS)
                self._note_late_row()
                continue
            self.steady.release(request)  # its first row of this batch may just have made it steady
            start, end = bounds[row], bounds[row + 1]
            text = texts[row]
            if (
                offsets[row] == request.tokens
                and text_offsets[row] == request.chars
                and attempts[row] == request.attempt
                and end > start
            ):
                new_ids = ids[start:end]
                skip_tokens = 0
            else:
                judgement = judge_row(
                    attempt=request.attempt,
                    tokens=request.tokens,
                    chars=request.chars,
                    row_attempt=attempts[row],
                    row_offset=offsets[row],
                    row_tokens=end - start,
                    row_text_offset=text_offsets[row],
                    row_chars=len(text),
                    row_finishes=row in finishes,
                )
                if judgement.verdict is not Verdict.DELIVER:
                    self._count_undelivered(judgement.verdict, request)
                    continue
                skip_tokens = judgement.skip_tokens
                new_ids = ids[start + skip_tokens : end]
                text = text[judgement.skip_chars :]
            request.chars += len(text)
            count = len(new_ids)
            if count:
                request.tokens += count
                request.output_ids.extend(new_ids)
                if request.measured:
                    new_tokens += count
                if request.first_token_at_s is None:
                    self._first_token(request, now_s)
                else:
                    gaps.add(int((now_s - request.last_token_at_s) * 1e6))
                request.last_token_at_s = now_s
            if extras and self._take_extras(batch, row, request, text, new_ids, skip_tokens):
                continue
            if count or text:
                request.sink.row(request, text, new_ids, None)
            elif not request.admitted:
                request.admitted = True
                request.sink.admitted(request)
        slot.add(SlotWord.OUTPUT_TOKENS, new_tokens)

    def _take_plain_rows(
        self,
        rows: Iterable[PlainRow],
        first: int,
        special: Collection[int],
        gaps: Tally,
        now_s: float,
        collect: bool,
    ) -> list[int]:
        """Deliver the rows of one token that continue exactly where their request stands; `first` is the number of
        the first. Returns the numbers of the others, `special` included."""
        live_get = self._live.get
        others: list[int] = []
        new_tokens = 0
        before_s, of_before = now_s, 0  # rows of a step follow rows of one step: their gaps are counted together
        for row, (key, attempt, offset, text_offset, token_id, text) in enumerate(rows, first):
            request = live_get(key)
            if (
                request is None
                or request.tokens != offset
                or request.chars != text_offset
                or request.attempt != attempt
                or not offset
                or (special and row in special)
            ):
                others.append(row)
                continue
            request.tokens = offset + 1
            request.chars = text_offset + len(text)
            request.output_ids.append(token_id)
            if request.measured:
                new_tokens += 1
            if request.last_token_at_s is before_s:
                of_before += 1
            else:
                gaps.add_many(int((now_s - before_s) * 1e6), of_before)
                before_s, of_before = request.last_token_at_s, 1
            request.last_token_at_s = now_s
            line = request.text_line
            if line is None or collect or not text or not line.write(text, now_s):
                request.sink.row(request, text, (token_id,), None)
        gaps.add_many(int((now_s - before_s) * 1e6), of_before)
        self._slot.add(_OUTPUT_TOKENS, new_tokens)
        return others

    def _take_extras(
        self,
        batch: BatchStrOutput,
        row: int,
        request: LiveRequest,
        text: str,
        new_ids: array[int],
        skip_tokens: int,
    ) -> bool:
        """Columns few rows have. True when the row has been delivered here."""
        if row in batch.cached_tokens:
            request.cached_tokens = batch.cached_tokens[row]
        if row in batch.input_logprobs and not request.has_input_logprobs:  # a replay brings them again
            request.has_input_logprobs = True
            request.input_logprobs = batch.input_logprobs[row]
        logprobs = batch.output_logprobs.get(row)
        if logprobs is not None and skip_tokens:
            logprobs = logprobs.slice(skip_tokens)
        finish = batch.finish_reasons.get(row)
        if finish is not None:
            self._finish(request, text, new_ids, logprobs, finish)
            return True
        if logprobs is not None:
            request.sink.row(request, text, new_ids, logprobs)
            return True
        return False

    def _first_token(self, request: LiveRequest, now_s: float) -> None:
        request.first_token_at_s = now_s
        if not request.measured:
            return
        elapsed_us = int((now_s - request.submitted_at_s) * 1e6)
        slot = self._slot
        slot.add(SlotWord.TTFT_COUNT)
        slot.add(SlotWord.TTFT_SUM_US, elapsed_us)
        observe(slot, SlotWord.TTFT_BUCKETS, elapsed_us, LATENCY_BUCKETS)

    def _count_undelivered(self, verdict: Verdict, request: LiveRequest) -> None:
        if verdict is Verdict.GAP:
            self._slot.add(SlotWord.GAP_ROWS)
            self.gaps.append((request.key, request.attempt))
        elif verdict is Verdict.STALE:
            self._slot.add(SlotWord.STALE_ATTEMPT_ROWS)
        else:
            self._slot.add(SlotWord.DUPLICATE_ROWS)


def _check_columns(batch: BatchStrOutput) -> None:
    """Raise ValueError unless the columns read here speak for the same number of rows. In `Batch.check` all columns
    are looked at, and most batches have no others."""
    rows = len(batch.texts)
    if (
        len(batch.keys) != 8 * rows
        or any(len(column) != 4 * rows for column in (batch.attempts, batch.offsets, batch.text_offsets))
        or batch.output_ids.lengths is not None
        or len(batch.output_ids.values) != 4 * rows
        or batch.finish_reasons
        or batch.output_logprobs
        or batch.input_logprobs
        or batch.cached_tokens
    ):
        batch.check()


def _special_rows(batch: BatchStrOutput) -> Collection[int]:
    """The rows that are more, or less, than one token of text."""
    special: set[int] = set()
    if batch.finish_reasons or batch.output_logprobs or batch.input_logprobs or batch.cached_tokens:
        special.update(batch.finish_reasons, batch.output_logprobs, batch.input_logprobs, batch.cached_tokens)
    if batch.output_ids.lengths is not None:
        special.update(row for row, length in enumerate(unpack("I", batch.output_ids.lengths)) if length != 1)
    return special


def _first_ids(column: RaggedColumn) -> Sequence[int]:
    """The first id of each row (0 where there is none)."""
    ids: tuple[int, ...] = unpack("I", column.values)
    if column.lengths is None:
        return ids
    last = len(ids) - 1
    return [ids[min(start, last)] if ids else 0 for start in ragged_bounds(column, "I")[:-1]]
