"""One chaos run from launch to verdict: reference answers, load and killer together, the figures. Runs as
`python -m sglmt.chaos`.

The verdict is in the report: `ok` is true only when every answer was the one an undisturbed server gives.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

from sglmt.chaos.answers import Answer
from sglmt.chaos.client import Client
from sglmt.chaos.instance import ChaosInstance
from sglmt.chaos.killer import READY_WITHIN_S, Killer
from sglmt.chaos.load import Load
from sglmt.chaos.plan import Wanted, make_plan, with_stop

MAX_RESTARTS = 100_000  # the budget is raised: the deaths are ours
BACKOFF_MAX_S = 0.25
UNEXPLAINED = ("unroutable", "undecodable")
LOG_LINES_ON_FAILURE = 60
REFERENCES_AT_ONCE = 8  # a real engine answers a few at a time; the simulator all of them
IDLE_WITHIN_S = 10.0


@dataclass(frozen=True)
class Settings:
    """What was asked for on the command line."""

    seconds: float
    workers: int
    detokenizers: int
    streams: int
    kill_workers: bool
    engine: Literal["simulator", "openvino"]
    heartbeat_timeout_s: float
    step_ms: float
    seed: int

    @property
    def is_exact(self) -> bool:
        """Whether every answer can be predicted to the byte."""
        return self.engine == "simulator"

    def launch_options(self) -> list[str]:
        """Options of `sglmt launch`."""
        options = {
            "--workers": self.workers,
            "--detokenizers": self.detokenizers,
            "--engine": self.engine,
            "--heartbeat-timeout": self.heartbeat_timeout_s,
            "--max-restarts": MAX_RESTARTS,
            "--restart-backoff-max": BACKOFF_MAX_S,
            "--max-running-requests": max(self.streams, self.detokenizers),
            **({"--simulator-step-ms": self.step_ms} if self.is_exact else {}),
        }
        return [str(part) for pair in options.items() for part in pair]

    def plan(self) -> list[Wanted]:
        """Real tokens take longer and are fewer; some of them go on past the end of the text to a known length."""
        if self.is_exact:
            return make_plan(max(24, min(96, self.streams)), self.seed, (16, 160), ignore_eos=False)
        return make_plan(24, self.seed, (12, 48), ignore_eos=True)


def run(settings: Settings) -> dict[str, Any]:
    """Launch, disturb, stop; the report. Raises SglmtError when the instance does not start."""
    _say(f"launching: sglmt launch {' '.join(settings.launch_options())}")
    with ChaosInstance(settings.launch_options()) as instance:
        report = asyncio.run(_run(settings, instance))
        if not report["ok"]:
            _say(instance.log_tail(LOG_LINES_ON_FAILURE))
    report["stopped_cleanly"] = instance.stopped_cleanly
    report["ok"] = report["ok"] and instance.stopped_cleanly
    return report


async def _run(settings: Settings, instance: ChaosInstance) -> dict[str, Any]:
    client = Client(instance.url)
    references: dict[int, Answer] = {}

    def judge(wanted: Wanted, answer: Answer) -> str | None:
        return _judge(wanted, answer, references[wanted.number], settings.is_exact)

    plan = settings.plan()
    reader = Load(client, plan, judge, settings.seed)
    plan = await _take_references(plan, reader, references, settings.is_exact)
    _say(f"{len(references)} reference answers taken; chaos for {settings.seconds:g} s")
    load = Load(client, plan, judge, settings.seed)
    roles = ["detokenizer", "detokenizer", "router", "scheduler"]
    if settings.workers == 1:
        roles.remove("router")
    if settings.kill_workers:
        roles.append("tokenizer_worker")
    killer = Killer(instance, settings.seed, roles, load.doom)
    began_s = time.monotonic()
    until_s = began_s + settings.seconds
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(settings.streams, until_s))
        group.create_task(killer.run(until_s))
    took_s = time.monotonic() - began_s
    await killer.ready(time.monotonic() + READY_WITHIN_S)
    idle = await _becomes_idle(instance)
    return _report(settings, instance, load, killer, took_s, idle)


async def _take_references(plan: list[Wanted], load: Load, references: dict[int, Answer], exact: bool) -> list[Wanted]:
    """Undisturbed answers to everything; every third request then ends at a stop string from its own text."""
    for number, answer in enumerate(await _ask_all(load, plan, exact)):
        references[number] = answer
    if not exact:
        return plan
    changed = [with_stop(wanted, references[wanted.number]) if wanted.number % 3 == 1 else wanted for wanted in plan]
    for wanted, answer in zip(changed, await _ask_all(load, changed, exact), strict=True):
        references[wanted.number] = answer
    return changed


async def _ask_all(load: Load, plan: list[Wanted], at_once: bool) -> list[Answer]:
    """Every answer, in order."""
    answers: list[Answer] = []
    size = len(plan) if at_once else REFERENCES_AT_ONCE
    for first in range(0, len(plan), size):
        part = plan[first : first + size]
        answers += await asyncio.gather(*(load.ask(wanted, stream=False) for wanted in part))
    return answers


def _judge(wanted: Wanted, answer: Answer, reference: Answer, exact: bool) -> str | None:
    """What is wrong with an answer, None when nothing is."""
    if exact:
        return reference.difference(answer)
    if answer.prompt_tokens != reference.prompt_tokens:
        return f"prompt_tokens: got {answer.prompt_tokens}, expected {reference.prompt_tokens}"
    if not answer.text.strip():
        return "the text is empty"
    if answer.completion_tokens != wanted.max_tokens or not answer.finish.startswith("length"):
        return f"{answer.completion_tokens} tokens ({answer.finish}), {wanted.max_tokens} were asked for"
    for name, values in (("ids", answer.token_ids), ("log-probabilities", answer.logprobs)):
        if values is not None and len(values) != answer.completion_tokens:
            return f"{len(values)} {name} for {answer.completion_tokens} tokens"
    return None


async def _becomes_idle(instance: ChaosInstance) -> bool:
    """Whether nothing is running or waiting soon after the last answer."""
    deadline_s = time.monotonic() + IDLE_WITHIN_S
    while time.monotonic() < deadline_s:
        snapshot = instance.snapshot()
        busy = [row for row in snapshot.processes if row.in_flight and row.role != "supervisor"]
        if not busy and not snapshot.totals.running and not snapshot.totals.queued:
            return True
        await asyncio.sleep(0.1)
    _say("still busy: " + ", ".join(f"{row.role}:{row.index} {row.in_flight}" for row in busy))
    return False


def _report(
    settings: Settings, instance: ChaosInstance, load: Load, killer: Killer, took_s: float, idle: bool
) -> dict[str, Any]:
    tally, counters = load.tally, instance.snapshot().totals.counters
    unexplained = {name: counters.get(name, 0) for name in UNEXPLAINED}
    failed = tally.errors + tally.hangs + tally.wrong + tally.repeated_ids + len(killer.not_replaced)
    return {
        "ok": failed == 0 and not any(unexplained.values()) and idle and tally.requests > 0 and bool(killer.hits),
        "engine": settings.engine,
        "seconds": round(took_s, 1),
        "workers": settings.workers,
        "detokenizers": settings.detokenizers,
        "streams": settings.streams,
        "seed": settings.seed,
        "requests": tally.requests,
        "streamed": tally.streamed,
        "tokens": tally.tokens,
        "distinct_requests": len(load.answers_seen),
        "longest_request_s": round(tally.longest_s, 1),
        "errors": tally.errors,
        "hangs": tally.hangs,
        "wrong_answers": tally.wrong,
        "repeated_ids": tally.repeated_ids,
        "held_by_killed_workers": tally.held_by_killed_workers,
        "cut_by_worker_kills": tally.cut_by_worker_kills,
        "hits": dict(sorted(killer.hits.items())),
        "not_replaced": killer.not_replaced,
        "idle_afterwards": idle,
        "unexplained": unexplained,
        "counters": {
            name: counters.get(name, 0)
            for name in ("resumes", "resubmissions", "gap_rows", "duplicate_rows", "stale_attempt_rows", "late_rows",
                         "dropped_messages", "approximate_resumes")
        },
        "problems": tally.problems,
    }  # fmt: skip


def _say(text: str) -> None:
    """Progress goes to stderr: stdout has the report and nothing else."""
    print(text, file=sys.stderr, flush=True)
