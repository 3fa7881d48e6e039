"""The requests of a scheduler: waiting, running, ended but still named by their worker. Owned by the scheduler.

Every way a request can come in, move, end or be forgotten is one method here. What follows for the detokenizer is
only noted (`Emitter.mark`, `Emitter.drop`); the scheduler's loop sends it.
"""

from __future__ import annotations

from array import array
from math import inf

from sglmt.delivery.keys import life_of, split_life
from sglmt.delivery.ledger import Ledger, Record, Stage
from sglmt.engines.base import Capability, Engine, EngineOutput, EngineRequest, EngineStep
from sglmt.engines.continuing import Continuation, judge_continuation
from sglmt.errors import EngineError, EngineRefusal
from sglmt.ipc.state_page import SlotWord
from sglmt.messages.columns import unpack
from sglmt.messages.sampling import FinishReason, SamplingParams
from sglmt.messages.to_scheduler import (
    AbortReq,
    FinishReq,
    HeldTextsReq,
    LiveRequestsReq,
    ResumeReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglmt.workers.admission import AdmissionQueue
from sglmt.workers.child import ChildContext
from sglmt.workers.emission import Emitter, extras_of
from sglmt.workers.peers import worker_is_dead
from sglmt.workers.suspects import SuspectFile

Submission = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput
_NO_TOKENS = SamplingParams(max_new_tokens=0)


class RequestBook:
    """All requests of one scheduler life. `running` are in the engine; `unmoved` of these have yielded nothing."""

    def __init__(self, child: ChildContext, engine: Engine, emitter: Emitter) -> None:
        self._child = child
        self._engine = engine
        self._emitter = emitter
        self._clock = child.clock
        self._capabilities = engine.info().capabilities
        self._worker_is_dead = worker_is_dead(child.page)
        self._deadlines: dict[int, float] = {}
        self._next_deadline_s = inf  # none of them is earlier
        self.ledger = Ledger()
        self.queue = AdmissionQueue()
        self.running: dict[int, Record] = {}
        self.unmoved: set[int] = set()
        self.trial: Record | None = None  # the suspect that is in the engine now, to see whether it dies of it
        self.standing: list[AbortReq] = []  # aborts that also end what is submitted again
        self.suspects = SuspectFile(child.run_dir / "suspects", child.args.max_running_requests)

    # in

    def submit(self, request: Submission) -> None:
        """Take a submission that is news: queue it, or end it with the reason it is refused. Raises ValueError."""
        if not self.ledger.is_news(request.key, request.attempt):
            self._child.slot.add(SlotWord.DUPLICATE_ROWS)
            return
        if self._worker_is_dead(*split_life(life_of(request.key))):
            self._child.slot.add(SlotWord.LATE_ROWS)
            return
        if len(request.input_ids) % 4:
            raise ValueError(f"{len(request.input_ids)} bytes of prompt ids are not whole ids")
        prefix = array("I")
        wants_start = False
        if isinstance(request, TokenizedGenerateReqInput):
            prefix.frombytes(request.prefix_ids)
            wants_start = bool(prefix) or request.confirm_admission
        taken = self.ledger.rid_is_taken(request.rid, request.group)
        record = Record(request.key, request.attempt, request.rid, request.group, request, prefix)
        replaced = self.ledger.add(record)
        if replaced is not None:
            self._release(replaced)
            self._emitter.drop(replaced.key)
        refusal = self._refusal(request, prefix, taken)
        if refusal is not None:
            self.end(record, refusal)
            return
        if request.deadline_s is not None:
            self._deadlines[request.key] = request.deadline_s
            self._next_deadline_s = min(self._next_deadline_s, request.deadline_s)
        self.queue.push(record, request.priority, suspect=request.key in self.suspects.suspects)
        if wants_start:
            self._emitter.mark(record)

    def _refusal(self, request: Submission, prefix: array[int], rid_taken: bool) -> FinishReason | None:
        """Why a submission is not taken, None when it is."""
        if request.key in self.suspects.convicted:
            return abort_finish(500, "engine_died", "the engine died twice on this request", kind="error")
        for abort in self.standing if request.attempt > 1 else ():
            if abort.all_requests or abort.rid == request.rid:
                return abort_finish(499, "aborted", abort.message)
        if rid_taken and request.attempt == 1:
            return abort_finish(400, "duplicate_rid", f"rid {request.rid!r} belongs to another live request")
        limit = self._child.args.max_queued_requests
        # Many may arrive in one turn, before any is admitted: the engine's free slots are places too, no more.
        places = limit + self._child.args.max_running_requests - len(self.running)
        if len(self.queue) >= places and request.attempt == 1:
            return FinishReason(
                kind="abort",
                status=429,
                code="queue_full",
                message=f"{len(self.queue)} requests are waiting, the limit is {limit}; try again later",
                retry_after_s=1,
            )
        engine_request = _engine_request(request, array("I"), prefix)
        try:
            self._engine.check(engine_request)
        except EngineRefusal as error:
            return abort_finish(400, "unsupported_by_engine", str(error))
        continuation = judge_continuation(engine_request, self._capabilities)
        return self._cannot_continue(continuation) if continuation.how == Capability.REFUSED else None

    def _cannot_continue(self, continuation: Continuation) -> FinishReason:
        features = ", ".join(f"continue.{feature}" for feature in continuation.features)
        engine = self._engine.info().name
        message = f"the answer was interrupted, and engine {engine} does not support {features}; ask again"
        return abort_finish(500, "cannot_continue", message, kind="error")

    def admit(self) -> None:
        """Move waiting requests into the engine, as far as it has room; suspects one at a time."""
        if self.trial is not None:
            return
        limit = self._child.args.max_running_requests
        records: list[Record] = []
        while len(self.running) + len(records) < limit and (record := self.queue.pop()) is not None:
            records.append(record)
        if records:
            self._start(records)
        if not self.unmoved and len(self.running) < limit and (suspect := self.queue.pop_suspect()):
            self.trial = suspect
            self._start([suspect])

    def _start(self, records: list[Record]) -> None:
        """Give requests to the engine. They are written down as being in there before the first of them is."""
        self.unmoved.update(record.key for record in records)
        with self.suspects.inside_engine(self.unmoved, on_trial=self.trial is not None):
            for record in records:
                self._start_one(record)

    def _start_one(self, record: Record) -> None:
        request = record.payload
        assert isinstance(request, TokenizedGenerateReqInput | TokenizedEmbeddingReqInput)
        record.moved = record.plain = False  # it may have been in the engine before
        engine_request = _engine_request(request, array("I", request.input_ids), record.output_ids)
        continuation = judge_continuation(engine_request, self._capabilities)
        if continuation.how == Capability.REFUSED:  # taken out by a pause; others were refused when they came
            self.end(record, self._cannot_continue(continuation))
            return
        try:
            self._engine.submit(engine_request)
        except EngineError as error:
            self.end(record, abort_finish(500, "engine_error", str(error), kind="error"))
            return
        if continuation.how == Capability.APPROXIMATE:
            self._child.slot.add(SlotWord.APPROXIMATE_RESUMES)
        record.stage = Stage.RUNNING
        self.running[record.key] = record

    # out

    def take_step(self, step: EngineStep) -> None:
        """What a step of the engine brought. The emitter has to be flushed next: it holds rows of the step."""
        for record, token_id in self._emitter.add_plain(self.running, step.keys, step.token_ids):
            record.output_ids.append(token_id)
            if not record.moved:
                self._moved(record)
            self._emitter.mark(record)
        for output in step.outputs:
            self.take_output(output)

    def take_output(self, output: EngineOutput) -> None:
        """What a step of the engine brought for one request."""
        record = self.running.get(output.key)
        if record is None:
            return
        if output.token_ids:
            record.output_ids.extend(output.token_ids)
            if not record.moved:
                self._moved(record)
        if output.logprobs is not None:
            extras_of(record).add_logprobs(output.logprobs)
        if output.input_logprobs is not None:
            extras_of(record).input_logprobs = output.input_logprobs
        if output.cached_tokens is not None:
            extras_of(record).cached_tokens = output.cached_tokens
        if output.embedding is not None:
            extras_of(record).embedding = output.embedding
        if output.finish_kind is not None:
            del self.running[record.key]
            self._deadlines.pop(record.key, None)
            self._moved(record)
            record.stage = Stage.FINISHED
            record.finish = (
                abort_finish(500, "engine_error", output.error or "the engine failed", kind="error")
                if output.finish_kind == "error"
                else FinishReason(kind=output.finish_kind, matched=output.matched_id)
            )
            self.ledger.release_rid(record)
        self._emitter.mark(record)

    def _moved(self, record: Record) -> None:
        """A running request yielded something: no suspect any more."""
        record.moved = True
        self.unmoved.discard(record.key)
        self.suspects.suspects.discard(record.key)
        if self.trial is record:
            self.trial = None

    def end(self, record: Record, finish: FinishReason) -> None:
        """End a request by decision of the scheduler; the worker is told through its detokenizer."""
        self._release(record)
        record.stage = Stage.FINISHED
        record.finish = finish
        record.finish_sent = False
        self.ledger.release_rid(record)
        self._emitter.mark(record)

    def _release(self, record: Record) -> None:
        """Free queue place and engine slot."""
        self.queue.discard(record.key)
        self._deadlines.pop(record.key, None)
        self.unmoved.discard(record.key)
        if self.trial is record:
            self.trial = None
        if self.running.pop(record.key, None) is not None:
            self._engine.abort(record.key)

    def forget(self, record: Record) -> None:
        """Its worker no longer wants it: free everything, here and at its detokenizer."""
        self._release(record)
        self.ledger.remove(record.key)
        self._emitter.drop(record.key)

    def retract_all(self) -> None:
        """Take every running request out of the engine and back into the queue; it continues where it stands."""
        for record in list(self.running.values()):
            request, deadline_s = record.payload, self._deadlines.get(record.key)
            self._release(record)
            record.stage = Stage.QUEUED
            if deadline_s is not None:
                self._deadlines[record.key] = deadline_s
            if isinstance(request, TokenizedGenerateReqInput | TokenizedEmbeddingReqInput):
                self.queue.push(record, request.priority, suspect=record.key in self.suspects.suspects)

    def end_all(self, finish: FinishReason) -> None:
        """End every request that has not ended."""
        for record in list(self.ledger.records.values()):
            if record.stage != Stage.FINISHED:
                self.end(record, finish)

    def end_overdue(self) -> None:
        """End requests whose deadline has passed; forget those whose worker is gone."""
        now_s = self._clock()
        if now_s >= self._next_deadline_s:
            overdue = [key for key, deadline_s in self._deadlines.items() if now_s >= deadline_s]
            for key in overdue:
                finish = abort_finish(504, "deadline_exceeded", "the request's deadline has passed")
                self.end(self.ledger.records[key], finish)
            self._next_deadline_s = min(self._deadlines.values(), default=inf)
        for life in self.ledger.lives():
            if self._worker_is_dead(*split_life(life)):
                for record in self.ledger.forget_life(life):
                    self.forget(record)

    # what peers report

    def abort(self, request: AbortReq) -> None:
        """End or forget requests, as somebody asked."""
        for key in request.keys:
            record = self.ledger.records.get(key)
            if record is not None:
                self.forget(record)
        keys: list[int] = []
        if request.all_requests:
            keys = [key for key, record in self.ledger.records.items() if record.stage != Stage.FINISHED]
        elif request.rid is not None:
            keys = self.ledger.keys_of_rid(request.rid)
        for key in keys:
            self.end(self.ledger.records[key], abort_finish(499, "aborted", request.message))

    def finish_by_detokenizer(self, request: FinishReq) -> None:
        """A detokenizer has ended a request: free its slot, keep what was told."""
        record = self.ledger.get(request.key, request.attempt)
        if record is None:
            return
        self._release(record)
        del record.output_ids[request.output_tokens :]
        record.stage = Stage.FINISHED
        record.finish = request.finish
        # Being replayed just now: the rest, and the finish, are still to go.
        record.finish_sent = record.start_sent and record.sent >= len(record.output_ids)
        record.sent = min(record.sent, len(record.output_ids))
        self.ledger.release_rid(record)

    def resume(self, request: ResumeReq) -> None:
        """Send requests again from their first token: something of them was lost."""
        for key, attempt in request.requests:
            record = self.ledger.get(key, attempt)
            if record is not None:
                self._replay(record)

    def answer_held_texts(self, request: HeldTextsReq) -> None:
        """Let a detokenizer forget what nobody here knows."""
        for key in unpack("Q", request.keys):
            if key not in self.ledger.records:
                self._emitter.drop(key)

    def _replay(self, record: Record) -> None:
        record.rewind()
        self._emitter.mark(record)
        self._child.slot.add(SlotWord.RESUMES)

    def reconcile(self, request: LiveRequestsReq) -> list[tuple[int, int]]:
        """Act on a worker's list; returns the (key, attempt) nobody here knows. Raises ValueError."""
        if self._worker_is_dead(*split_life(request.life)):
            return []
        listed = list(
            zip(
                unpack("Q", request.keys),
                unpack("I", request.attempts),
                unpack("I", request.offsets),
                strict=True,
            )
        )
        result = self.ledger.reconcile(request.life, request.number, request.up_to_counter, listed, self._clock())
        for record in result.resume:
            self._replay(record)
        for record in result.forget:
            self.forget(record)
        return result.unknown


def _engine_request(request: Submission, prompt_ids: array[int], prefix_ids: array[int]) -> EngineRequest:
    if isinstance(request, TokenizedEmbeddingReqInput):
        return EngineRequest(key=request.key, prompt_ids=prompt_ids, prefix_ids=[], sampling=_NO_TOKENS, embedding=True)
    return EngineRequest(
        key=request.key,
        prompt_ids=prompt_ids,
        prefix_ids=prefix_ids,
        sampling=request.sampling,
        logprobs=request.logprobs,
        lora_name=request.lora_name,
    )


def abort_finish(status: int, code: str, message: str, kind: str = "abort") -> FinishReason:
    """A finish by decision of the scheduler, with the HTTP status it means to a client."""
    return FinishReason(kind=kind, status=status, code=code, message=message)
