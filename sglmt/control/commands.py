"""The commands of the control socket: each is a message, its execution and its help, in one place.

Runs in the supervisor when a request arrives; clients use the same classes to ask. A command is a struct
(its fields are the arguments) with an `execute` that answers at once: whatever takes time is only begun here.
`Subscribe` is declared here and carried out by the server, because it is the one that streams.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from sglmt.control.protocol import (
    ControlError,
    Controlled,
    DrainAccepted,
    OperationBegun,
    OperationReport,
    Pong,
    RecentLog,
    StopAccepted,
)
from sglmt.control.state import ControlChange, ControlOutcome
from sglmt.status.snapshot import InstanceSnapshot
from sglmt.supervisor.logs import RING_LINES, LogSink

MAX_DRAIN_S = 86_400.0
MAX_CHANGE_S = 600.0
MAX_PROGRESS_S = 20.0


@dataclass(frozen=True)
class Context:
    """What commands act on. `drain_s` gives the drain time as it is configured now."""

    instance: Controlled
    logs: LogSink
    drain_s: Callable[[], float]


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all commands. `result_type` is what the reply's result decodes to."""

    name: ClassVar[str]
    help: ClassVar[str]
    result_type: ClassVar[Any]

    def execute(self, context: Context) -> Any:
        """Answer at once, or with an awaitable that has a deadline. Raises SglmtError to refuse."""
        raise NotImplementedError


class Ping(Command, frozen=True, kw_only=True):
    """Who answers here."""

    name: ClassVar[str] = "ping"
    help: ClassVar[str] = "Say which instance this is."
    result_type: ClassVar[Any] = Pong

    def execute(self, context: Context) -> Pong:
        """Identity only."""
        snapshot = context.instance.snapshot()
        return Pong(instance_id=snapshot.instance_id, pid=snapshot.pid, version=snapshot.version)


class Status(Command, frozen=True, kw_only=True):
    """Everything about the instance now."""

    name: ClassVar[str] = "status"
    help: ClassVar[str] = "The snapshot of the instance."
    result_type: ClassVar[Any] = InstanceSnapshot

    def execute(self, context: Context) -> InstanceSnapshot:
        """The supervisor's own snapshot."""
        return context.instance.snapshot()


class Stop(Command, frozen=True, kw_only=True):
    """Stop the instance: `drain_s` seconds for running requests (None: as configured); `now`: none."""

    name: ClassVar[str] = "stop"
    help: ClassVar[str] = "Begin to stop; answers when accepted, not when done."
    result_type: ClassVar[Any] = StopAccepted

    drain_s: float | None = None
    now: bool = False

    def execute(self, context: Context) -> StopAccepted:
        """Hand the request to the supervisor. Raises ControlError for an absurd drain time."""
        if self.drain_s is not None and not 0 <= self.drain_s <= MAX_DRAIN_S:
            raise ControlError(f"drain_s {self.drain_s:g}: between 0 and {MAX_DRAIN_S:g} seconds expected")
        context.instance.request_stop(self.drain_s, self.now)
        granted_s = context.drain_s() if self.drain_s is None else self.drain_s
        return StopAccepted(drain_s=0.0 if self.now else granted_s)


class Drain(Command, frozen=True, kw_only=True):
    """Take no more work and finish what runs; the instance then waits to be stopped."""

    name: ClassVar[str] = "drain"
    help: ClassVar[str] = "Readiness off, no new requests; answers when accepted."
    result_type: ClassVar[Any] = DrainAccepted

    def execute(self, context: Context) -> DrainAccepted:
        """Hand the request to the supervisor."""
        context.instance.request_drain()
        return DrainAccepted()


class Scale(Command, frozen=True, kw_only=True):
    """Have this many workers."""

    name: ClassVar[str] = "scale"
    help: ClassVar[str] = "Begin to have so many workers."
    result_type: ClassVar[Any] = OperationBegun

    workers: int

    def execute(self, context: Context) -> OperationBegun:
        """Begin it. Raises OperationError to refuse."""
        return OperationBegun(number=context.instance.begin_scale(self.workers))


class Restart(Command, frozen=True, kw_only=True):
    """Restart `all`, a role, or `role:index`; workers one at a time, each replaced before it leaves."""

    name: ClassVar[str] = "restart"
    help: ClassVar[str] = "Begin to restart processes."
    result_type: ClassVar[Any] = OperationBegun

    target: str = "all"

    def execute(self, context: Context) -> OperationBegun:
        """Begin it. Raises OperationError to refuse."""
        return OperationBegun(number=context.instance.begin_restart(self.target))


class Reload(Command, frozen=True, kw_only=True):
    """Read the configuration again and apply it by replacing all workers, one at a time."""

    name: ClassVar[str] = "reload"
    help: ClassVar[str] = "Begin to apply the configuration as it is now."
    result_type: ClassVar[Any] = OperationBegun

    def execute(self, context: Context) -> OperationBegun:
        """Begin it. Raises OperationError to refuse."""
        return OperationBegun(number=context.instance.begin_reload())


class Progress(Command, frozen=True, kw_only=True):
    """What an operation has said since the lines already `seen`; waits for news at most `within_s`."""

    name: ClassVar[str] = "progress"
    help: ClassVar[str] = "How far an operation is."
    result_type: ClassVar[Any] = OperationReport

    number: int
    seen: int = 0
    within_s: float = 0.0

    def execute(self, context: Context) -> Awaitable[OperationReport]:
        """Ask the supervisor. Raises ControlError for an absurd time."""
        if not 0 <= self.within_s <= MAX_PROGRESS_S or self.seen < 0:
            raise ControlError(f"within_s {self.within_s:g}: between 0 and {MAX_PROGRESS_S:g} seconds expected")
        return context.instance.operation_report(self.number, self.seen, time.monotonic() + self.within_s)


class Logs(Command, frozen=True, kw_only=True):
    """The last `lines` log lines, of one source (`role` or `role:index`) or of all."""

    name: ClassVar[str] = "logs"
    help: ClassVar[str] = "The last log lines."
    result_type: ClassVar[Any] = RecentLog

    lines: int = RING_LINES
    source: str | None = None

    def execute(self, context: Context) -> RecentLog:
        """From the ring kept in memory."""
        return RecentLog(lines=context.logs.recent(max(0, self.lines), self.source), dropped=context.logs.dropped)


class Change(Command, frozen=True, kw_only=True):
    """Change the control state; answers when every process has confirmed, or after `within_s` with who has not."""

    name: ClassVar[str] = "change"
    help: ClassVar[str] = "Pause, continue, flush, log level, adapters, weights: everywhere, or say where not."
    result_type: ClassVar[Any] = ControlOutcome

    change: ControlChange
    within_s: float = 10.0

    def execute(self, context: Context) -> Awaitable[ControlOutcome]:
        """Hand it to the supervisor. Raises ControlError for an absurd time."""
        if not 0 <= self.within_s <= MAX_CHANGE_S:
            raise ControlError(f"within_s {self.within_s:g}: between 0 and {MAX_CHANGE_S:g} seconds expected")
        return context.instance.change_control(self.change, time.monotonic() + self.within_s)


class Subscribe(Command, frozen=True, kw_only=True):
    """Stream events: the last `backlog` lines, then new ones; a snapshot every `snapshot_every_s` (0: none)."""

    name: ClassVar[str] = "subscribe"
    help: ClassVar[str] = "Stream log lines and snapshots, one JSON object a line."
    result_type: ClassVar[Any] = None

    logs: bool = True
    source: str | None = None
    backlog: int = 0
    snapshot_every_s: float = 0.0


COMMANDS: dict[str, type[Command]] = {
    command.name: command for command in (Ping, Status, Stop, Drain, Scale, Restart, Reload, Progress, Logs, Change)
}


def decode_command(name: str, args: msgspec.Raw) -> Command:
    """The command a request means. Raises ControlError for an unknown one or for arguments it does not take."""
    command = Subscribe if name == Subscribe.name else COMMANDS.get(name)
    if command is None:
        known = ", ".join(sorted([*COMMANDS, Subscribe.name]))
        raise ControlError(f"unknown command {name[:80]!r}; known are {known}")
    try:
        return msgspec.json.decode(args, type=command)
    except msgspec.MsgspecError as error:
        raise ControlError(f"command {name}: {error}") from error
