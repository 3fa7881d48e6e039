"""Short requests, the time to the first token, and long chats. Runs in `scripts/bench`; the engine has no pace.

Prompts are natural English, each another one, so that no cache of words or prompts flatters a tokenizer; the
`repeated` scenario sends one prompt again and again, which is what such a cache is for.
"""

from __future__ import annotations

import asyncio
import http.client
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from sglmt.bench.bench import Bench, Load, Measured, note_noise
from sglmt.bench.client import Connection, Target
from sglmt.bench.figures import Bar, Result, at_least, at_most, percentile
from sglmt.bench.server import Server
from sglmt.bench.texts import prompts, prose

_FREE = ("--simulator-step-ms", "0", "--max-running-requests", "4096", "--context-length", "32768")
CALIBRATION_PROMPTS = 20


@dataclass(frozen=True)
class Short:
    """One scenario of short requests."""

    tokens: int
    backend: str
    bar: Bar
    full: int  # requests a repeat
    repeated: bool = False


SHORT = {
    "short-128-huggingface": Short(128, "huggingface", at_least(1_000), 4_000),
    "short-128-fastokens": Short(128, "fastokens", at_least(4_000), 12_000),
    "short-128-repeated": Short(128, "auto", at_least(5_000), 15_000, repeated=True),
    "short-2048-huggingface": Short(2048, "huggingface", at_least(130), 600),
    "short-2048-fastokens": Short(2048, "fastokens", at_least(1_000), 3_000),
}


def scenarios() -> dict[str, Callable[[Bench, str], Result]]:
    """Name → how it is measured."""
    short = {name: partial(measure_short, scenario=scenario) for name, scenario in SHORT.items()}
    return {
        **short,
        "first-token-multi": partial(measure_first_token, workers=2, bars=(at_most(1.3), at_most(3))),
        "first-token-single": partial(measure_first_token, workers=1, bars=(at_most(1.2), at_most(3))),
        "chat-20-turns": measure_chat,
    }


def chars_per_token(port: int, tokens: int) -> float:
    """Of our prose, by the tokenizer of the server on `port`."""
    texts = prompts(CALIBRATION_PROMPTS, tokens, seed=-1)
    return sum(map(len, texts)) / sum(count_tokens(port, text) for text in texts)


def count_tokens(port: int, text: str) -> int:
    """How many tokens the server's tokenizer makes of a text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("POST", "/tokenize", msgspec.json.encode({"prompt": text}))
        return int(msgspec.json.decode(connection.getresponse().read())["count"])
    finally:
        connection.close()


def measure_short(bench: Bench, name: str, scenario: Short) -> Result:
    """One token out, 64 connections, not streamed. Every repeat has prompts of its own."""
    requests = scenario.full // bench.scaled(1, 10)
    result = Result(name, {"connections": 64, "workers": 2, "requests": requests, "backend": scenario.backend})
    measured: list[Measured] = []
    with Server(bench.runtime_dir, "--workers", "2", "--tokenizer-backend", scenario.backend, *_FREE) as server:
        processes = server.processes()
        ratio = chars_per_token(server.port, scenario.tokens)
        for repeat in range(bench.repeats):
            bench.say(f"{name}: repeat {repeat + 1} of {bench.repeats}")
            different = 1 if scenario.repeated else requests
            texts = prompts(different, scenario.tokens, seed=repeat, chars_per_token=ratio)
            bodies = bench.bodies(name, [_completion(text, 1) for text in texts])
            before = server.snapshot().totals.prompt_tokens
            ours = bench.measure(processes, server.port, Load("/v1/completions", bodies, 64, requests, stream=False))
            measured.append(ours)
            result.add("requests", "req/s", requests / ours.report.wall_s, scenario.bar)
            result.add("latency_p50", "ms", ours.report.total_ms.p50)
            result.add("latency_p99", "ms", ours.report.total_ms.p99)
            result.add("cpu_all", "µs/request", 1e6 * ours.total_cpu_s / requests)
            for role, seconds in ours.cpu_s.items():
                result.add(f"cpu_{role}", "µs/request", 1e6 * seconds / requests)
            result.add("prompt_tokens", "tokens", (server.snapshot().totals.prompt_tokens - before) / requests)
    note_noise(result, measured)
    return result


def _completion(text: str, max_tokens: int, stream: bool = False) -> dict[str, Any]:
    body = {"model": "default", "prompt": text, "max_tokens": max_tokens, "ignore_eos": True}
    return {**body, "stream": True} if stream else body


def measure_first_token(bench: Bench, name: str, workers: int, bars: tuple[Bar, Bar]) -> Result:
    """One streaming request at a time on one connection, a new 128-token prompt each."""
    requests = bench.scaled(500, 100)
    result = Result(name, {"connections": 1, "workers": workers, "requests": requests, "prompt_tokens": 128})
    measured: list[Measured] = []
    with Server(bench.runtime_dir, "--workers", str(workers), *_FREE) as server:
        processes = server.processes()
        ratio = chars_per_token(server.port, 128)
        for repeat in range(bench.repeats):
            bench.say(f"{name}: repeat {repeat + 1} of {bench.repeats}")
            texts = prompts(requests, 128, seed=repeat, chars_per_token=ratio)
            bodies = bench.bodies(name, [_completion(text, 4, stream=True) for text in texts])
            ours = bench.measure(processes, server.port, Load("/v1/completions", bodies, 1, requests, stream=True))
            measured.append(ours)
            result.add("first_p50", "ms", ours.report.first_ms.p50, bars[0])
            result.add("first_p99", "ms", ours.report.first_ms.p99, bars[1])
            result.add("total_p50", "ms", ours.report.total_ms.p50)
    note_noise(result, measured)
    return result


def measure_chat(bench: Bench, name: str) -> Result:
    """A conversation on one connection whose 20th turn has 16k tokens: is an old turn paid for again?"""
    turns, last_tokens, answer_tokens = 20, 16_384, 32
    result = Result(name, {"turns": turns, "tokens_at_last_turn": last_tokens, "workers": 2})
    with Server(bench.runtime_dir, "--workers", "2", *_FREE) as server:
        ratio = chars_per_token(server.port, last_tokens // turns)
        for repeat in range(bench.repeats + 1):  # the first conversation warms up and is not counted
            bench.say(f"{name}: conversation {repeat + 1} of {bench.repeats + 1}")
            turn_chars = round((last_tokens / turns - answer_tokens) * ratio)
            times_ms = asyncio.run(_converse(server.port, turns, turn_chars, answer_tokens, repeat))
            if repeat:
                result.add("first_turn", "ms", times_ms[0])
                result.add("last_turn", "ms", times_ms[-1])
                result.add("median_turn", "ms", percentile(sorted(times_ms), 0.5))
                result.add("last_to_first", "×", times_ms[-1] / times_ms[0], at_most(2))
    return result


async def _converse(port: int, turns: int, turn_chars: int, answer_tokens: int, seed: int) -> list[float]:
    """Milliseconds to the first token of every turn."""
    rng = random.Random(f"chat/{seed}")
    messages: list[dict[str, str]] = []
    times_ms: list[float] = []
    connection = Connection(Target("127.0.0.1", port))
    try:
        for _ in range(turns):
            messages.append({"role": "user", "content": prose(turn_chars, rng)})
            body = msgspec.json.encode(
                {"model": "default", "messages": messages, "max_tokens": answer_tokens, "stream": True,
                 "ignore_eos": True}
            )  # fmt: skip
            answer = await connection.request("/v1/chat/completions", body, stream=True)
            answer.raise_for_failure()
            times_ms.append(1000 * answer.first_token_s)
            messages.append({"role": "assistant", "content": answer.text})
    finally:
        connection.close()
    return times_ms
