"""What a ManagedProcess needs from the supervisor it belongs to. Types only; runs nowhere by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from sglmt.ipc.state_page import Slot
from sglmt.supervisor.spawn import SpawnedChild
from sglmt.supervisor.topology import ProcessSpec

if TYPE_CHECKING:
    from sglmt.supervisor.process import ManagedProcess

Log = Callable[[str, str, str], None]
"""(level, source, text); never waits and never raises."""


class Services(Protocol):
    """The supervisor's side of a managed process."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """For timers and descriptors."""

    def log(self, level: str, source: str, text: str) -> None:
        """A line for people."""

    def post(self, work: Callable[[], None]) -> None:
        """Do this in the supervisor's loop, in the order of posting."""

    def request_spawn(self, key: str) -> None:
        """Call `spawn_now` of the process with this key when its turn has come."""

    def turn_finished(self, key: str) -> None:
        """The process is ready or gone: somebody else may boot."""

    def spawn(self, spec: ProcessSpec, generation: int) -> tuple[Slot, SpawnedChild]:
        """Start a life. Raises OSError or SglmtError, and nothing of it is left then."""

    def life_ended(self, spec: ProcessSpec, generation: int, slot: Slot) -> None:
        """Take back what `spawn` gave: slot, socket file."""

    def told_applied(self, process: ManagedProcess, generation: int, text: str) -> None:
        """A process has applied a version of the control state; `text` is its report as JSON."""

    def told_info(self, process: ManagedProcess, text: str) -> None:
        """The child sent `info`."""

    def became_fatal(self, process: ManagedProcess, reason: str) -> None:
        """The process was given up."""
