"""The worker's side of every request: submit, take rows, deliver each token once, recover. No HTTP here.

Owns the live requests of one worker life. Rows arrive through `take_batch`, called by the inbox handler, which
hands new text straight to each request's sink: no queue, no task switch a token. `tick` follows the state page
and sends the list of live requests when it is due.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice
from typing import Protocol

from sglmt.delivery.aborts import AskedAborts
from sglmt.delivery.keys import make_key, make_life
from sglmt.delivery.live_requests import ListClock, PeerGenerations, columns_of_list
from sglmt.delivery.progress import Verdict, judge_row
from sglmt.ipc.state_page import HeaderWord, SlotWord
from sglmt.messages.columns import RaggedColumn, pack, ragged_bounds, unpack, unpack_ragged
from sglmt.messages.frame import Role, Scope
from sglmt.messages.registry import kind_of
from sglmt.messages.sampling import FinishReason
from sglmt.messages.to_detokenizer import BatchEmbeddingOutput
from sglmt.messages.to_scheduler import AbortReq, ControlMarker, LiveRequestsReq, ResumeReq
from sglmt.messages.to_worker import AbortsDone, BatchStrOutput, UnknownRequests
from sglmt.status.histograms import LATENCY_BUCKETS, Tally, observe
from sglmt.status.metric_words import count_early_end
from sglmt.workers.child import ChildContext
from sglmt.workers.live_request import LiveRequest, Sink, Submission
from sglmt.workers.peers import PeerOutbox
from sglmt.workers.steady_requests import SteadyRequests

ABORT_WITHIN_S = 10.0
# Looked up once: finding a member of an enumeration costs more than most of what is done with it.
_ROWS_IN, _OUTPUT_TOKENS = SlotWord.ROWS_IN, SlotWord.OUTPUT_TOKENS
_ITL_BUCKETS, _ITL_SUM_US = SlotWord.ITL_BUCKETS, SlotWord.ITL_SUM_US

PlainRow = tuple[int, int, int, int, int, str]
"""(key, attempt, offset, text offset, token id, text) of a row of one token."""


class OpenStream(Protocol):
    """A streaming answer under way."""

    def keep_alive(self, now_s: float) -> None:
        """Write a comment when nothing was written for long."""


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


class Frontend:
    """Live requests of one worker life, by key."""

    def __init__(self, child: ChildContext) -> None:
        self._child = child
        self.slot = child.slot
        self._clock = child.clock
        self._page = child.page
        self.life = make_life(child.index, child.generation)
        self._counter = 0
        self.live: dict[int, LiveRequest] = {}
        self.let_in = 0  # requests that handlers work on, before anything of them is in `live` and behind it
        next_hop = Role.ROUTER if child.args.mode == "multi" else Role.SCHEDULER
        self._peer = PeerOutbox(child, next_hop, 0)
        self._list_clock = ListClock()
        self._gaps: list[tuple[int, int]] = []
        self._aborts = AskedAborts()
        self._steady = SteadyRequests()
        self.open_streams: set[OpenStream] = set()

    # out

    def next_key(self) -> int:
        """A key no other request of this instance has."""
        self._counter += 1
        return make_key(self.life, self._counter)

    def submit(
        self, submission: Submission, choice: int, prompt_tokens: int, sink: Sink, measured: bool = True
    ) -> LiveRequest:
        """Send a new request; its answers go to `sink`. A probe of ours is not `measured`."""
        limit = self._child.args.max_resubmits
        request = LiveRequest(submission, choice, prompt_tokens, sink, limit, self._clock(), measured)
        self.live[request.key] = request
        self.slot[SlotWord.IN_FLIGHT] = len(self.live)
        self._list_clock.mark_submitted()
        self._send(submission)
        return request

    def cancel(self, requests: list[LiveRequest]) -> None:
        """Nobody waits for these any more: forget them and free their slots."""
        keys = [request.key for request in requests if self.live.pop(request.key, None) is not None]
        for request in requests:
            self._steady.release(request)
        if keys:
            self.slot[SlotWord.IN_FLIGHT] = len(self.live)
            self.slot.add(SlotWord.REQUESTS_ABORTED, len(keys))
            self._send(AbortReq(keys=keys))

    def count_prompt_tokens(self, tokens: int) -> None:
        """Prompt tokens sent to the engine."""
        self.slot.add(SlotWord.PROMPT_TOKENS, tokens)

    def abort_by_rid(
        self, rid: str | None, all_requests: bool, answered: Callable[[bool], object] = lambda carried_out: None
    ) -> None:
        """End requests of any worker by exact rid, or all. `answered` is told once whether it was carried out; False
        after `ABORT_WITHIN_S` without an answer, and then it may still be."""
        self._aborts.ask(rid, all_requests, self._clock() + ABORT_WITHIN_S, answered)
        self._send_aborts()

    def _send_aborts(self) -> None:
        for abort in self._aborts.due(self._clock()):
            request = AbortReq(
                rid=abort.rid,
                all_requests=abort.all_requests,
                life=self.life,
                number=abort.number,
                settled=self._aborts.settled,
            )
            self._send(request)

    def take_aborts_done(self, done: AbortsDone) -> None:
        """The scheduler has carried these out."""
        for number in done.numbers:
            self._aborts.answer(number)

    def confirm_control(self, version: int) -> None:
        """Tell the scheduler, behind everything sent so far, that this worker has applied `version`."""
        self._send(ControlMarker(life=self.life, version=version))

    def _send(self, message: object) -> None:
        self._peer.send(self._child.writer.frame(kind_of(message), Scope.SCHEDULER, message))
        self.slot.add(SlotWord.MESSAGES_OUT)

    # in

    def take_batch(self, batch: BatchStrOutput, more_follow: bool = False) -> None:
        """Deliver the rows of one message. Raises ValueError for a malformed one. When `more_follow` at once, sinks
        collect the rows, so that all leave in one write."""
        _check_columns(batch)
        rows = len(batch.texts)
        gaps = Tally(self.slot, _ITL_BUCKETS, LATENCY_BUCKETS)
        special = _special_rows(batch)
        steady = self._steady.expect(batch, special)
        if steady:
            ids = array("I", batch.output_ids.values[: 4 * steady])
            texts = batch.texts if steady == rows else batch.texts[:steady]
            now_s = self._clock()
            gaps.add_many(int((now_s - self._steady.last_token_at_s) * 1e6), steady)
            self._steady.deliver(ids, texts, now_s, more_follow)
            self.slot.add(_OUTPUT_TOKENS, steady)
        if steady < rows:
            self._take_others(batch, steady, special, gaps, more_follow)
        gaps.flush()
        self.slot.add(_ROWS_IN, rows)
        self.slot.add(_ITL_SUM_US, gaps.sum_us)

    def _take_others(
        self, batch: BatchStrOutput, first: int, special: Collection[int], gaps: Tally, collect: bool
    ) -> None:
        """Deliver the rows from number `first` on."""
        keys: tuple[int, ...] = unpack("Q", batch.keys)
        attempts: tuple[int, ...] = unpack("I", batch.attempts)
        offsets: tuple[int, ...] = unpack("I", batch.offsets)
        text_offsets: tuple[int, ...] = unpack("I", batch.text_offsets)
        for key in keys[first:]:
            request = self.live.get(key)
            if request is not None and request.steady:  # it came in another way than expected
                self._steady.release(request)
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
        requests = [self.live[key] for key in unpack("Q", order)]
        if requests and all(request.measured for request in requests) and len(set(requests)) == len(requests):
            self._steady.join(order, requests, now_s)

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
        live_get = self.live.get
        now_s = self._clock()
        slot = self.slot
        new_tokens = 0
        for row in rows:
            request = live_get(keys[row])
            if request is None:
                slot.add(SlotWord.LATE_ROWS)
                self._list_clock.mark_late_row()
                continue
            self._steady.release(request)  # its first row of this batch may just have made it steady
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
        live_get = self.live.get
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
        self.slot.add(_OUTPUT_TOKENS, new_tokens)
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

    def _finish(
        self,
        request: LiveRequest,
        text: str,
        new_ids: array[int],
        logprobs: object,
        finish: FinishReason,
    ) -> None:
        self.live.pop(request.key, None)
        self._steady.release(request)
        self.slot[SlotWord.IN_FLIGHT] = len(self.live)
        if request.measured:
            self._count_end(request, finish)
        request.sink.finished(request, text, new_ids, logprobs, finish)  # type: ignore[arg-type]

    def _count_end(self, request: LiveRequest, finish: FinishReason) -> None:
        slot = self.slot
        slot.add(SlotWord.CACHED_TOKENS, request.cached_tokens)
        if finish.kind in ("abort", "error"):
            count_early_end(slot, finish.code, finish.status)
            return
        elapsed_us = int((self._clock() - request.submitted_at_s) * 1e6)
        slot.add(SlotWord.E2E_SUM_US, elapsed_us)
        observe(slot, SlotWord.E2E_BUCKETS, elapsed_us, LATENCY_BUCKETS)

    def _first_token(self, request: LiveRequest, now_s: float) -> None:
        request.first_token_at_s = now_s
        if not request.measured:
            return
        elapsed_us = int((now_s - request.submitted_at_s) * 1e6)
        slot = self.slot
        slot.add(SlotWord.TTFT_COUNT)
        slot.add(SlotWord.TTFT_SUM_US, elapsed_us)
        observe(slot, SlotWord.TTFT_BUCKETS, elapsed_us, LATENCY_BUCKETS)

    def _count_undelivered(self, verdict: Verdict, request: LiveRequest) -> None:
        if verdict is Verdict.GAP:
            self.slot.add(SlotWord.GAP_ROWS)
            self._gaps.append((request.key, request.attempt))
        elif verdict is Verdict.STALE:
            self.slot.add(SlotWord.STALE_ATTEMPT_ROWS)
        else:
            self.slot.add(SlotWord.DUPLICATE_ROWS)

    def take_embeddings(self, batch: BatchEmbeddingOutput) -> None:
        """Deliver embedding rows. Raises ValueError for a malformed message."""
        batch.check()
        keys, attempts = unpack("Q", batch.keys), unpack("I", batch.attempts)
        vectors = unpack_ragged("f", batch.embeddings)
        for row, key in enumerate(keys):
            request = self.live.get(key)
            if request is None or request.attempt != attempts[row]:
                self.slot.add(SlotWord.LATE_ROWS)
                continue
            request.embedding = vectors[row]
            finish = batch.finish_reasons.get(row) or FinishReason(kind="stop")
            self._finish(request, "", array("I"), None, finish)
        self.slot.add(SlotWord.ROWS_IN, len(keys))

    def take_unknown(self, unknown: UnknownRequests) -> None:
        """The scheduler does not know these: submit them again."""
        for key, attempt in unknown.requests:
            request = self.live.get(key)
            if request is not None and request.attempt == attempt:
                self._resubmit(request)

    def _resubmit(self, request: LiveRequest) -> None:
        self._steady.release(request)
        if not request.budget.spend(request.tokens):
            self.fail(request, "engine_died", "the engine died too often without a new token for this request")
            return
        self.slot.add(SlotWord.RESUBMISSIONS)
        self._send(request.next_submission())

    def fail(self, request: LiveRequest, code: str, message: str, status: int = 500) -> None:
        """End a request by decision of this worker."""
        finish = FinishReason(kind="error", status=status, code=code, message=message)
        self._finish(request, "", array("I"), None, finish)

    # recovery

    def tick(self) -> None:
        """Follow the state page; send the list of live requests when it is due. Call every few milliseconds
        while something is kept back, at least every 50 ms."""
        self._peer.refresh()
        if self._gaps:
            self._send(ResumeReq(requests=self._gaps))
            self._gaps = []
        self._send_aborts()
        page = self._page
        peers = PeerGenerations(
            page.generation(Role.SCHEDULER, 0),
            page.generation(Role.ROUTER, 0),
            tuple(page.generation(Role.DETOKENIZER, index) for index in range(self._child.args.detokenizers)),
        )
        now_s = self._clock()
        if self._list_clock.is_due(now_s, peers, len(self.live), self._scheduler_asks()):
            self._send(self._list())
            self._list_clock.sent(now_s, len(self.live))

    def _scheduler_asks(self) -> bool:
        """Whether a scheduler that has taken over wants to hear what every worker waits for."""
        page = self._page
        return not page.header(HeaderWord.READY) and any(
            slot[SlotWord.RECOVERING] for slot in page.serving_slots(Role.SCHEDULER)
        )

    def _list(self) -> LiveRequestsReq:
        self._steady.write_positions()
        keys, attempts, offsets = columns_of_list(
            (request.key, request.attempt, request.tokens) for request in self.live.values()
        )
        return LiveRequestsReq(
            life=self.life,
            number=self._list_clock.next_number(),
            up_to_counter=self._counter,
            keys=pack("Q", keys),
            attempts=pack("I", attempts),
            offsets=pack("I", offsets),
        )

    def fail_waiting(self, waited_s: float, away_since_s: float, finish: FinishReason) -> None:
        """End requests that have no token yet and have waited `waited_s` for an engine that is away since monotonic
        `away_since_s`. What they had waited before, in its queue, does not count."""
        now_s = self._clock()
        for request in list(self.live.values()):
            if not request.tokens and now_s - max(request.submitted_at_s, away_since_s) >= waited_s:
                self._finish(request, "", array("I"), None, finish)

    def keep_streams_alive(self) -> None:
        """Comments on streams that have been silent for long. Call about once a second."""
        now_s = self._clock()
        for stream in list(self.open_streams):
            stream.keep_alive(now_s)

    def end_all(self, finish: FinishReason) -> None:
        """End every live request (drain deadline passed) and free their slots."""
        requests = list(self.live.values())
        for request in requests:
            self._finish(request, "", array("I"), None, finish)
        if requests:
            self._send(AbortReq(keys=[request.key for request in requests]))

    @property
    def unsent_bytes(self) -> int:
        """Bytes kept back because the next hop does not take them now."""
        return self._peer.backlog_bytes

    @property
    def dropped(self) -> int:
        """Frames the next hop did not take."""
        return self._peer.dropped
