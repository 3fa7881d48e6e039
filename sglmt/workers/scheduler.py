"""Scheduler: waiting and running requests, the engine, and every request's output ids. Runs as
`sglmt::scheduler`.

One thread: receive, admit, send what is new, step the engine, send what it brought. Its inbox takes
submissions, aborts and lists from workers (through the router in multi mode) and what detokenizers found; its
rows go to the detokenizers. The requests are in the `RequestBook`, control changes in `EngineControl`; this is
the loop around them. It ends when asked, or with the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from sglmt.delivery.keys import split_life
from sglmt.engines.base import Engine
from sglmt.ipc.addresses import ipc_address
from sglmt.ipc.state_page import Phase, SlotWord
from sglmt.messages.frame import FrameError, Role, Scope
from sglmt.messages.registry import kind_of
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
from sglmt.messages.to_worker import AbortsDone, UnknownRequests
from sglmt.server_args import SchedulerInfo
from sglmt.workers.aborts import Aborts
from sglmt.workers.child import ChildContext
from sglmt.workers.counters import FrameReceiver
from sglmt.workers.emission import Emitter
from sglmt.workers.engine_control import EngineControl
from sglmt.workers.peers import PeerOutbox
from sglmt.workers.poll_loop import PollLoop
from sglmt.workers.recovery import Recovery
from sglmt.workers.request_book import RequestBook


class Scheduler:
    """The loop: inbox, engine, detokenizers."""

    def __init__(self, child: ChildContext, engine: Engine) -> None:
        self._child = child
        self._engine = engine
        self._clock = child.clock
        address = ipc_address(child.run_dir, Role.SCHEDULER, child.index, child.generation)
        self._inbox = child.transport.inbox(address)
        self._receiver = FrameReceiver(child)
        self._emitter = Emitter(child, child.args.detokenizers)
        self._router = PeerOutbox(child, Role.ROUTER, 0) if child.args.mode == "multi" else None
        self._book = RequestBook(child, engine, self._emitter)
        self._control = EngineControl(child, engine, self._book)
        self._recovery = Recovery(child, self._book.ledger, self._book.suspects.suspects)
        self._aborts = Aborts(child, self._book, self._recovery, self._reply)
        self._handlers: dict[type, Callable[[Any], None]] = {
            TokenizedGenerateReqInput: self._book.submit,
            TokenizedEmbeddingReqInput: self._book.submit,
            AbortReq: self._aborts.take,
            FinishReq: self._book.finish_by_detokenizer,
            ResumeReq: self._book.resume,
            LiveRequestsReq: self._reconcile,
            ControlMarker: self._control.mark,
            HeldTextsReq: self._book.answer_held_texts,
        }

    def run(self) -> None:
        """Serve until asked to stop."""
        loop = PollLoop(self._child)
        self._child.ready(self._info())
        while not self._child.stop_requested:
            loop.wait(self._next_step_at_s())
            self.turn(loop.housekeeping_is_due())
        self._inbox.close()
        self._engine.close()

    def turn(self, housekeeping: bool) -> None:
        """One turn of the loop: all that can be done now."""
        self._receive()
        if self._book.queue.waiting and not self._control.paused:
            self._book.admit()
        at_s = self._next_step_at_s()
        is_due = at_s is not None and self._clock() >= at_s
        # The step of an engine that says no time may take long: what is there goes out before it, and the supervisor
        # is told. The step of a paced one (a time, not 0) does not: its rows share the batch.
        if not is_due or not at_s:
            self._emitter.flush()
        if is_due:
            self._step(may_take_long=not at_s)
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
        """When the engine is to be called; None: not at all, 0: now, as long as it has work."""
        if self._control.paused:
            return None
        at_s = self._engine.next_step_at_s()
        if at_s is None and self._engine.has_work():
            return 0.0
        return at_s

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

    def _step(self, may_take_long: bool) -> None:
        engine, book = self._engine, self._book
        if may_take_long:
            self._child.slot.enter(Phase.STEPPING)
        if book.unmoved:
            with book.suspects.inside_engine(book.unmoved, on_trial=book.trial is not None):
                step = engine.step()
        else:
            step = engine.step()
        if may_take_long:
            self._child.slot.enter(Phase.READY)
        book.take_step(step)
        self._emitter.flush()

    def _housekeeping(self) -> None:
        slot, book = self._child.slot, self._book
        slot.add(SlotWord.RESUMES, self._emitter.refresh(book.ledger.records))
        if self._router is not None:
            self._router.refresh()
        book.end_overdue()
        self._control.poll()
        self._emitter.flush()
        self._recovery.look(self._control.paused)
        self._aborts.look()
        slot[SlotWord.RUNNING] = len(book.running)
        slot[SlotWord.QUEUED] = len(book.queue)
        slot[SlotWord.IN_FLIGHT] = len(book.running) + len(book.queue)
        slot[SlotWord.RETAINED] = len(book.ledger.records)
        slot[SlotWord.BACKLOG_BYTES] = self._emitter.backlog_bytes
        slot[SlotWord.DROPPED_MESSAGES] = self._emitter.dropped + (self._router.dropped if self._router else 0)

    def _reconcile(self, request: LiveRequestsReq) -> None:
        """Act on a worker's list, and name to it what nobody here knows."""
        unknown = self._book.reconcile(request)
        if unknown:
            self._reply(request.life, UnknownRequests(requests=unknown))

    def _reply(self, life: int, message: UnknownRequests | AbortsDone) -> None:
        """Send to a worker, past the detokenizers' rows where there is a router. It may be lost."""
        frame = self._child.writer.frame(kind_of(message), Scope.WORKER, message, *split_life(life))
        if self._router is not None:
            self._router.send(frame)
        else:
            self._emitter.send_to(0, frame)


def run(child: ChildContext) -> None:
    """Entry of the role: load the engine, then serve."""
    from sglmt.engines.factory import make_engine
    from sglmt.tokenizer.model_info import ModelInfo

    child.slot.enter(Phase.LOADING)
    model = msgspec.convert(child.arguments.model_info, ModelInfo)
    Scheduler(child, make_engine(child.args, model, child.cache_dir)).run()
