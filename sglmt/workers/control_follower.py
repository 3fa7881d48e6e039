"""Follows the control state in one child: notices a newer version, applies it, reports. Runs in every child."""

from __future__ import annotations

from collections.abc import Callable

from sglmt.control.state import Applied, ControlState, read_state
from sglmt.errors import SglmtError
from sglmt.ipc.state_page import HeaderWord, SlotWord
from sglmt.workers.child import ChildContext


class ControlFollower:
    """The control state as this process has applied it.

    `apply(before, after)` does what is this role's part; it raises SglmtError for what cannot be done, which is
    reported and changes nothing else. A role that must wait for something (the scheduler, for what was sent
    before) returns False and calls `confirm` later.
    """

    def __init__(
        self, child: ChildContext, apply: Callable[[ControlState, ControlState], bool | None] | None = None
    ) -> None:
        self._child = child
        self._apply = apply
        self.state = read_state(child.run_dir)
        child.log_level = self.state.log_level if self.state.version > 1 else child.log_level
        child.slot[SlotWord.CONTROL_VERSION_APPLIED] = self.state.version

    def poll(self) -> None:
        """Apply a newer version, if there is one. One read of the state page otherwise."""
        if self._child.page.header(HeaderWord.CONTROL_VERSION) <= self.state.version:
            return
        before, self.state = self.state, read_state(self._child.run_dir)
        if self.state.log_level != before.log_level:
            self._child.log_level = self.state.log_level
        try:
            done = self._apply(before, self.state) if self._apply is not None else None
        except SglmtError as error:
            self.confirm(self.state.version, str(error))
            return
        if done is not False:
            self.confirm(self.state.version)

    def confirm(self, version: int, error: str | None = None) -> None:
        """Report a version as applied."""
        self._child.slot[SlotWord.CONTROL_VERSION_APPLIED] = version
        self._child.applied(Applied(version=version, error=error))


class PendingChange:
    """A change the scheduler has seen, waiting for what workers sent before they saw it. Pure."""

    def __init__(self) -> None:
        self._pending: tuple[ControlState, ControlState] | None = None
        self._until_s = 0.0
        self._versions: dict[int, int] = {}

    def begin(self, before: ControlState, after: ControlState, until_s: float) -> None:
        """A newer state; one that is still pending is overtaken, its beginning kept."""
        first = self._pending[0] if self._pending is not None else before
        self._pending = (first, after)
        self._until_s = until_s

    @property
    def is_pending(self) -> bool:
        """Whether a change waits."""
        return self._pending is not None

    def mark(self, life: int, version: int) -> None:
        """A worker life has confirmed `version` on its data path."""
        self._versions[life] = max(version, self._versions.get(life, 0))

    def take(self, lives: list[int], now_s: float) -> tuple[ControlState, ControlState] | None:
        """(before, after) when all `lives` have confirmed, or the wait is over; once a change."""
        if self._pending is None:
            return None
        version = self._pending[1].version
        if now_s < self._until_s and any(self._versions.get(life, 0) < version for life in lives):
            return None
        change, self._pending = self._pending, None
        self._versions = {life: seen for life, seen in self._versions.items() if life in lives}
        return change
