"""`scripts/chaos`: options in, one JSON line out, exit code 0 only when no client noticed anything."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec

from sglmt.chaos.run import Settings, run
from sglmt.command_line import fail
from sglmt.errors import SglmtError

_STREAMS = {"simulator": 256, "openvino": 16}


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--seconds", type=click.FloatRange(1), default=180.0, show_default=True, help="How long.")
@click.option("--workers", type=click.IntRange(1, 64), default=4, show_default=True, help="Tokenizer workers.")
@click.option("--detokenizers", type=click.IntRange(1, 16), default=2, show_default=True, help="Detokenizers.")
@click.option("--streams", type=click.IntRange(1, 4096), help="Requests at once. [default: 256; openvino: 16]")
@click.option("--kill-workers", is_flag=True, help="Kill tokenizer workers too: exactly their requests may fail.")
@click.option(
    "--engine", type=click.Choice(["simulator", "openvino"]), default="simulator", show_default=True,
    help="simulator: every answer is known to the byte. openvino: a real model, answers are checked for sense.",
)  # fmt: skip
@click.option(
    "--heartbeat-timeout", type=click.FloatRange(0.5), default=3.0, show_default=True,
    help="Seconds after which a stopped process is replaced.",
)  # fmt: skip
@click.option("--step-ms", type=click.FloatRange(0), default=20.0, show_default=True, help="Simulator: time a token.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of requests and hits.")
def main(**options: Any) -> None:
    """Keep an instance busy while its processes are killed and stopped, and check every answer.

    Starts an instance of its own, takes the answers an undisturbed server gives, then keeps requests running
    (half of them streams; chat, completion and /generate; a quarter with log-probabilities) while every 0.5 to 2
    seconds a detokenizer, the router or the scheduler is killed with SIGKILL or stopped with SIGSTOP. Prints one line
    of JSON; the exit code is 0 when every answer was right, 1 when not.
    """
    settings = Settings(
        seconds=options["seconds"],
        workers=options["workers"],
        detokenizers=options["detokenizers"],
        streams=options["streams"] or _STREAMS[options["engine"]],
        kill_workers=options["kill_workers"],
        engine=options["engine"],
        heartbeat_timeout_s=options["heartbeat_timeout"],
        step_ms=options["step_ms"],
        seed=options["seed"],
    )
    try:
        report = run(settings)
    except SglmtError as error:
        fail(str(error), error.exit_code)
    click.echo(msgspec.json.encode(report).decode())
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main(prog_name="chaos")
