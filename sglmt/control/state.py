"""Versioned control state: what every process must agree on. One writer, the supervisor; pure data and one file.

A change raises `version`; the file is replaced atomically, then the version is published in the state page.
A process that sees a newer version reads the file, applies what differs, and reports the version (and what went
wrong) to the supervisor. A process that starts later reads the file before it serves. So nobody has to hear an
announcement, and nothing is applied twice.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import msgspec

from sglmt.errors import SegmentError, SglmtError

FILE_NAME = "control_state"
NO_ANSWER = "no confirmation by the deadline"
_MAX_BYTES = 1024 * 1024

PauseMode = Literal["abort", "retract", "in_place"]
LogLevel = Literal["debug", "info", "warning", "error"]


class ControlState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is switched at run time.

    `flushes` counts flush requests: a process that sees it rise flushes once. `adapters` maps names to paths.
    """

    version: int = 1
    paused: bool = False
    pause_mode: PauseMode = "abort"
    log_level: LogLevel = "info"
    flushes: int = 0
    adapters: dict[str, str] = {}
    weights_path: str | None = None
    weight_version: str = "default"


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """A process's report: it has applied `version`; `error` says what of it could not be done, and why."""

    version: int
    error: str | None = None


def write_state(run_dir: Path, state: ControlState) -> None:
    """Replace the file. Raises OSError."""
    path = run_dir / FILE_NAME
    fresh = run_dir / f"{FILE_NAME}.new"
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, msgspec.msgpack.encode(state))
    finally:
        os.close(fd)
    fresh.replace(path)


def read_state(run_dir: Path) -> ControlState:
    """The current state; the initial one when nothing was ever changed. Raises SegmentError for anything else."""
    path = run_dir / FILE_NAME
    try:
        with path.open("rb") as file:
            return msgspec.msgpack.decode(file.read(_MAX_BYTES), type=ControlState)
    except FileNotFoundError:
        return ControlState()
    except (OSError, msgspec.MsgspecError) as error:
        raise SegmentError(f"control state {path}: {error}") from error


class ControlChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One change somebody asks for; exactly one field is set."""

    pause: PauseMode | None = None
    resume: bool = False
    flush: bool = False
    log_level: LogLevel | None = None
    load_adapter: tuple[str, str] | None = None  # (name, path)
    unload_adapter: str | None = None
    weights: tuple[str, str] | None = None  # (path, weight version)

    def apply(self, state: ControlState) -> ControlState:
        """The next state; its version is one higher. Raises ControlChangeError for an unknown adapter."""
        change: dict[str, object] = {"version": state.version + 1}
        if self.pause is not None:
            change |= {"paused": True, "pause_mode": self.pause}
        if self.resume:
            change["paused"] = False
        if self.flush:
            change["flushes"] = state.flushes + 1
        if self.log_level is not None:
            change["log_level"] = self.log_level
        if self.load_adapter is not None:
            name, path = self.load_adapter
            change["adapters"] = {**state.adapters, name: path}
        if self.unload_adapter is not None:
            if self.unload_adapter not in state.adapters:
                raise ControlChangeError(f"no adapter {self.unload_adapter!r} is loaded")
            change["adapters"] = {name: path for name, path in state.adapters.items() if name != self.unload_adapter}
        if self.weights is not None:
            change |= {"weights_path": self.weights[0], "weight_version": self.weights[1]}
        return msgspec.structs.replace(state, **change)

    @property
    def is_undone_on_error(self) -> bool:
        """Whether a change that one process could not apply is taken back everywhere."""
        return self.load_adapter is not None or self.weights is not None


class ControlChangeError(SglmtError):
    """A change that makes no sense in the current state."""


class ControlOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a change: `errors` maps processes that did not apply it to the reason; empty: all did."""

    version: int
    confirmed: list[str]
    errors: dict[str, str]
