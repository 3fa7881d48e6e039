"""The exceptions of every process and the exit codes of every command.

All our errors descend from `SglmtError`; its message says what happened, to which value, and what to do about
it, in one line fit for a terminal. Each carries the exit code a command ends with when nothing handles it.
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Exit codes of the `sglmt` command. Documented for operators in docs/operations.md."""

    OK = 0  # a requested stop; a status query about a running instance
    FAILURE = 1  # anything without a code of its own
    USAGE = 2  # unknown option or argument (click's own code)
    NOT_RUNNING = 3  # no such instance
    AMBIGUOUS = 4  # several instances and no name given
    STARTING = 5  # status: not ready yet
    DEGRADED = 6  # status: serving, with processes missing
    STOPPING = 7  # status: draining or stopping
    TIMEOUT = 8  # an operation did not complete by its deadline
    MODEL = 66  # the model or tokenizer cannot be read
    PORT = 69  # the address is taken or cannot be bound
    CHILD_DEATH = 70  # a process the instance cannot do without died beyond its budget
    RESOURCE = 73  # shared memory, run directory or disk cannot be used
    CONFIG = 78  # a flag, variable or file value is refused
    KILLED_NOW = 130  # a second signal cut the stop short


class SglmtError(Exception):
    """Base of all errors of this package."""

    exit_code: ExitCode = ExitCode.FAILURE


class ConfigError(SglmtError):
    """A flag, environment variable or configuration value is refused before anything starts."""

    exit_code = ExitCode.CONFIG


class ModelError(SglmtError):
    """The model, tokenizer or chat template cannot be found, read or understood."""

    exit_code = ExitCode.MODEL


class ChatTemplateError(SglmtError):
    """The chat template refuses the messages (its own words) or cannot be compiled."""


class PortError(SglmtError):
    """The listening address is taken or cannot be bound."""

    exit_code = ExitCode.PORT


class ResourceError(SglmtError):
    """Shared memory, the run directory or the disk cannot be used."""

    exit_code = ExitCode.RESOURCE


class NotRunningError(SglmtError):
    """No instance of that name runs."""

    exit_code = ExitCode.NOT_RUNNING


class AmbiguousInstanceError(SglmtError):
    """Several instances run and none was named."""

    exit_code = ExitCode.AMBIGUOUS


class ChildDeathError(SglmtError):
    """A process the instance cannot do without ended and will not be restarted."""

    exit_code = ExitCode.CHILD_DEATH


class DeadlineError(SglmtError):
    """An operation did not complete by its deadline."""

    exit_code = ExitCode.TIMEOUT


class SegmentError(SglmtError):
    """The shared-memory segment is missing, malformed, or not the one this process was told to read."""

    exit_code = ExitCode.RESOURCE


class MessageError(SglmtError):
    """A frame or message is malformed, of another version, or of another instance. Costs that message only."""


class EngineError(SglmtError):
    """The engine cannot do what was asked; names the engine."""


class EngineRefusal(EngineError):
    """The engine declares that it cannot do this (HTTP 501 or 400, never a crash)."""
