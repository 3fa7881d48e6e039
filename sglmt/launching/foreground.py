"""`sglmt launch` in the foreground: this process becomes the supervisor and ends with its exit code."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from sglmt.launching.session import Ended, Session, run_supervisor
from sglmt.server_args import ServerArgs
from sglmt.supervisor.logs import LineWriter, LogSink

STDOUT_FD = 1


def wants_live_view(live: bool | None, environment: Mapping[str, str], is_terminal: bool) -> bool:
    """A redrawn view only on a terminal that can, for people who did not ask for plain output. Pure.

    `live` is what `--live` or `--no-live` said, None when neither was given.
    """
    if live is not None:
        return live and is_terminal
    dumb = environment.get("TERM", "dumb") in ("dumb", "unknown", "")
    return is_terminal and not dumb and not environment.get("NO_COLOR")


def run_in_foreground(
    args: ServerArgs,
    warnings: list[str],
    live: bool | None,
    log_file: str | None,
    reread: Callable[[], ServerArgs] | None = None,
) -> Ended:
    """Run until stopped. `reread` gives the configuration from its sources again, for reloads."""
    fd = STDOUT_FD if log_file is None else open_log_file(log_file)
    shows_live = log_file is None and wants_live_view(live, os.environ, os.isatty(STDOUT_FD))
    writer = LineWriter(fd)
    sink = LogSink(args.log_level)
    session = Session(args, sink, writer, shows_live)
    for warning in warnings:
        sink.log("warning", "supervisor", warning)
    return run_supervisor(args, session, sink, on_ready=lambda _url: None, reread=reread)


def open_log_file(path: str) -> int:
    """A descriptor that appends to `path`, mode 0600. Raises ResourceError."""
    from sglmt.errors import ResourceError

    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ResourceError(f"--log-file {path!r}: cannot be opened: {error.strerror}") from error
