"""Where the log of a launch goes, from its options. Runs in the launcher, before anything is started.

In the foreground lines go to standard output, and to `--log-dir` besides; `--log-file` takes the place of standard
output. In the background they go to one of the two files, else to `log` in the run directory. Files of ours are
bounded; one named by `--log-file` is rotated by whoever named it, who has it reopened with USR1.
"""

from __future__ import annotations

from pathlib import Path

from sglmt.errors import ConfigError, ResourceError
from sglmt.server_args import ServerArgs
from sglmt.supervisor.log_file import LogFile
from sglmt.supervisor.log_format import notice_of, renderer
from sglmt.supervisor.logs import Descriptor, LineWriter, LogSink

RUN_LOG = "log"


def named_file(args: ServerArgs, log_file: str | None) -> LogFile | None:
    """The open file that `--log-file` or `--log-dir` names. Raises ConfigError for both, ResourceError."""
    if log_file is not None and args.log_dir is not None:
        raise ConfigError(f"--log-file {log_file!r}: not with --log-dir {args.log_dir!r}; choose one")
    if log_file is not None:
        return LogFile(Path(log_file))
    if args.log_dir is None:
        return None
    directory = Path(args.log_dir)
    try:
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"--log-dir {args.log_dir!r}: cannot be made: {error.strerror}") from error
    return bounded_file(directory / f"{args.name}.log", args)


def bounded_file(path: Path, args: ServerArgs) -> LogFile:
    """A file of ours, rotated. Raises ResourceError."""
    return LogFile(path, args.log_max_bytes, args.log_keep)


def writer_to(target: int | Descriptor, args: ServerArgs) -> LineWriter:
    """A writer whose own remarks look like the lines."""
    return LineWriter(target, notice=notice_of(args.log_format))


def log_sink(args: ServerArgs, file: LineWriter | None = None) -> LogSink:
    """The sink of one run; `file` gets every line whatever happens to the terminal."""
    return LogSink(args.log_level, render=renderer(args.log_format), file=file)
