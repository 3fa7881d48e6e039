"""The verbs that change a running instance: scale, restart, reload, drain. Each parse → call → render.

Runs in the user's shell; `sglmt.cli` adds them to the command. What they do happens in the supervisor, and goes on
when the command is interrupted.
"""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem

from sglmt.command_line import manual

_GOES_ON = (
    "When it is interrupted",
    """
The command only watches: the change goes on in the supervisor. `sglmt status`
shows it, `sglmt logs` tells how it ended. Changes are made one at a time; one
that is asked for meanwhile waits for its turn.""",
)
_SHARED_CODES = """
  3  not running
  4  several instances run and none was named
  5  the instance has not come so far yet: nothing runs in it
  7  the instance is stopping"""
_SIGNALS = (
    "Signals",
    """
TTIN  one worker more      kill -TTIN $(PID of sglmt::supervisor)
TTOU  one worker less
HUP   the same as `sglmt reload`
Each signal that is delivered counts, and those that come while a scaling is
under way are added up; the sum is kept within the limits. The kernel merges
signals of one kind that arrive faster than a process can run: to set a number,
use `sglmt scale N`.""",
)


def _complete_names(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from sglmt.supervisor.rundir import find_instances

    names = {found.record.name for found in find_instances(None) if found.alive}
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


def _instance_options(function: Any) -> Any:
    function = click.option(
        "--runtime-dir", metavar="DIR", envvar="SGLMT_RUNTIME_DIR", type=click.Path(),
        help="Where run directories are, when not in the usual place.",
    )(function)  # fmt: skip
    return click.option("--name", shell_complete=_complete_names, help="Which instance, when several run.")(function)


@click.command(
    short_help="Set the number of workers.",
    cls=manual(
        _SIGNALS,
        _GOES_ON,
        (
            "Exit codes",
            f"""
  0  so many workers serve, and no other is left
  1  a new worker does not start; another number was asked for meanwhile{_SHARED_CODES}
  8  not so many serve after the start timeout; it goes on trying
 78  outside the limits, or an instance in single mode""",
        ),
        (
            "Examples",
            """
sglmt scale 8
sglmt scale 2 --name prod""",
        ),
    ),
)
@click.argument("workers", type=int, metavar="N")
@_instance_options
def scale(workers: int, name: str | None, runtime_dir: str | None) -> None:
    """Have N tokenizer workers, and wait until it is so.

    New workers take connections as soon as a request of their own has come back. Surplus ones, those with the
    highest indices, take no more connections, finish what they have within --drain-timeout of the launch, and end; no
    stream is cut, and clients on kept-alive connections are moved over with their next answer. The number is kept
    by later reloads, and forgotten when the instance is stopped. An instance in single mode (one worker, no
    router) cannot be scaled; launch it with `--router always` for that.
    """
    from sglmt.control.commands import Scale
    from sglmt.control.instances import find_one
    from sglmt.control.operating import carry_out

    carry_out(find_one(name, runtime_dir), Scale(workers=workers), click.echo)


@click.command(
    short_help="Restart processes while requests go on.",
    cls=manual(
        _GOES_ON,
        (
            "Exit codes",
            f"""
  0  all are replaced and ready
  1  a replacement failed; what was not replaced yet stays as it was
  2  there is no such process{_SHARED_CODES}
  8  a process was not ready in time""",
        ),
        (
            "Examples",
            """
sglmt restart                      everything
sglmt restart tokenizer_worker     the workers, one at a time
sglmt restart tokenizer_worker:2   one of them
sglmt restart router""",
        ),
    ),
)
@click.argument("target", required=False, default="all", metavar="[ROLE|ROLE:INDEX|all]")
@_instance_options
def restart(target: str, name: str | None, runtime_dir: str | None) -> None:
    """Restart all processes, those of one role, or one, and wait until they are ready again.

    Roles are scheduler, detokenizer, router and tokenizer_worker. Workers are replaced one at a time: the new one
    serves before the old one takes no more connections, finishes what it has and ends. A replacement that fails
    ends the restart, and the old worker stays. The other processes are ended and started again; requests that
    run go on where they were.
    """
    from sglmt.control.commands import Restart
    from sglmt.control.instances import find_one
    from sglmt.control.operating import carry_out

    carry_out(find_one(name, runtime_dir), Restart(target=target), click.echo)


@click.command(
    short_help="Apply the configuration as it is now.",
    cls=manual(
        (
            "What can be changed",
            """
Read again are the --config file and the files of keys and certificates; flags
and environment variables stay as they were at the launch.
Applied: --workers (unless the number was set by `sglmt scale`), keys,
certificates, timeouts, limits of requests, chat template, restart policy,
log level, --max-worker-rss and --max-worker-lifetime.
Refused, by name: what the instance is. Name, address, engine, model, tokenizer,
mode, detokenizers, --context-length, --max-running-requests,
--max-queued-requests.""",
        ),
        _GOES_ON,
        (
            "Exit codes",
            f"""
  0  all workers run with the new configuration
  1  a replacement failed; workers that were not replaced stay as they were{_SHARED_CODES}
 66  the model or tokenizer cannot be read any more; nothing was changed
 78  the configuration is refused; nothing was changed""",
        ),
    ),
)
@_instance_options
def reload(name: str | None, runtime_dir: str | None) -> None:
    """Read the configuration again and replace all workers, one at a time. The same as signal HUP.

    Everything is checked before anything is touched: a configuration that is refused changes nothing. Each new
    worker serves before an old one leaves; the first one that does not become ready ends the reload, and what is
    started from then on is started as before.
    """
    from sglmt.control.commands import Reload
    from sglmt.control.instances import find_one
    from sglmt.control.operating import carry_out

    carry_out(find_one(name, runtime_dir), Reload(), click.echo)


@click.command(
    short_help="Take no more requests, finish what runs.",
    cls=manual(
        (
            "Exit codes",
            """
0  it drains; with --wait: nothing runs any more
3  not running
4  several instances run and none was named
8  --wait: requests still run""",
        ),
    ),
)
@click.option("--wait", "-w", "wait_s", type=click.FloatRange(0, 86_400), metavar="S",
              help="Wait until nothing runs any more, at most so many seconds.")  # fmt: skip
@_instance_options
def drain(wait_s: float | None, name: str | None, runtime_dir: str | None) -> None:
    """Take no more requests and finish those that run; the instance then waits for `sglmt stop`.

    /ready answers 503 at once, so that a load balancer sends its clients elsewhere; new requests get 503 with
    Retry-After; running ones have no time limit. Draining does not end by itself, and cannot be taken back.
    """
    from sglmt.control.instances import find_one
    from sglmt.control.operating import drain as drain_instance

    drain_instance(find_one(name, runtime_dir), wait_s, click.echo)
