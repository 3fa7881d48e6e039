"""DetokenizerManager: token ids to text, stop strings, and the split of each batch by worker. Runs as
`sglmt::detokenizer:<index>`.

Each batch is turned to text and split by worker life on the way: every worker gets one message with exactly its own
rows, through the `SocketMapping`. In single mode that is one message, unless the worker is being replaced and two
lives of it coexist. What it decides itself (a stop string met, a gap seen) it tells the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sglmt.delivery.keys import life_of, make_life, split_life
from sglmt.ipc.addresses import ipc_address
from sglmt.ipc.socket_mapping import SocketMapping
from sglmt.ipc.state_page import Phase, SlotWord
from sglmt.messages.columns import Batch, pack
from sglmt.messages.frame import FrameError, Prefix, Role, Scope
from sglmt.messages.registry import kind_of
from sglmt.messages.to_detokenizer import BatchEmbeddingOutput, BatchTokenIDOutput, ForgetRequests
from sglmt.messages.to_scheduler import HeldTextsReq, ResumeReq
from sglmt.messages.to_worker import BatchStrOutput
from sglmt.tokenizer.loading import load_tokenizer
from sglmt.tokenizer.model_info import ModelInfo
from sglmt.workers.child import ChildContext
from sglmt.workers.control_follower import ControlFollower
from sglmt.workers.counters import FrameReceiver
from sglmt.workers.oversized import smaller
from sglmt.workers.peers import PeerOutbox, target_life, worker_is_dead
from sglmt.workers.poll_loop import PollLoop
from sglmt.workers.preloaded import Preloaded
from sglmt.workers.row_text import RowText

LOOK_INTERVAL_S = 0.25
HELD_TEXTS_INTERVAL_S = 5.0
# Looked up once: finding a member of an enumeration costs more than most of what is done with it.
_WORKER, _MESSAGES_OUT, _ROWS_OUT = Scope.WORKER, SlotWord.MESSAGES_OUT, SlotWord.ROWS_OUT


class DetokenizerManager:
    """Text state of all its requests, and the way to every worker."""

    def __init__(self, child: ChildContext, texts: RowText) -> None:
        self._child = child
        self._texts = texts
        address = ipc_address(child.run_dir, Role.DETOKENIZER, child.index, child.generation)
        self._inbox = child.transport.inbox(address)
        self._receiver = FrameReceiver(child)
        self._control = ControlFollower(child)
        self._scheduler = PeerOutbox(child, Role.SCHEDULER, 0)
        self._workers = SocketMapping(child.transport, child.run_dir, worker_is_dead(child.page))
        self._known_lives: set[int] = set()
        self._next_look_s = 0.0
        self._next_question_s = 0.0

    def run(self) -> None:
        """Serve until asked to stop."""
        loop = PollLoop(self._child)
        self._child.ready()
        while not self._child.stop_requested:
            loop.wait(None)
            self.turn(loop.housekeeping_is_due())
        self._inbox.close()

    def turn(self, housekeeping: bool) -> None:
        """One turn of the loop: all that can be done now."""
        while (frame := self._inbox.receive()) is not None:
            self._take(frame)
        self._report()
        if housekeeping:
            self._housekeeping()

    def _take(self, frame: bytes) -> None:
        prefix = self._receiver.prefix(frame)
        if prefix is None:
            return
        if prefix.scope == _WORKER:  # a control reply in single mode, passed on untouched
            life = target_life(prefix)
            if life is None:
                self._child.slot.add(SlotWord.UNROUTABLE)
            else:
                self._workers.send(life, frame)
            return
        message = self._receiver.message(prefix, frame)
        if message is not None:
            self._handle(message, prefix)

    def _handle(self, message: object, prefix: Prefix) -> None:
        try:
            if type(message) is BatchTokenIDOutput:
                self._send(self._texts.turn(message))
            elif type(message) is BatchEmbeddingOutput:
                message.check()
                self._send(message.split_by(life_of))
            elif type(message) is ForgetRequests:
                self._texts.forget(message.keys)
            else:
                self._child.slot.add(SlotWord.UNROUTABLE)
        except ValueError as error:
            self._child.slot.add(SlotWord.UNDECODABLE)
            self._child.log("error", f"batch of kind {prefix.kind} refused: {error}")

    def _send(self, batches: Mapping[int, Batch]) -> None:
        """Send every worker life its batch."""
        messages = rows = 0
        for life, batch in batches.items():
            sent = [self._workers.send(life, frame) for frame in self._frames(life, batch)]
            messages += sum(sent)
            if all(sent):
                rows += batch.rows()
        self._child.slot.add(_MESSAGES_OUT, messages)
        self._child.slot.add(_ROWS_OUT, rows)

    def _frames(self, life: int, batch: Batch) -> list[bytearray]:
        """The frame of a batch, or those of its parts when it is longer than a frame may be."""
        try:
            return [self._child.writer.frame(kind_of(batch), _WORKER, batch, *split_life(life))]
        except FrameError:
            if not isinstance(batch, BatchStrOutput):
                raise
            return [frame for part in smaller(batch) for frame in self._frames(life, part)]

    def _report(self) -> None:
        """Tell the scheduler what was found."""
        texts = self._texts
        for finish in texts.finished:
            self._scheduler.send(self._child.writer.frame(kind_of(finish), Scope.SCHEDULER, finish))
        texts.finished.clear()
        if texts.gaps:
            resume = ResumeReq(requests=texts.gaps)
            self._scheduler.send(self._child.writer.frame(kind_of(resume), Scope.SCHEDULER, resume))
            texts.gaps.clear()

    def _housekeeping(self) -> None:
        self._control.poll()
        self._scheduler.refresh()
        self._workers.flush()
        now_s = self._child.clock()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_INTERVAL_S
            self._look_around()
        if now_s >= self._next_question_s:
            self._next_question_s = now_s + HELD_TEXTS_INTERVAL_S
            self._ask_what_is_over()

    def _look_around(self) -> None:
        """What can wait a little: it reads many words of the state page, which are cold at every step."""
        self._workers.sweep()
        lives = {make_life(*life) for life in self._child.page.live(Role.TOKENIZER_WORKER)}
        self._texts.forget_lives(self._known_lives - lives)
        self._known_lives = lives
        slot = self._child.slot
        slot[SlotWord.IN_FLIGHT] = len(self._texts)
        slot[SlotWord.RETAINED] = self._texts.retained
        slot[SlotWord.BACKLOG_BYTES] = self._scheduler.backlog_bytes + self._workers.backlog_bytes
        slot[SlotWord.DROPPED_MESSAGES] = self._scheduler.dropped + self._workers.dropped
        slot[SlotWord.LATE_ROWS] = self._workers.late
        slot.add(SlotWord.UNROUTABLE, self._workers.take_unroutable())

    def _ask_what_is_over(self) -> None:
        held = self._texts.held()
        if held:
            question = HeldTextsReq(keys=pack("Q", held))
            self._scheduler.send(self._child.writer.frame(kind_of(question), Scope.SCHEDULER, question))


def run(child: ChildContext) -> None:
    """Entry of the role: load the token table, then serve."""
    child.slot.enter(Phase.LOADING)
    info = msgspec.convert(child.arguments.model_info, ModelInfo)
    if isinstance(child.preloaded, Preloaded) and child.preloaded.info == info:
        table = child.preloaded.tokenizer.table
    else:
        table = load_tokenizer(info, "huggingface").table
    texts = RowText(table, child.slot)
    DetokenizerManager(child, texts).run()
