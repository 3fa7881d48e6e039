"""The worker's side of every request: submit, take rows, deliver each token once, recover. No HTTP here.

Owns the live requests of one worker life. Rows arrive through `take_batch`, called by the inbox handler, and are
delivered by `LiveRows`. `tick` follows the state page and sends the list of live requests when it is due.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Protocol

from sglmt.delivery.aborts import AskedAborts
from sglmt.delivery.keys import make_key, make_life
from sglmt.delivery.live_requests import ListClock, PeerGenerations, columns_of_list
from sglmt.ipc.state_page import HeaderWord, SlotWord
from sglmt.messages.columns import pack, unpack, unpack_ragged
from sglmt.messages.frame import Role, Scope
from sglmt.messages.registry import kind_of
from sglmt.messages.sampling import FinishReason, TokenLogprobs
from sglmt.messages.to_detokenizer import BatchEmbeddingOutput
from sglmt.messages.to_scheduler import AbortReq, ControlMarker, LiveRequestsReq, ResumeReq
from sglmt.messages.to_worker import AbortsDone, BatchStrOutput, UnknownRequests
from sglmt.status.histograms import LATENCY_BUCKETS, observe
from sglmt.status.metric_words import count_early_end
from sglmt.workers.child import ChildContext
from sglmt.workers.live_request import LiveRequest, Sink, Submission
from sglmt.workers.live_rows import LiveRows
from sglmt.workers.peers import PeerOutbox

ABORT_WITHIN_S = 10.0


class OpenStream(Protocol):
    """A streaming answer under way."""

    def keep_alive(self, now_s: float) -> None:
        """Write a comment when nothing was written for long."""


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
        self._aborts = AskedAborts()
        self.rows = LiveRows(self.live, self.slot, self._clock, self._finish, self._list_clock.mark_late_row)
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
            self.rows.steady.release(request)
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
        """Deliver the rows of one message, see `LiveRows`. Raises ValueError for a malformed one."""
        self.rows.take_batch(batch, more_follow)

    def _finish(
        self,
        request: LiveRequest,
        text: str,
        new_ids: array[int],
        logprobs: TokenLogprobs | None,
        finish: FinishReason,
    ) -> None:
        self.live.pop(request.key, None)
        self.rows.steady.release(request)
        self.slot[SlotWord.IN_FLIGHT] = len(self.live)
        if request.measured:
            self._count_end(request, finish)
        request.sink.finished(request, text, new_ids, logprobs, finish)

    def _count_end(self, request: LiveRequest, finish: FinishReason) -> None:
        slot = self.slot
        slot.add(SlotWord.CACHED_TOKENS, request.cached_tokens)
        if finish.kind in ("abort", "error"):
            count_early_end(slot, finish.code, finish.status)
            return
        elapsed_us = int((self._clock() - request.submitted_at_s) * 1e6)
        slot.add(SlotWord.E2E_SUM_US, elapsed_us)
        observe(slot, SlotWord.E2E_BUCKETS, elapsed_us, LATENCY_BUCKETS)

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
        self.rows.steady.release(request)
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
        if self.rows.gaps:
            self._send(ResumeReq(requests=self.rows.gaps))
            self.rows.gaps = []
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
        self.rows.steady.write_positions()
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
