"""`sglmt bench URL` without its terminal: N requests over C connections, and what came of them.

Runs in the command's process on one event loop. Each of the C tasks owns one connection and takes the next request
when its last one is answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from sglmt.bench.client import Answer, Connection, Target
from sglmt.bench.figures import percentile, rounded
from sglmt.bench.texts import prompts
from sglmt.errors import SglmtError

QUANTILES = (0.5, 0.9, 0.99)
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True)
class Plan:
    """What to send. `prompt_tokens` is an estimate: the server's own count is in the outcome."""

    api: Literal["completions", "chat"]
    model: str
    requests: int
    concurrency: int
    prompt_tokens: int
    max_tokens: int
    stream: bool
    seed: int = 0

    def bodies(self) -> list[bytes]:
        """One body a request, each with another prompt."""
        return [msgspec.json.encode(self._body(text)) for text in prompts(self.requests, self.prompt_tokens, self.seed)]

    def _body(self, text: str) -> dict[str, Any]:
        content = {"messages": [{"role": "user", "content": text}]} if self.api == "chat" else {"prompt": text}
        body = {"model": self.model, **content, "max_tokens": self.max_tokens}
        return {**body, "stream": True, "stream_options": {"include_usage": True}} if self.stream else body


@dataclass
class Outcome:
    """All answers of one run."""

    wall_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    @property
    def good(self) -> list[Answer]:
        """Whole answers."""
        return [answer for answer in self.answers if answer.error is None]

    @property
    def errors(self) -> dict[str, int]:
        """Reason → how often, the commonest first."""
        counted: dict[str, int] = {}
        for answer in self.answers:
            if answer.error is not None:
                counted[answer.error] = counted.get(answer.error, 0) + 1
        return dict(sorted(counted.items(), key=lambda item: -item[1]))

    def as_json(self) -> dict[str, Any]:
        """Rates a second, times in milliseconds, counts."""
        good = self.good
        wall_s = self.wall_s or float("nan")
        prompt_tokens = [answer.prompt_tokens for answer in good if answer.prompt_tokens is not None]
        return {
            "wall_s": rounded(self.wall_s),
            "requests": len(self.answers),
            "failed": len(self.answers) - len(good),
            "errors": self.errors,
            "requests_per_s": rounded(len(good) / wall_s),
            "output_tokens": sum(answer.tokens for answer in good),
            "tokens_per_s": rounded(sum(answer.tokens for answer in good) / wall_s),
            "mean_prompt_tokens": rounded(sum(prompt_tokens) / len(prompt_tokens)) if prompt_tokens else None,
            "first_token_ms": _quantiles([answer.first_token_s for answer in good if answer.first_token_s]),
            "inter_token_ms": _quantiles([gap for answer in good for gap in answer.gaps_s]),
            "request_ms": _quantiles([answer.total_s for answer in good]),
        }


def _quantiles(seconds: list[float]) -> dict[str, float | None]:
    ordered = sorted(seconds)
    return {f"p{100 * quantile:g}": rounded(1000 * percentile(ordered, quantile)) for quantile in QUANTILES}


async def served_model(target: Target) -> str:
    """The first model the server names. Raises SglmtError when it cannot be asked or names none."""
    connection = Connection(target)
    try:
        body = await connection.get("/v1/models")
    finally:
        connection.close()
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError):
        raise SglmtError("the server names no model at /v1/models; give --model") from None


async def run_plan(plan: Plan, target: Target, answered: Callable[[Answer], None]) -> Outcome:
    """Send everything; `answered` is told of each answer as it is complete."""
    outcome = Outcome()
    bodies = iter(plan.bodies())

    async def work() -> None:
        connection = Connection(target)
        try:
            for body in bodies:
                answer = await connection.request(PATHS[plan.api], body, plan.stream)
                outcome.answers.append(answer)
                answered(answer)
        finally:
            connection.close()

    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(plan.concurrency, plan.requests)):
            group.create_task(work())
    outcome.wall_s = time.perf_counter() - began_s
    return outcome
