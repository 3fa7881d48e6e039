"""The clients: a fixed number of streams, each asking for one thing after the other. Runs in the chaos command.

Half of the requests stream. Every answer is judged as soon as it is there; what went wrong is kept in words. With
workers being killed, a broken connection is expected of exactly the requests that worker held: the one who
kills names their local ports first.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sglmt.chaos.answers import Answer, AnswerError, parse
from sglmt.chaos.client import Client, ConnectionFailed, Hang
from sglmt.chaos.plan import Wanted

ATTEMPT_WITHIN_S = 180.0
MAX_PROBLEMS = 20

Judge = Callable[[Wanted, Answer], str | None]


@dataclass
class Tally:
    """What came of the requests."""

    requests: int = 0
    streamed: int = 0
    tokens: int = 0
    errors: int = 0
    hangs: int = 0
    wrong: int = 0
    repeated_ids: int = 0
    held_by_killed_workers: int = 0  # some of them may have been answered in full just before
    cut_by_worker_kills: int = 0
    longest_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    def note(self, problem: str) -> None:
        """Keep the first ones in words."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


class Load:
    """All streams of one run."""

    def __init__(self, client: Client, plan: list[Wanted], judge: Judge, seed: int) -> None:
        self._client = client
        self._plan = plan
        self._judge = judge
        self._dice = random.Random(seed)
        self._rids: set[str] = set()
        self.tally = Tally()
        self.answers_seen: set[int] = set()

    def doom(self, local_ports: set[int]) -> None:
        """The worker that holds these connections is about to be killed."""
        self.tally.held_by_killed_workers += self._client.doom(local_ports)

    async def ask(self, wanted: Wanted, stream: bool, within_s: float = ATTEMPT_WITHIN_S) -> Answer:
        """One answer. Raises ExchangeError or AnswerError."""
        answer = await self._client.post(wanted.path, wanted.body(stream), time.monotonic() + within_s)
        return parse(wanted.kind, stream, answer)

    async def run(self, streams: int, until_s: float) -> None:
        """Keep `streams` requests under way until monotonic `until_s`, then let them finish."""
        async with asyncio.TaskGroup() as group:
            for number in range(streams):
                group.create_task(self._one_stream(number, until_s))

    async def _one_stream(self, number: int, until_s: float) -> None:
        stream = number % 2 == 0
        while time.monotonic() < until_s:
            await self._one_request(self._dice.choice(self._plan), stream)

    async def _one_request(self, wanted: Wanted, stream: bool) -> None:
        tally = self.tally
        began_s = time.monotonic()
        what = f"{'stream' if stream else 'whole'} {wanted.kind} #{wanted.number}"
        tally.requests += 1
        tally.streamed += stream
        try:
            answer = await self.ask(wanted, stream)
        except Hang as error:
            tally.hangs += 1
            tally.note(f"{what}: {error}")
            return
        except ConnectionFailed as error:
            if error.doomed:
                tally.cut_by_worker_kills += 1
                return
            tally.errors += 1
            tally.note(f"{what}: {error}")
            return
        except AnswerError as error:
            tally.errors += 1
            tally.note(f"{what}: {error}")
            return
        tally.longest_s = max(tally.longest_s, time.monotonic() - began_s)
        tally.tokens += answer.completion_tokens
        self.answers_seen.add(wanted.number)
        self._check(what, wanted, answer)

    def _check(self, what: str, wanted: Wanted, answer: Answer) -> None:
        if answer.rid in self._rids:
            self.tally.repeated_ids += 1
            self.tally.note(f"{what}: id {answer.rid!r} was used before")
        self._rids.add(answer.rid)
        problem = self._judge(wanted, answer)
        if problem is not None:
            self.tally.wrong += 1
            self.tally.note(f"{what}: {problem}")
