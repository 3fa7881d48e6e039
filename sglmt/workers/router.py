"""MultiTokenizerRouter: fan-in from all workers to the scheduler, and the way back for replies that are not
batches. Runs as `sglmt::router` in multi mode.

It reads the fixed prefix of a frame and nothing else. It owns no request: whatever it holds when it dies is
found again by the workers' lists. Frames for a scheduler that is starting are kept up to a bound.
"""

from __future__ import annotations

from sglmt.delivery.keys import make_life
from sglmt.ipc.addresses import ipc_address
from sglmt.ipc.socket_mapping import SocketMapping
from sglmt.ipc.state_page import SlotWord
from sglmt.messages.frame import Role, Scope
from sglmt.workers.child import ChildContext
from sglmt.workers.control_follower import ControlFollower
from sglmt.workers.counters import FrameReceiver
from sglmt.workers.peers import PeerOutbox, target_life, worker_is_dead
from sglmt.workers.poll_loop import PollLoop


class MultiTokenizerRouter:
    """Forwards frames by scope."""

    def __init__(self, child: ChildContext) -> None:
        self._child = child
        address = ipc_address(child.run_dir, Role.ROUTER, child.index, child.generation)
        self._inbox = child.transport.inbox(address)
        self._receiver = FrameReceiver(child)
        self._control = ControlFollower(child)
        self._scheduler = PeerOutbox(child, Role.SCHEDULER, 0)
        self._workers = SocketMapping(child.transport, child.run_dir, worker_is_dead(child.page))

    def run(self) -> None:
        """Forward until asked to stop."""
        loop = PollLoop(self._child)
        self._child.ready()
        while not self._child.stop_requested:
            loop.wait(None)
            self.turn(loop.housekeeping_is_due())
        self._inbox.close()

    def turn(self, housekeeping: bool) -> None:
        """One turn of the loop: all that can be done now."""
        self._scheduler.refresh()  # first: what workers say because the scheduler is new must reach the new one
        while (frame := self._inbox.receive()) is not None:
            self.forward(frame)
        if housekeeping:
            self._housekeeping()

    def forward(self, frame: bytes) -> None:
        """Send one frame on, untouched."""
        prefix = self._receiver.prefix(frame)
        if prefix is None:
            return
        slot = self._child.slot
        if prefix.scope == Scope.SCHEDULER:
            self._scheduler.send(frame)
        elif prefix.scope == Scope.WORKER:
            life = target_life(prefix)
            if life is None:
                slot.add(SlotWord.UNROUTABLE)
                return
            self._workers.send(life, frame)
        elif prefix.scope == Scope.ALL_WORKERS:
            for index, generation in self._child.page.live(Role.TOKENIZER_WORKER):
                self._workers.send(make_life(index, generation), frame)
        else:
            slot.add(SlotWord.UNROUTABLE)
            return
        slot.add(SlotWord.MESSAGES_OUT)

    def _housekeeping(self) -> None:
        self._control.poll()
        self._workers.sweep()
        slot = self._child.slot
        slot[SlotWord.BACKLOG_BYTES] = self._scheduler.backlog_bytes + self._workers.backlog_bytes
        slot[SlotWord.DROPPED_MESSAGES] = self._scheduler.dropped + self._workers.dropped
        slot[SlotWord.LATE_ROWS] = self._workers.late
        slot.add(SlotWord.UNROUTABLE, self._workers.take_unroutable())


def run(child: ChildContext) -> None:
    """Entry of the role."""
    MultiTokenizerRouter(child).run()
