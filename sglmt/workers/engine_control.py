"""Changes of the control state, as the scheduler carries them out. Owned by the scheduler.

A change waits until every serving worker has confirmed it on its data path (or was given up): then everything that
was sent before it is here. Pausing, adapters, weights and the prefix cache are the engine's side of it.
"""

from __future__ import annotations

from sglmt.control.state import ControlState
from sglmt.delivery.keys import make_life
from sglmt.engines.base import Engine
from sglmt.errors import EngineError
from sglmt.messages.frame import Role
from sglmt.messages.to_scheduler import ControlMarker
from sglmt.workers.child import ChildContext
from sglmt.workers.control_follower import ControlFollower, PendingChange
from sglmt.workers.request_book import RequestBook, abort_finish

MARKERS_WITHIN_S = 2.0  # a worker that hangs longer does not hold up a control change


class EngineControl:
    """The control state as the engine has it. `paused`: nothing is admitted, nothing steps."""

    def __init__(self, child: ChildContext, engine: Engine, book: RequestBook) -> None:
        """Brings a fresh engine to the current state. Raises EngineError."""
        self._child = child
        self._engine = engine
        self._book = book
        self._follower = ControlFollower(child, self._begin_change)
        self._change = PendingChange()
        self.paused = self._follower.state.paused
        self._set_up_engine(ControlState(), self._follower.state)

    def poll(self) -> None:
        """Follow the state page, carry out what is due."""
        self._follower.poll()
        self._complete_change()

    def mark(self, marker: ControlMarker) -> None:
        """A worker has confirmed a version, behind everything it sent before."""
        self._change.mark(marker.life, marker.version)
        self._complete_change()

    def _begin_change(self, before: ControlState, after: ControlState) -> bool:
        """Take note of a change; it is carried out when what workers sent before it is here."""
        self._change.begin(before, after, self._child.clock() + MARKERS_WITHIN_S)
        return False

    def _complete_change(self) -> None:
        """Carry out a change once every serving worker has confirmed it on its data path (or was given up)."""
        if not self._change.is_pending:
            return
        lives = [make_life(*life) for life in self._child.page.live(Role.TOKENIZER_WORKER)]
        change = self._change.take(lives, self._child.clock())
        if change is None:
            return
        before, after = change
        self.paused = after.paused
        if after.paused and not before.paused:
            self._pause(after.pause_mode)
        try:
            self._set_up_engine(before, after)
        except EngineError as error:
            self._follower.confirm(after.version, str(error))
            return
        flushed = after.flushes == before.flushes or self._engine.flush_cache()
        self._follower.confirm(after.version, None if flushed else "requests are running, nothing was flushed")

    def _pause(self, mode: str) -> None:
        if mode == "abort":
            self._book.end_all(abort_finish(503, "paused", "generation was paused and running requests aborted"))
        elif mode == "retract":
            self._book.retract_all()

    def _set_up_engine(self, before: ControlState, after: ControlState) -> None:
        """Bring adapters and weights from one state to another. Raises EngineError; what was done stays done."""
        if after.weights_path is not None and after.weights_path != before.weights_path:
            self._engine.update_weights(after.weights_path)
        for name in before.adapters.keys() - after.adapters.keys():
            self._engine.unload_adapter(name)
        for name, path in after.adapters.items():
            if before.adapters.get(name) != path:
                self._engine.load_adapter(name, path)
