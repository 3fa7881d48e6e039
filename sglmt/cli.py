"""The `sglmt` command: one small function per verb, each parse → call → render. Runs in the user's shell.

Imports of what a verb needs are inside it: `sglmt status` starts no engine library, `sglmt --help` nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from sglmt.bench.command import bench
from sglmt.command_line import GroupedOption, Program, fail, manual, one_line, server_options
from sglmt.errors import ExitCode
from sglmt.operation_verbs import drain, reload, restart, scale

if TYPE_CHECKING:
    from sglmt.server_args import ServerArgs

RUNTIME_DIR_HELP = "Where run directories are, when not in the usual place."
STATUS_WITHIN_S = 2.0


def _complete_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from sglmt.supervisor.rundir import find_instances

    names = {found.record.name for found in find_instances(None) if found.alive}
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


def _runtime_dir_option(function: Any) -> Any:
    return click.option(
        "--runtime-dir", metavar="DIR", envvar="SGLMT_RUNTIME_DIR", type=click.Path(), help=RUNTIME_DIR_HELP
    )(function)


def _name_argument(function: Any) -> Any:
    return click.argument("name", required=False, shell_complete=_complete_names)(function)


@click.group(
    cls=Program,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`sglmt VERB --help` explains each verb.",
)
@click.version_option(package_name="sglmt", prog_name="sglmt", message="%(prog)s %(version)s")
def main() -> None:
    """Serve a language model with several HTTP + tokenizer processes in front of one engine.

    `sglmt launch` starts an instance and supervises its processes, `sglmt status` shows it, `sglmt stop` ends it.
    """


@main.command(
    short_help="Start an instance and supervise it.",
    cls=manual(
        (
            "Where values come from",
            """
Flags first, then SGLMT_* environment variables (--max-restarts is
SGLMT_MAX_RESTARTS), then the --config file (TOML; keys are the option
names), then the defaults. SGLMT_API_KEY takes several keys, separated by
commas.""",
        ),
        (
            "Signals",
            """
INT (Ctrl-C), TERM   stop: finish running requests, at most
                     --drain-timeout seconds, then end
a second INT, TERM   stop now
HUP                  `sglmt reload`; when the terminal went away: stop
USR1                 open the log files anew, after they were moved
TTIN, TTOU           one worker more, one less""",
        ),
        (
            "Exit codes",
            """
  0  stopped on request; --detach: the instance is ready; --check: it would start
 66  the model or tokenizer cannot be read
 69  the address is taken or cannot be bound
 70  a process the instance cannot do without died too often
 73  shared memory, run directory or disk cannot be used
 78  a flag, variable or value of the file is refused
130  a second signal cut the stop short""",
        ),
        (
            "Examples",
            """
sglmt launch                             the shipped model on port 30000
sglmt launch --workers 4 --port 8080 --name prod --detach
sglmt launch --engine simulator --check  what would be started""",
        ),
    ),
)
@server_options
@click.option("--config", cls=GroupedOption, metavar="FILE", type=click.Path(), help="TOML file with options.")
@click.option("--detach", "-d", cls=GroupedOption, is_flag=True, help="Return when ready; run in the background.")
@click.option("--check", cls=GroupedOption, is_flag=True, help="Say what would be started; start nothing.")
@click.option(
    "--live/--no-live", cls=GroupedOption, default=None,
    help="Redrawn table in the terminal, or plain log lines. Default: a table where the terminal can.",
)  # fmt: skip
@click.option(
    "--log-file", cls=GroupedOption, metavar="FILE", type=click.Path(),
    help="Append the log to this file, which others rotate. Default: standard output; with --detach RUN_DIR/log.",
)  # fmt: skip
def launch(
    config: str | None, detach: bool, check: bool, live: bool | None, log_file: str | None, **options: Any
) -> None:
    """Start an instance and supervise it until it is stopped.

    Claims the port, loads the model, starts one engine process, one or more detokenizers, the router and the
    HTTP + tokenizer workers, and restarts whichever of them dies. It is ready when a request through every
    worker has come back.
    """
    from sglmt.configuration import load
    from sglmt.launching.title import LAUNCHER_TITLE, set_title

    set_title(LAUNCHER_TITLE)  # a key on the command line is not for `ps`
    configuration = load(options, os.environ, config)
    if check:
        from sglmt.launching.check import check_launch

        for warning in configuration.warnings:
            click.echo(f"sglmt: warning: {one_line(warning)}", err=True)
        click.echo("\n".join(check_launch(configuration.args)))
        return

    def reread() -> ServerArgs:
        return load(options, os.environ, config).args

    if detach:
        _detach(configuration.args, configuration.warnings, log_file, reread)
    else:
        from sglmt.launching.foreground import run_in_foreground

        ended = run_in_foreground(configuration.args, configuration.warnings, live, log_file, reread)
        if ended.failure is not None:
            fail(ended.failure.partition("\n")[0], ended.exit_code)  # the rest is in the log already
        sys.exit(ended.exit_code)


def _detach(args: ServerArgs, warnings: list[str], log_file: str | None, reread: Callable[[], ServerArgs]) -> None:
    from sglmt.launching.background import run_in_background

    outcome = run_in_background(args, warnings, log_file, reread)
    if outcome.exit_code == 0:
        click.echo(f"{args.name}: ready at {outcome.url}")
        return
    for line in outcome.tail:
        click.echo(line, err=True)
    fail(f"{args.name}: {outcome.message}", outcome.exit_code)


@main.command(
    short_help="Show one instance, or all.",
    cls=manual(
        (
            "Exit codes",
            """
0  running            5  starting
3  not running        6  degraded: serving, with processes missing
8  not answering         recovering: serving, after the engine's death
                      7  draining or stopping
Of several instances the worst one counts.""",
        ),
    ),
)
@_name_argument
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output, and nothing else.")
@_runtime_dir_option
def status(name: str | None, as_json: bool, runtime_dir: str | None) -> None:
    """Show one instance, or all: every process, its state, restarts, memory and load."""
    from sglmt.control.instances import ask_status, find, status_exit_code
    from sglmt.errors import NotRunningError
    from sglmt.status.output import write_status
    from sglmt.status.snapshot import StatusDocument

    try:
        found = find(name, runtime_dir)
    except NotRunningError as error:
        if as_json:
            write_status(StatusDocument(instances=[]), as_json=True)
        fail(str(error), error.exit_code)
    snapshots = [ask_status(one, time.monotonic() + STATUS_WITHIN_S) for one in found]
    write_status(StatusDocument(instances=snapshots), as_json)
    sys.exit(int(status_exit_code(snapshots)))


@main.command(
    cls=manual(
        (
            "Exit codes",
            """
0  stopped; nothing of it is left
3  not running
4  several instances run and none was named
8  still running when the time was up; the message names what is left""",
        ),
    )
)
@_name_argument
@click.option("--timeout", "-t", "drain_s", type=click.FloatRange(0, 86_400), metavar="S",
              help="Seconds running requests get to finish. Default: --drain-timeout of the launch.")  # fmt: skip
@click.option("--now", is_flag=True, help="Let no request finish; a supervisor that does not answer is killed.")
@click.option("--all", "every", is_flag=True, help="Stop every instance of this user.")
@_runtime_dir_option
def stop(name: str | None, drain_s: float | None, now: bool, every: bool, runtime_dir: str | None) -> None:
    """Stop an instance and wait until it is gone."""
    from sglmt.control import instances

    if every and name is not None:
        raise click.UsageError("give a NAME or --all, not both")
    if every:
        chosen = [one for one in instances.find(None, runtime_dir) if one.alive]
    else:
        chosen = [instances.find_one(name, runtime_dir)]
    for found in chosen:
        click.echo(instances.stop(found, drain_s, now))


for _verb in (scale, restart, reload, drain, bench):
    main.add_command(_verb)


@main.command(
    short_help="Show the log of an instance.",
    cls=manual(
        (
            "Exit codes",
            """
0  shown; with --follow: the instance has ended
3  not running
4  several instances run and none was named
8  not answering""",
        ),
        (
            "Examples",
            """
sglmt logs -f                        everything, from now on too
sglmt logs tokenizer_worker          of all workers
sglmt logs scheduler --since 10m
sglmt logs --json | jq .message""",
        ),
    ),
)
@click.argument("source", required=False, metavar="[ROLE:INDEX]")
@click.option("--follow", "-f", is_flag=True, help="Go on with new lines until the instance ends.")
@click.option("--lines", "-n", type=click.IntRange(0), default=2000, show_default=True, help="Last lines to show.")
@click.option("--since", metavar="TIME", help="Only lines since then: 30s, 10m, 2h, 14:30, 2026-11-29T14:30:00.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--name", shell_complete=_complete_names, help="Which instance, when several run.")
@_runtime_dir_option
def logs(
    source: str | None, follow: bool, lines: int, since: str | None, as_json: bool, name: str | None,
    runtime_dir: str | None,
) -> None:  # fmt: skip
    """Show the last log lines of an instance, of all its processes or of one: `tokenizer_worker:0`, `scheduler`.

    They come from the supervisor's memory, which keeps the last 2000; older ones are in the log file.
    """
    from sglmt.control.instances import find_one
    from sglmt.control.reading import LogQuery, log_lines, parse_since

    try:
        since_unix_s = parse_since(since, time.time()) if since is not None else None
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--since") from None
    query = LogQuery(source=source, lines=lines, since_unix_s=since_unix_s, follow=follow, as_json=as_json)
    for line in log_lines(find_one(name, runtime_dir), query):
        click.echo(line)


@main.command(short_help="Print versions.")
def version() -> None:
    """Print the versions of sglmt and of what it runs on."""
    from sglmt.status.versions import version_lines

    click.echo("\n".join(version_lines()))


@main.command(
    cls=manual(
        (
            "To install",
            """
bash  sglmt completion bash > ~/.local/share/bash-completion/completions/sglmt
zsh   sglmt completion zsh > "${fpath[1]}/_sglmt"
fish  sglmt completion fish > ~/.config/fish/completions/sglmt.fish""",
        ),
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell."""
    from click.shell_completion import get_completion_class

    generator = get_completion_class(shell)
    if generator is None:
        fail(f"no completion for {shell}", ExitCode.FAILURE)
    click.echo(generator(main, {}, "sglmt", "_SGLMT_COMPLETE").source())
