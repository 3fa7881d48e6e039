"""`scripts/soak`: options in, one JSON line out, exit code 0 only when nothing failed and nothing leaked."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec

from sglmt.command_line import fail
from sglmt.errors import SglmtError
from sglmt.soak.run import Settings, run


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--seconds", type=click.FloatRange(10), default=600.0, show_default=True, help="How long.")
@click.option("--workers", type=click.IntRange(2, 32), default=4, show_default=True, help="Tokenizer workers.")
@click.option("--rate", type=click.FloatRange(1), default=200.0, show_default=True, help="Requests a second.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the hits.")
def main(**options: Any) -> None:
    """Keep an instance of its own under load, hit a random process every second, scale and restart it meanwhile.

    Every request comes on a connection of its own. Every second a random child gets SIGKILL, SIGSTOP or SIGTERM; the
    workers are scaled up and down twice and restarted twice. Prints one line of JSON. The exit code is 0 when
    every request was answered but those that a killed worker held, the instance ended healthy, and it holds no
    process, thread, descriptor, segment or file more than at the start; 1 when not.
    """
    try:
        report = run(Settings(**options))
    except SglmtError as error:
        fail(str(error), error.exit_code)
    click.echo(msgspec.json.encode(report).decode())
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main(prog_name="soak")
