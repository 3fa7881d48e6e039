"""`sglmt bench URL`: load an OpenAI-compatible server and show what it gave. Runs in the user's shell.

One process, one event loop: it measures servers up to what a Python client can take in (some tens of thousands of
tokens a second). Progress goes to standard error and only to a terminal; the result to standard output.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Literal, cast

import click

from sglmt.command_line import fail, manual
from sglmt.errors import ExitCode

if TYPE_CHECKING:
    from sglmt.bench.client import Target
    from sglmt.bench.client_run import Outcome, Plan


@click.command(
    cls=manual(
        (
            "What is shown",
            """
requests/s, tokens/s   whole answers only, over the whole run
first token            from sending a request to the first text of its answer
inter-token            between two arrivals of text in one answer
request                from sending a request to the end of its answer""",
        ),
        (
            "Exit codes",
            """
0  every request was answered
1  some requests failed, or the server cannot be reached""",
        ),
        (
            "Examples",
            """
sglmt bench http://127.0.0.1:30000
sglmt bench http://127.0.0.1:8000 -c 64 -n 1000 --api chat --max-tokens 256""",
        ),
    )
)
@click.argument("url")
@click.option("--concurrency", "-c", type=click.IntRange(1, 4096), default=16, show_default=True, metavar="N",
              help="Requests under way at once.")  # fmt: skip
@click.option("--requests", "-n", type=click.IntRange(1, 1_000_000), default=128, show_default=True, metavar="N",
              help="Requests in all.")  # fmt: skip
@click.option("--prompt-tokens", type=click.IntRange(1, 1_000_000), default=128, show_default=True, metavar="N",
              help="About how long prompts are, each another text.")  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(1, 1_000_000), default=64, show_default=True, metavar="N",
              help="Longest answer.")  # fmt: skip
@click.option("--stream/--no-stream", default=True, show_default=True, help="Answers as event streams, or whole.")
@click.option("--api", type=click.Choice(["completions", "chat"]), default="completions", show_default=True,
              help="/v1/completions or /v1/chat/completions.")  # fmt: skip
@click.option("--model", metavar="NAME", help="Model to ask for. Default: the first the server names.")
@click.option("--api-key", metavar="KEY", envvar="SGLMT_API_KEY", help="Key to send; better in SGLMT_API_KEY.")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Of the prompts.")
@click.option("--json", "as_json", is_flag=True, help="JSON on standard output, and nothing else.")
def bench(
    url: str, concurrency: int, requests: int, prompt_tokens: int, max_tokens: int, stream: bool, api: str,
    model: str | None, api_key: str | None, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Measure any OpenAI-compatible server from the outside."""
    import asyncio

    from sglmt.bench.client import Target
    from sglmt.bench.client_run import Plan, served_model

    target = Target.of_url(url, api_key)
    chosen_model = model or asyncio.run(served_model(target))
    kind = cast(Literal["completions", "chat"], api)
    plan = Plan(kind, chosen_model, requests, concurrency, prompt_tokens, max_tokens, stream, seed)
    outcome = _run(plan, target)
    _show(outcome, plan, as_json)
    if len(outcome.good) < requests:
        sys.exit(int(ExitCode.FAILURE))


def _run(plan: Plan, target: Target) -> Outcome:
    """Run with a progress bar on a terminal. Ends the command when nothing was answered at all."""
    import asyncio

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from sglmt.bench.client import Answer
    from sglmt.bench.client_run import run_plan

    console = Console(stderr=True, highlight=False)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("requests"), TimeRemainingColumn(),
               TextColumn("{task.fields[failed]}", style="red"))  # fmt: skip
    failures = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=plan.requests, failed="")

        def answered(answer: Answer) -> None:
            nonlocal failures
            failures += answer.error is not None
            progress.update(task, advance=1, failed=f"{failures} failed" if failures else "")

        outcome = asyncio.run(run_plan(plan, target, answered))
    if not outcome.good:
        reason, times = next(iter(outcome.errors.items()))
        fail(f"none of {times} requests was answered: {reason}", ExitCode.FAILURE)
    return outcome


def _show(outcome: Outcome, plan: Plan, as_json: bool) -> None:
    import msgspec

    if as_json:
        document = {"plan": msgspec.to_builtins(plan), "outcome": outcome.as_json()}
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))
        return
    from sglmt.bench.client_render import outcome_table
    from sglmt.status.output import wants_colour
    from sglmt.status.render import Canvas, supports_unicode, to_text

    canvas = Canvas(100, supports_unicode(sys.stdout.encoding))
    colour = wants_colour(os.environ, sys.stdout.isatty())
    click.echo(to_text(outcome_table(outcome), canvas, colour), nl=False, color=colour)
    for reason, times in outcome.errors.items():
        click.echo(f"failed {times} times: {reason}", err=True)
