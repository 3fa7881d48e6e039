"""Scheduler: waiting and running requests, the engine, and every request's output ids. Runs as
`sglmt::scheduler`.

One thread: receive, admit, send what is new, step the engine, send what it brought. Its inbox takes
submissions, aborts and lists from workers (through the router in multi mode) and what detokenizers found; its
rows go to the detokenizers. It ends when asked, or with the engine.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from sglmt.control.state import ControlState
from sglmt.delivery.keys import life_of, make_life, split_life
from sglmt.delivery.ledger import Ledger, Record, Stage
from sglmt.engines.base import Engine, EngineOutput, EngineRequest
from sglmt.errors import EngineError, EngineRefusal
from sglmt.ipc.addresses import ipc_address
from sglmt.ipc.state_page import Phase, SlotWord
from sglmt.messages.columns import unpack
from sglmt.messages.frame import FrameError, Role, Scope
from sglmt.messages.registry import kind_of
from sglmt.messages.sampling import FinishReason, SamplingParams
from sglmt.messages.to_scheduler import (
    AbortReq,
    ControlMarker,
    FinishReq,
    HeldTextsReq,
    LiveRequestsReq,
    ResumeReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglmt.messages.to_worker import UnknownRequests
from sglmt.server_args import SchedulerInfo
from sglmt.workers.admission import AdmissionQueue
from sglmt.workers.child import ChildContext
from sglmt.workers.control_follower import ControlFollower, PendingChange
from sglmt.workers.counters import FrameReceiver
from sglmt.workers.emission import Emitter, extras_of
from sglmt.workers.peers import PeerOutbox, worker_is_dead
from sglmt.workers.poll_loop import PollLoop
from sglmt.workers.suspects import SuspectFile

MARKERS_WITHIN_S = 2.0  # a worker that hangs longer does not hold up a control change
_NO_TOKENS = SamplingParams(max_new_tokens=0)


class Scheduler:
    """Admission, the engine loop, and the answers to lists."""

    def __init__(self, child: ChildContext, engine: Engine) -> None:
        self._child = child
        self._engine = engine
        self._clock = child.clock
        address = ipc_address(child.run_dir, Role.SCHEDULER, child.index, child.generation)
        self._inbox = child.transport.inbox(address)
        self._receiver = FrameReceiver(child)
        self._emitter = Emitter(child, child.args.detokenizers)
        self._router = PeerOutbox(child, Role.ROUTER, 0) if child.args.mode == "multi" else None
        self._worker_is_dead = worker_is_dead(child.page)
        self._ledger = Ledger()
        self._queue = AdmissionQueue()
        self._running: dict[int, Record] = {}
        self._unmoved: set[int] = set()  # running, nothing yielded yet
        self._deadlines: dict[int, float] = {}
        self._trial: Record | None = None
        self._suspects = SuspectFile(child.run_dir / "suspects", child.args.max_running_requests)
        self._handlers: dict[type, Callable[[Any], None]] = {
            TokenizedGenerateReqInput: self._submit,
            TokenizedEmbeddingReqInput: self._submit,
            AbortReq: self._abort,
            FinishReq: self._finish_by_detokenizer,
            ResumeReq: self._resume,
            LiveRequestsReq: self._reconcile,
            ControlMarker: self._mark_control,
            HeldTextsReq: self._answer_held_texts,
        }
        self._control = ControlFollower(child, self._begin_change)
        self._change = PendingChange()
        self._paused = self._control.state.paused
        self._set_up_engine(ControlState(), self._control.state)

    # the loop

    def run(self) -> None:
        """Serve until asked to stop."""
        loop = PollLoop(self._child, self._inbox)
        self._child.ready(self._info())
        while not self._child.stop_requested:
            loop.wait(self._next_step_at_s())
            self.turn(loop.housekeeping_is_due())
        self._inbox.close()
        self._engine.close()

    def turn(self, housekeeping: bool) -> None:
        """One turn of the loop: all that can be done now."""
        self._receive()
        self._admit()
        self._emitter.flush()
        self._step()
        if housekeeping:
            self._housekeeping()

    def _info(self) -> SchedulerInfo:
        info = self._engine.info()
        return SchedulerInfo(
            engine=info.name,
            engine_version=info.version,
            model_path=str(self._child.arguments.model_info["model_path"]),
            context_length=info.context_length,
            vocab_size=info.vocab_size,
            max_running_requests=self._child.args.max_running_requests,
            max_total_tokens=info.max_total_tokens,
            capabilities=info.capabilities,
            is_simulator=info.is_simulator,
            embedding_dimensions=info.embedding_dimensions,
        )

    def _next_step_at_s(self) -> float | None:
        if self._paused or not self._engine.has_work():
            return None
        return self._engine.next_step_at_s() or 0.0

    def _receive(self) -> None:
        while (frame := self._inbox.receive()) is not None:
            prefix = self._receiver.prefix(frame)
            if prefix is None:
                continue
            message = self._receiver.message(prefix, frame)
            handler = self._handlers.get(type(message))
            if handler is not None:
                self._handle(handler, message)
            elif message is not None:
                self._child.slot.add(SlotWord.UNROUTABLE)

    def _handle(self, handler: Callable[[Any], None], message: object) -> None:
        """A message whose content is inconsistent costs that message only."""
        try:
            handler(message)
        except ValueError as error:
            self._receiver.refuse(FrameError("inconsistent", f"{type(message).__name__}: {error}"))

    def _step(self) -> None:
        engine = self._engine
        if self._paused or not engine.has_work():
            return
        at_s = engine.next_step_at_s()
        if at_s is not None and self._clock() < at_s:
            return
        slot = self._child.slot
        slot.enter(Phase.STEPPING)
        with self._suspects.inside_engine(self._unmoved, on_trial=self._trial is not None):
            outputs = engine.step()
        slot.enter(Phase.READY)
        if outputs:
            for output in outputs:
                self._take_output(output)
            self._emitter.flush()

    def _housekeeping(self) -> None:
        slot = self._child.slot
        slot.add(SlotWord.RESUMES, self._emitter.refresh(self._ledger.records))
        if self._router is not None:
            self._router.refresh()
        now_s = self._clock()
        for key, deadline_s in list(self._deadlines.items()):
            record = self._ledger.records.get(key)
            if record is None or record.stage == Stage.FINISHED:
                del self._deadlines[key]
            elif now_s >= deadline_s:
                self._end(record, _abort(504, "deadline_exceeded", "the request's deadline has passed"))
        for life in self._ledger.lives():
            if self._worker_is_dead(*split_life(life)):
                for record in self._ledger.forget_life(life):
                    self._forget(record)
        self._control.poll()
        self._complete_change()
        self._emitter.flush()
        slot[SlotWord.RUNNING] = len(self._running)
        slot[SlotWord.QUEUED] = len(self._queue)
        slot[SlotWord.IN_FLIGHT] = len(self._running) + len(self._queue)
        slot[SlotWord.RETAINED] = len(self._ledger.records)
        slot[SlotWord.BACKLOG_BYTES] = self._emitter.backlog_bytes
        slot[SlotWord.DROPPED_MESSAGES] = self._emitter.dropped + (self._router.dropped if self._router else 0)

    # requests in

    def _submit(self, request: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput) -> None:
        if not self._ledger.is_news(request.key, request.attempt):
            self._child.slot.add(SlotWord.DUPLICATE_ROWS)
            return
        if self._worker_is_dead(*split_life(life_of(request.key))):
            self._child.slot.add(SlotWord.LATE_ROWS)
            return
        if len(request.input_ids) % 4:
            raise ValueError(f"{len(request.input_ids)} bytes of prompt ids are not whole ids")
        prefix: list[int] = []
        wants_start = False
        if isinstance(request, TokenizedGenerateReqInput):
            prefix = list(unpack("I", request.prefix_ids))
            wants_start = bool(prefix) or request.confirm_admission
        taken = self._ledger.rid_is_taken(request.rid, request.group)
        record = Record(request.key, request.attempt, request.rid, request.group, request, prefix)
        replaced = self._ledger.add(record)
        if replaced is not None:
            self._release(replaced)
            self._emitter.drop(replaced.key)
        refusal = self._refusal(request, taken)
        if refusal is not None:
            self._end(record, refusal)
            return
        if request.deadline_s is not None:
            self._deadlines[request.key] = request.deadline_s
        self._queue.push(record, request.priority, suspect=request.key in self._suspects.suspects)
        if wants_start:
            self._emitter.mark(record)

    def _refusal(
        self, request: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput, rid_taken: bool
    ) -> FinishReason | None:
        if request.key in self._suspects.convicted:
            return _abort(500, "engine_died", "the engine died twice on this request", kind="error")
        if rid_taken and request.attempt == 1:
            return _abort(400, "duplicate_rid", f"rid {request.rid!r} belongs to another live request")
        limit = self._child.args.max_queued_requests
        # Many may arrive in one turn, before any is admitted: the engine's free slots are places too, no more.
        places = limit + self._child.args.max_running_requests - len(self._running)
        if len(self._queue) >= places and request.attempt == 1:
            return FinishReason(
                kind="abort",
                status=429,
                code="queue_full",
                message=f"{len(self._queue)} requests are waiting, the limit is {limit}; try again later",
                retry_after_s=1,
            )
        try:
            self._engine.check(_engine_request(request, []))
        except EngineRefusal as error:
            return _abort(400, "unsupported_by_engine", str(error))
        return None

    def _admit(self) -> None:
        if self._paused or self._trial is not None:
            return
        limit = self._child.args.max_running_requests
        while len(self._running) < limit and (record := self._queue.pop()) is not None:
            self._start(record)
        if not self._unmoved and len(self._running) < limit and (suspect := self._queue.pop_suspect()):
            self._trial = suspect
            self._start(suspect)

    def _start(self, record: Record) -> None:
        request = record.payload
        assert isinstance(request, TokenizedGenerateReqInput | TokenizedEmbeddingReqInput)
        self._unmoved.add(record.key)
        with self._suspects.inside_engine(self._unmoved, on_trial=self._trial is not None):
            try:
                self._engine.submit(_engine_request(request, record.output_ids))
            except EngineError as error:
                self._end(record, _abort(500, "engine_error", str(error), kind="error"))
                return
        record.stage = Stage.RUNNING
        self._running[record.key] = record

    # output

    def _take_output(self, output: EngineOutput) -> None:
        record = self._running.get(output.key)
        if record is None:
            return
        if output.token_ids:
            record.output_ids.extend(output.token_ids)
            if record.key in self._unmoved:
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
            del self._running[record.key]
            self._moved(record)
            record.stage = Stage.FINISHED
            record.finish = (
                _abort(500, "engine_error", output.error or "the engine failed", kind="error")
                if output.finish_kind == "error"
                else FinishReason(kind=output.finish_kind, matched=output.matched_id)
            )
            self._ledger.release_rid(record)
        self._emitter.mark(record)

    def _moved(self, record: Record) -> None:
        """A running request yielded something: no suspect any more."""
        self._unmoved.discard(record.key)
        self._suspects.suspects.discard(record.key)
        if self._trial is record:
            self._trial = None

    def _end(self, record: Record, finish: FinishReason) -> None:
        """End a request by decision of the scheduler; the worker is told through its detokenizer."""
        self._release(record)
        record.stage = Stage.FINISHED
        record.finish = finish
        record.finish_sent = False
        self._ledger.release_rid(record)
        self._emitter.mark(record)

    def _release(self, record: Record) -> None:
        """Free queue place and engine slot."""
        self._queue.discard(record.key)
        self._deadlines.pop(record.key, None)
        self._unmoved.discard(record.key)
        if self._trial is record:
            self._trial = None
        if self._running.pop(record.key, None) is not None:
            self._engine.abort(record.key)

    def _forget(self, record: Record) -> None:
        """Its worker no longer wants it: free everything, here and at its detokenizer."""
        self._release(record)
        self._ledger.remove(record.key)
        self._emitter.drop(record.key)

    # control state

    def _begin_change(self, before: ControlState, after: ControlState) -> bool:
        """Take note of a change; it is carried out when what workers sent before it is here."""
        self._change.begin(before, after, self._clock() + MARKERS_WITHIN_S)
        return False

    def _mark_control(self, marker: ControlMarker) -> None:
        self._change.mark(marker.life, marker.version)
        self._complete_change()

    def _complete_change(self) -> None:
        """Carry out a change once every serving worker has confirmed it on its data path (or was given up)."""
        lives = [make_life(*life) for life in self._child.page.live(Role.TOKENIZER_WORKER)]
        change = self._change.take(lives, self._clock())
        if change is None:
            return
        before, after = change
        self._paused = after.paused
        if after.paused and not before.paused:
            self._pause(after.pause_mode)
        try:
            self._set_up_engine(before, after)
        except EngineError as error:
            self._control.confirm(after.version, str(error))
            return
        flushed = after.flushes == before.flushes or self._engine.flush_cache()
        self._control.confirm(after.version, None if flushed else "requests are running, nothing was flushed")

    def _pause(self, mode: str) -> None:
        if mode == "abort":
            for record in list(self._ledger.records.values()):
                if record.stage != Stage.FINISHED:
                    self._end(record, _abort(503, "paused", "generation was paused and running requests aborted"))
        elif mode == "retract":
            for record in list(self._running.values()):
                request, deadline_s = record.payload, self._deadlines.get(record.key)
                self._release(record)
                record.stage = Stage.QUEUED
                if deadline_s is not None:
                    self._deadlines[record.key] = deadline_s
                if isinstance(request, TokenizedGenerateReqInput | TokenizedEmbeddingReqInput):
                    self._queue.push(record, request.priority, suspect=record.key in self._suspects.suspects)

    def _set_up_engine(self, before: ControlState, after: ControlState) -> None:
        """Bring adapters and weights from one state to another. Raises EngineError; what was done stays done."""
        if after.weights_path is not None and after.weights_path != before.weights_path:
            self._engine.update_weights(after.weights_path)
        for name in before.adapters.keys() - after.adapters.keys():
            self._engine.unload_adapter(name)
        for name, path in after.adapters.items():
            if before.adapters.get(name) != path:
                self._engine.load_adapter(name, path)

    # what peers report

    def _abort(self, request: AbortReq) -> None:
        for key in request.keys:
            record = self._ledger.records.get(key)
            if record is not None:
                self._forget(record)
        keys: list[int] = []
        if request.all_requests:
            keys = [key for key, record in self._ledger.records.items() if record.stage != Stage.FINISHED]
        elif request.rid is not None:
            keys = self._ledger.keys_of_rid(request.rid)
        for key in keys:
            self._end(self._ledger.records[key], _abort(499, "aborted", request.message))

    def _finish_by_detokenizer(self, request: FinishReq) -> None:
        record = self._ledger.get(request.key, request.attempt)
        if record is None:
            return
        self._release(record)
        del record.output_ids[request.output_tokens :]
        record.stage = Stage.FINISHED
        record.finish = request.finish
        # Being replayed just now: the rest, and the finish, are still to go.
        record.finish_sent = record.start_sent and record.sent >= len(record.output_ids)
        record.sent = min(record.sent, len(record.output_ids))
        self._ledger.release_rid(record)

    def _resume(self, request: ResumeReq) -> None:
        for key, attempt in request.requests:
            record = self._ledger.get(key, attempt)
            if record is not None:
                self._replay(record)

    def _answer_held_texts(self, request: HeldTextsReq) -> None:
        for key in unpack("Q", request.keys):
            if key not in self._ledger.records:
                self._emitter.drop(key)

    def _replay(self, record: Record) -> None:
        record.rewind()
        self._emitter.mark(record)
        self._child.slot.add(SlotWord.RESUMES)

    def _reconcile(self, request: LiveRequestsReq) -> None:
        index, generation = split_life(request.life)
        if self._worker_is_dead(index, generation):
            return
        listed = list(
            zip(
                unpack("Q", request.keys),
                unpack("I", request.attempts),
                unpack("I", request.offsets),
                strict=True,
            )
        )
        result = self._ledger.reconcile(request.life, request.number, request.up_to_counter, listed, self._clock())
        for record in result.resume:
            self._replay(record)
        for record in result.forget:
            self._forget(record)
        if result.unknown:
            reply = UnknownRequests(requests=result.unknown)
            frame = self._child.writer.frame(kind_of(reply), Scope.WORKER, reply, index, generation)
            if self._router is not None:
                self._router.send(frame)
            else:
                self._emitter.send_to(0, frame)


def _engine_request(
    request: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput, prefix_ids: list[int]
) -> EngineRequest:
    prompt_ids = array("I", request.input_ids)
    if isinstance(request, TokenizedEmbeddingReqInput):
        return EngineRequest(key=request.key, prompt_ids=prompt_ids, prefix_ids=[], sampling=_NO_TOKENS, embedding=True)
    return EngineRequest(
        key=request.key,
        prompt_ids=prompt_ids,
        prefix_ids=list(prefix_ids),
        sampling=request.sampling,
        logprobs=request.logprobs,
        lora_name=request.lora_name,
    )


def _abort(status: int, code: str, message: str, kind: str = "abort") -> FinishReason:
    return FinishReason(kind=kind, status=status, code=code, message=message)


def run(child: ChildContext) -> None:
    """Entry of the role: load the engine, then serve."""
    from sglmt.engines.factory import make_engine
    from sglmt.tokenizer.model_info import ModelInfo

    child.slot.enter(Phase.LOADING)
    model = msgspec.convert(child.arguments.model_info, ModelInfo)
    Scheduler(child, make_engine(child.args, model, child.cache_dir)).run()
