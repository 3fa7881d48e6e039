"""What crosses the control socket: one JSON line asks, one JSON line answers; `subscribe` streams events.

Runs in the supervisor (server) and in every command (client). Request: `{"command": "...", "args": {...}}`.
Reply: `{"ok": true, "result": ...}` or `{"ok": false, "error": "...", "exit_code": n}`. Pure data.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from sglmt.control.state import ControlChange, ControlOutcome
from sglmt.errors import ExitCode, SglmtError
from sglmt.status.snapshot import InstanceSnapshot
from sglmt.supervisor.logs import LogLine

MAX_REQUEST_BYTES = 64 * 1024
MAX_REPLY_BYTES = 16 * 1024 * 1024


class ControlError(SglmtError):
    """A command was refused, or the other side does not speak this protocol."""


class ServerSideError(ControlError):
    """The supervisor answered with an error; carries the exit code it asked for."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        try:
            self.exit_code = ExitCode(exit_code)
        except ValueError:
            self.exit_code = ExitCode.FAILURE


class Controlled(Protocol):
    """What a command may ask of an instance; the supervisor is one."""

    def snapshot(self) -> InstanceSnapshot:
        """The instance now. Cheap: called several times a second, must not wait."""
        ...

    async def change_control(self, change: ControlChange, deadline_s: float) -> ControlOutcome:
        """Change what every process must agree on; returns when all have confirmed, or at monotonic `deadline_s`."""
        ...

    def request_stop(self, drain_s: float | None, now: bool) -> None:
        """Begin to stop; `drain_s` None: as configured. Returns at once; harmless when already stopping."""
        ...

    def request_drain(self) -> None:
        """Take no more work, finish what runs, wait to be stopped. Returns at once; harmless when already draining."""
        ...

    def begin_scale(self, count: int) -> int:
        """Begin to have `count` workers; the number of the operation. Raises OperationError to refuse."""
        ...

    def begin_restart(self, target: str) -> int:
        """Begin to restart `all`, a role or `role:index`; the number of the operation. Raises OperationError."""
        ...

    def begin_reload(self) -> int:
        """Begin to read the configuration again and apply it; the number of the operation. Raises OperationError."""
        ...

    async def operation_report(self, number: int, seen: int, until_s: float) -> OperationReport:
        """News of an operation, at the latest at monotonic `until_s`. Raises OperationError for an unknown one."""
        ...


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One line from a client. `args` is decoded by the command it names."""

    command: str
    args: msgspec.Raw = msgspec.Raw(b"{}")


class Reply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line back. `ok` has no default so that it is always written."""

    ok: bool
    result: Any = None
    error: str | None = None
    exit_code: int = 0


class RawReply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply as the client first sees it: the result is decoded when its type is known."""

    ok: bool
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None
    exit_code: int = 0


class Pong(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `ping`."""

    instance_id: str
    pid: int
    version: str


class StopAccepted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `stop`: running requests get at most `drain_s` seconds, then everything is ended."""

    drain_s: float


class OperationBegun(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `scale`, `restart` and `reload`: it is under way, or waits for its turn; ask `progress` about it."""

    number: int


class OperationReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far an operation is. `lines` are those after the ones the asker has `seen`."""

    number: int
    what: str
    lines: list[str]
    seen: int
    done: bool
    error: str | None = None
    exit_code: int = 0


class DrainAccepted(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `drain`."""


class RecentLog(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `logs`, oldest line first; `dropped` lines could not be written to the launcher's output."""

    lines: list[LogLine]
    dropped: int


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a subscription; exactly one field is set. `lost` counts lines this reader was too slow for."""

    log: LogLine | None = None
    snapshot: InstanceSnapshot | None = None
    lost: int = 0


def encode_line(message: msgspec.Struct) -> bytes:
    """One message as one line. JSON never contains a raw newline."""
    return msgspec.json.encode(message) + b"\n"
