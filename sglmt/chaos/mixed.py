"""`scripts/mixed`: ten thousand requests of every kind over many workers, nothing disturbed; every answer must be the
one the reference gives, nothing may be left and nothing may grow. Runs as `python -m sglmt.chaos.mixed`.

Prints one line of JSON; the exit code is 0 only when everything was as it must be. The reference is computed in this
process, without a server.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from sglmt.chaos.client import Client
from sglmt.chaos.instance import ChaosInstance
from sglmt.chaos.mixed_load import MixedLoad
from sglmt.chaos.mixed_reference import Reference
from sglmt.chaos.mixed_state import NEVER, InstanceState, grown, unexplained
from sglmt.command_line import fail
from sglmt.errors import SglmtError
from sglmt.ipc.state_page import SlotWord

LOG_LINES_ON_FAILURE = 60
MUST_OCCUR = ("aborted by id", "duplicates refused", "left in the middle", "left without a byte")


@dataclass(frozen=True)
class Settings:
    """What was asked for on the command line."""

    requests: int
    at_once: int
    workers: int
    detokenizers: int
    step_ms: float
    tolerance_kib: int
    seed: int

    def launch_options(self) -> list[str]:
        """Options of `sglmt launch`."""
        return [
            "--engine", "simulator", "--simulator-step-ms", str(self.step_ms), "--workers", str(self.workers),
            "--detokenizers", str(self.detokenizers),
        ]  # fmt: skip


def run(settings: Settings) -> dict[str, Any]:
    """Launch, ask, stop; the report. Raises SglmtError when the instance does not start."""
    with tempfile.TemporaryDirectory(prefix="sglmt-mixed-") as cache:
        reference = Reference(Path(cache))
        _say(f"launching: sglmt launch {' '.join(settings.launch_options())}")
        with ChaosInstance(settings.launch_options()) as instance:
            state = InstanceState(instance)
            try:
                report = _run(settings, instance, state, reference)
            finally:
                state.close()
            if not report["ok"]:
                _say(instance.log_tail(LOG_LINES_ON_FAILURE))
    report["stopped_cleanly"] = instance.stopped_cleanly
    report["ok"] = report["ok"] and instance.stopped_cleanly
    return report


def _run(settings: Settings, instance: ChaosInstance, state: InstanceState, reference: Reference) -> dict[str, Any]:
    load = MixedLoad(Client(instance.url), reference, settings.seed)
    began_s = time.monotonic()
    memory_kib: list[dict[str, int]] = []
    held: list[dict[str, int]] = []
    half = settings.requests // 2
    for numbers in (range(half), range(half, settings.requests)):
        asyncio.run(load.run(iter(numbers), settings.at_once))
        held.append(state.wait_until_nothing_is_held())
        memory_kib.append(state.memory_kib())
        _say(f"{numbers.stop} requests after {time.monotonic() - began_s:.0f} s, {load.tally.wrong} wrong")
    return _report(settings, instance, state, load, time.monotonic() - began_s, held, memory_kib)


def _report(
    settings: Settings,
    instance: ChaosInstance,
    state: InstanceState,
    load: MixedLoad,
    took_s: float,
    held: list[dict[str, int]],
    memory_kib: list[dict[str, int]],
) -> dict[str, Any]:
    tally, snapshot = load.tally, instance.snapshot()
    too_much = grown(memory_kib[0], memory_kib[1], settings.tolerance_kib)
    counters = unexplained(state, tally)
    missing = [name for name in MUST_OCCUR if not tally.outcomes[name]]
    restarts = sum(row.restarts for row in snapshot.processes)
    return {
        "ok": not (tally.wrong or any(held) or too_much or counters or missing or restarts)
        and snapshot.state == "running",
        "requests": settings.requests,
        "seconds": round(took_s, 1),
        "at_once": settings.at_once,
        "workers": settings.workers,
        "detokenizers": settings.detokenizers,
        "seed": settings.seed,
        "actions": dict(sorted(tally.actions.items())),
        "outcomes": dict(sorted(tally.outcomes.items())),
        "tokens": tally.tokens,
        "longest_request_s": round(tally.longest_s, 2),
        "wrong": tally.wrong,
        "did_not_occur": missing,
        "restarts": restarts,
        "held_after_each_half": held,
        "memory_tolerance_kib": settings.tolerance_kib,
        "memory_grown_too_much": too_much,
        "memory_growth_kib": {name: memory_kib[1].get(name, 0) - kib for name, kib in sorted(memory_kib[0].items())},
        "counters_unexplained": counters,
        "counters": {word.name.lower(): state.total(word) for word in (*NEVER, SlotWord.LATE_ROWS)},
        "late_rows_at_most": tally.rows_under_way_at_most,
        "problems": tally.problems,
    }


def _say(text: str) -> None:
    """Progress goes to stderr: stdout has the report and nothing else."""
    print(text, file=sys.stderr, flush=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--requests", type=click.IntRange(100), default=10_000, show_default=True, help="How many.")
@click.option("--at-once", type=click.IntRange(1, 1024), default=32, show_default=True, help="Clients at a time.")
@click.option("--workers", type=click.IntRange(1, 64), default=4, show_default=True, help="Tokenizer workers.")
@click.option("--detokenizers", type=click.IntRange(1, 16), default=2, show_default=True, help="Detokenizers.")
@click.option("--step-ms", type=click.FloatRange(0), default=2.0, show_default=True, help="Simulator: time a token.")
@click.option(
    "--tolerance-kib", type=click.IntRange(0), default=1536, show_default=True,
    help="How much more memory each process may hold after the second half of the requests than after the first.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Of the requests.")
def main(**options: Any) -> None:
    """Send requests of every kind to an instance of its own and check every answer against one computed here.

    Chat, completion, /generate and embeddings; batches, several answers a prompt, log-probabilities, stop strings,
    streamed or not; requests that are aborted, left by their client, sent twice under one id, or that must be
    refused. At the end nothing may be held, memory may not have grown, and the server's counters must agree with
    what the clients saw. Prints one line of JSON; the exit code is 0 when all was right, 1 when not.
    """
    try:
        report = run(Settings(**options))
    except SglmtError as error:
        fail(str(error), error.exit_code)
    click.echo(msgspec.json.encode(report).decode())
    sys.exit(0 if report["ok"] else 1)


if __name__ == "__main__":
    main(prog_name="mixed")
