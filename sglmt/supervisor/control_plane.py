"""The one writer of the control state. Runs in the supervisor; owns the file and the published version.

A change is written and published, then every running process is waited for, until a deadline: each confirms the
version through its ready pipe, or says what it could not do. A process that dies meanwhile is not waited for: its
next life starts from the current state. Changes are made one at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from sglmt.control.state import NO_ANSWER, Applied, ControlChange, ControlOutcome, ControlState, write_state
from sglmt.ipc.state_page import HeaderWord, StatePage

_LOOK_AGAIN_S = 0.05

Running = Callable[[], dict[str, int]]
"""Name and generation of every process that serves now."""


class ControlPlane:
    """Control state of one instance."""

    def __init__(self, run_dir: Path, page: StatePage, initial: ControlState) -> None:
        """Write and publish the initial state. Raises OSError."""
        self._run_dir = run_dir
        self._page = page
        self._one_at_a_time = asyncio.Lock()
        self._confirmed: dict[tuple[str, int], Applied] = {}
        self._news = asyncio.Event()
        self.state = initial
        self._publish(initial)

    def _publish(self, state: ControlState) -> None:
        write_state(self._run_dir, state)
        self.state = state
        self._page.set_header(HeaderWord.CONTROL_VERSION, state.version)

    def confirmed(self, name: str, generation: int, report: Applied) -> None:
        """A process has applied a version."""
        self._confirmed[name, generation] = report
        self._news.set()

    def forget(self, name: str, generation: int) -> None:
        """A life is over."""
        self._confirmed.pop((name, generation), None)
        self._news.set()

    async def change(self, change: ControlChange, deadline_s: float, running: Running) -> ControlOutcome:
        """Make a change and wait for everybody until monotonic `deadline_s`.

        Raises ControlChangeError when the change makes no sense, OSError when the file cannot be written. A
        change that a process refused is taken back where half of it would be a lie (adapters, weights).
        """
        async with self._one_at_a_time:
            before = self.state
            self._publish(change.apply(before))
            outcome = await self._everybody(self.state.version, deadline_s, running)
            if outcome.errors and change.is_undone_on_error:
                self._publish(msgspec.structs.replace(before, version=self.state.version + 1))
                await self._everybody(self.state.version, time.monotonic() + 2.0, running)
            return outcome

    async def _everybody(self, version: int, deadline_s: float, running: Running) -> ControlOutcome:
        waited_for = running()
        while True:
            self._news.clear()
            now_running = running()
            pending = [
                name
                for name, generation in waited_for.items()
                if now_running.get(name) == generation and not self._has_confirmed(name, generation, version)
            ]
            if not pending or time.monotonic() >= deadline_s:
                return self._outcome(version, waited_for, pending)
            try:
                async with asyncio.timeout(min(_LOOK_AGAIN_S, max(0.0, deadline_s - time.monotonic()))):
                    await self._news.wait()
            except TimeoutError:
                continue

    def _has_confirmed(self, name: str, generation: int, version: int) -> bool:
        report = self._confirmed.get((name, generation))
        return report is not None and report.version >= version

    def _outcome(self, version: int, waited_for: dict[str, int], pending: list[str]) -> ControlOutcome:
        confirmed: list[str] = []
        errors = dict.fromkeys(pending, NO_ANSWER)
        for name, generation in waited_for.items():
            report = self._confirmed.get((name, generation))
            if report is None or report.version < version:
                continue
            if report.error is not None:
                errors[name] = report.error
            else:
                confirmed.append(name)
        return ControlOutcome(version=version, confirmed=confirmed, errors=errors)
