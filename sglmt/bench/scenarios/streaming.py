"""Streaming: many streams at a set pace beside the floor of the same run, and as fast as it goes.

Runs in `scripts/bench`. CPU figures are microseconds of all server processes a delivered token, which is CPU
seconds a million tokens; the load client is not counted. The floor sends the bytes an event that ours just sent,
at the same pace, with as many processes as there are workers, alternating with ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglmt.bench.bench import Bench, Load, Measured, note_noise
from sglmt.bench.figures import Bar, Result, at_least, at_most
from sglmt.bench.floor import Floor
from sglmt.bench.server import Server

STEP_S = 0.020
CHUNK_FRAMING_BYTES = 6  # two hexadecimal digits and two line ends around a chunk of up to 255 bytes
PROMPT = "The quick brown fox jumps over the lazy dog"


@dataclass(frozen=True)
class Bars:
    """Limits of one paced scenario."""

    tokens_per_s: Bar | None = None
    gap_p99_ms: Bar | None = None
    times_floor: Bar | None = None


@dataclass(frozen=True)
class Paced:
    """One paced scenario."""

    streams: int
    api: str = "completions"
    workers: int = 2
    bars: Bars = Bars()


API_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/generate"}

PACED = {
    "paced-64": Paced(64, bars=Bars(times_floor=at_most(1.5))),
    "paced-256": Paced(256, bars=Bars(at_least(12_600), at_most(26), at_most(1.2))),
    "paced-1024": Paced(1024, bars=Bars(tokens_per_s=at_least(45_000), times_floor=at_most(1.05))),
    "paced-256-chat": Paced(256, "chat"),
    "paced-256-generate": Paced(256, "generate"),
}


def scenarios() -> dict[str, Callable[[Bench, str], Result]]:
    """Name → how it is measured."""
    paced = {name: partial(measure_paced, scenario=scenario) for name, scenario in PACED.items()}
    return {**paced, "paced-256-8-workers": measure_more_workers, "free-256": measure_free}


def streaming_body(api: str, tokens: int) -> dict[str, Any]:
    """A streaming request of exactly `tokens` output tokens."""
    if api == "generate":
        return {"text": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
    common = {"model": "default", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    if api == "chat":
        return {**common, "messages": [{"role": "user", "content": PROMPT}]}
    return {**common, "prompt": PROMPT}


def measure_paced(bench: Bench, name: str, scenario: Paced) -> Result:
    """Ours and the floor in turns, on the same load."""
    tokens = 128
    requests = scenario.streams * bench.scaled(4, 1)
    result = Result(name, {"streams": scenario.streams, "workers": scenario.workers, "api": scenario.api,
                           "step_ms": STEP_S * 1000, "tokens_per_request": tokens, "requests": requests})  # fmt: skip
    bodies = bench.bodies(name, [streaming_body(scenario.api, tokens)])
    load = Load(API_PATHS[scenario.api], bodies, scenario.streams, requests, stream=True)
    options = ("--workers", str(scenario.workers), "--simulator-step-ms", f"{STEP_S * 1000:g}",
               "--max-running-requests", "4096")  # fmt: skip
    measured: list[Measured] = []
    with Server(bench.runtime_dir, *options) as server:
        processes = server.processes()
        warm_up = load._replace(requests=scenario.streams, connections=scenario.streams)
        first = bench.measure(processes, server.port, warm_up).report
        event_bytes = max(32, round(first.bytes / first.events) - CHUNK_FRAMING_BYTES)
        result.settings["event_bytes"] = event_bytes
        with Floor(scenario.workers, STEP_S, tokens, event_bytes) as floor:
            for repeat in range(bench.repeats):
                bench.say(f"{name}: repeat {repeat + 1} of {bench.repeats}")
                ours = bench.measure(processes, server.port, load)
                bare = bench.measure(floor.processes, floor.port, load)
                measured += [ours, bare]
                _add_paced(result, ours, bare, requests * tokens, scenario.bars)
    note_noise(result, measured)
    return result


def _add_paced(result: Result, ours: Measured, bare: Measured, tokens: int, bars: Bars) -> None:
    report = ours.report
    floor_us = 1e6 * bare.total_cpu_s / tokens
    all_us = 1e6 * ours.total_cpu_s / tokens
    result.add("tokens", "tok/s", tokens / report.wall_s, bars.tokens_per_s)
    result.add("gap_p50", "ms", report.gap_ms.p50)
    result.add("gap_p99", "ms", report.gap_ms.p99, bars.gap_p99_ms)
    result.add("first_p50", "ms", report.first_ms.p50)
    result.add("cpu_all", "µs/token", all_us)
    result.add("cpu_floor", "µs/token", floor_us)
    result.add("times_floor", "×", all_us / floor_us, bars.times_floor)
    add_cpu_by_role(result, ours, tokens)
    result.add("cpu_client", "µs/token", 1e6 * report.client_cpu_s / tokens)
    result.add("floor_tokens", "tok/s", tokens / bare.report.wall_s)
    result.add("floor_gap_p99", "ms", bare.report.gap_ms.p99)


def add_cpu_by_role(result: Result, measured: Measured, tokens: int) -> None:
    """One figure a role, microseconds a token."""
    for role, seconds in measured.cpu_s.items():
        result.add(f"cpu_{role}", "µs/token", 1e6 * seconds / tokens)


def measure_more_workers(bench: Bench, name: str) -> Result:
    """The same load on 2 and on 8 workers, in turns: what do processes cost that are not needed? The floor with as many
    processes tells what part of that no server can do without: each of them wakes up at every step."""
    streams, tokens, event_bytes = 256, 128, 200
    requests = streams * bench.scaled(4, 1)
    result = Result(name, {"streams": streams, "workers": "2 and 8", "step_ms": STEP_S * 1000, "requests": requests})
    load = Load(API_PATHS["completions"], bench.bodies(name, [streaming_body("completions", tokens)]), streams,
                requests, stream=True)  # fmt: skip
    measured: list[Measured] = []
    with (
        Server(bench.runtime_dir, "--workers", "2", "--max-running-requests", "4096") as few,
        Server(bench.runtime_dir, "--workers", "8", "--max-running-requests", "4096") as many,
        Floor(2, STEP_S, tokens, event_bytes) as floor_of_few,
        Floor(8, STEP_S, tokens, event_bytes) as floor_of_many,
    ):
        of_few, of_many = few.processes(), many.processes()
        for repeat in range(bench.repeats):
            bench.say(f"{name}: repeat {repeat + 1} of {bench.repeats}")
            two = bench.measure(of_few, few.port, load)
            eight = bench.measure(of_many, many.port, load)
            bare_two = bench.measure(floor_of_few.processes, floor_of_few.port, load)
            bare_eight = bench.measure(floor_of_many.processes, floor_of_many.port, load)
            measured += [two, eight, bare_two, bare_eight]
            result.add("cpu_2_workers", "µs/token", 1e6 * two.total_cpu_s / (requests * tokens))
            result.add("cpu_8_workers", "µs/token", 1e6 * eight.total_cpu_s / (requests * tokens))
            result.add("times_2_workers", "×", eight.total_cpu_s / two.total_cpu_s, at_most(1.10))
            result.add("floor_times_2_processes", "×", bare_eight.total_cpu_s / bare_two.total_cpu_s)
            result.add("tokens_8_workers", "tok/s", requests * tokens / eight.report.wall_s)
    note_noise(result, measured)
    return result


def measure_free(bench: Bench, name: str) -> Result:
    """No pace: the engine gives tokens as fast as it can, and everything behind it keeps up or coalesces."""
    streams, tokens = 256, bench.scaled(2048, 512)
    requests = streams * bench.scaled(2, 1)
    result = Result(name, {"streams": streams, "workers": 2, "tokens_per_request": tokens, "requests": requests})
    load = Load(API_PATHS["completions"], bench.bodies(name, [streaming_body("completions", tokens)]), streams,
                requests, stream=True)  # fmt: skip
    measured: list[Measured] = []
    with Server(bench.runtime_dir, "--workers", "2", "--simulator-step-ms", "0", "--max-running-requests", "4096",
                "--context-length", "16384") as server:  # fmt: skip
        processes = server.processes()
        for repeat in range(bench.repeats):
            bench.say(f"{name}: repeat {repeat + 1} of {bench.repeats}")
            ours = bench.measure(processes, server.port, load)
            measured.append(ours)
            delivered = requests * tokens
            result.add("tokens", "tok/s", delivered / ours.report.wall_s, at_least(120_000))
            result.add("cpu_all", "µs/token", 1e6 * ours.total_cpu_s / delivered, at_most(10))
            result.add("tokens_per_event", "tokens", delivered / ours.report.events)
            add_cpu_by_role(result, ours, delivered)
    note_noise(result, measured)
    return result
