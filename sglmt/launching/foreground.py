"""`sglmt launch` in the foreground: this process becomes the supervisor and ends with its exit code."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from sglmt.launching.logging_setup import log_sink, named_file, writer_to
from sglmt.launching.session import Ended, Session, run_supervisor
from sglmt.server_args import ServerArgs

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
    """Run until stopped. `reread` gives the configuration from its sources again, for reloads.

    Raises ConfigError or ResourceError for a log file that cannot be used.
    """
    file = named_file(args, log_file)
    if log_file is not None or (live is None and args.log_format == "json"):
        live = False
    instead, beside = (file, None) if log_file is not None else (None, file)
    writer = writer_to(STDOUT_FD if instead is None else instead, args)
    sink = log_sink(args, None if beside is None else writer_to(beside, args))
    session = Session(args, sink, writer, wants_live_view(live, os.environ, os.isatty(STDOUT_FD)))
    for warning in warnings:
        sink.log("warning", "supervisor", warning)
    return run_supervisor(args, session, sink, on_ready=lambda _url: None, reread=reread)
