"""The clients of a mixed run: so many at a time, each request for a purpose of the plan. Runs in the mixed command.

What a request is to come to is computed before it is sent, and its answer judged when it is there. The tally also
keeps what the server's own counters must agree with in the end: how many answers there were of each kind, and how
many rows may still have been on their way when a client had left.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import msgspec

from sglmt.chaos import mixed_judge as judge
from sglmt.chaos.answers import AnswerError
from sglmt.chaos.client import Client, ExchangeError, HttpAnswer, parse_beginning
from sglmt.chaos.mixed_answers import Received, read
from sglmt.chaos.mixed_plan import Action, Ask, draw_action, draw_ask, draw_long_ask, draw_prompts
from sglmt.chaos.mixed_reference import Expected, Reference
from sglmt.chaos.mixed_refused import Refused, refused_requests

ANSWER_WITHIN_S = 60.0
ABORT_AFTER_S = (0.0, 0.6)
LEAVE_AFTER_S = (0.0, 0.4)
ABORT_TAKES_S = 1.0
OVERLAP_S = 0.15  # two of one rid that both ran: what their clients saw of them may overlap by so much
LATE_ROWS_A_CHOICE = 10  # that come after their client has left, on average; usually there is one
MAX_PROBLEMS = 20


@dataclass
class Tally:
    """What came of the requests. `http` counts answers by outcome as the server's own metrics do."""

    actions: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    http: Counter[str] = field(default_factory=Counter)
    tokens: int = 0  # of answers that came whole
    tokens_at_most: int = 0  # what those could have had that were left or aborted
    prompt_tokens: int = 0
    prompt_tokens_at_most: int = 0
    rows_under_way_at_most: int = 0  # rows of requests whose client had left
    aborted_requests: int = 0
    aborted_choices_at_most: int = 0
    left_at_most: int = 0
    longest_s: float = 0.0
    wrong: int = 0
    problems: list[str] = field(default_factory=list)

    def note(self, problem: str) -> None:
        """Count a problem; keep the first ones in words."""
        self.wrong += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


class MixedLoad:
    """All requests of one run."""

    def __init__(self, client: Client, reference: Reference, seed: int) -> None:
        self._client = client
        self._reference = reference
        self._dice = random.Random(seed)
        self._refused = refused_requests(reference.vocab_size)
        self.tally = Tally()

    async def run(self, numbers: Iterator[int], at_once: int) -> None:
        """One request for each number; returns when the last is over."""
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(self._client_of(numbers))

    async def _client_of(self, numbers: Iterator[int]) -> None:
        for number in numbers:
            action = draw_action(self._dice)
            self.tally.actions[action] += 1
            try:
                problem = await self._one(action, number)
            except (ExchangeError, AnswerError, msgspec.MsgspecError, KeyError) as error:
                problem = f"{type(error).__name__}: {error}"
            if problem is not None:
                self.tally.note(f"{action} #{number}: {problem}")

    async def _one(self, action: Action, number: int) -> str | None:
        if action == "answer":
            return await self._answered(number)
        if action == "abort":
            return await self._aborted(number)
        if action == "leave":
            return await self._left(number)
        if action == "duplicate":
            return await self._duplicated(number)
        if action == "embed":
            return await self._embedded()
        return await self._refusal(self._dice.choice(self._refused))

    # one request each

    async def _answered(self, number: int) -> str | None:
        ask = draw_ask(self._dice, number)
        if ask.stops_wanted:
            ask = self._reference.with_stops(ask, self._dice.uniform(0.1, 0.9))
        expected = self._reference.expected(ask)
        answer = await self._send(ask)
        return self._judge_whole(ask, expected, answer)

    async def _aborted(self, number: int) -> str | None:
        """A request of a known id, ended from another connection: aborted, or just before that complete."""
        ask = draw_long_ask(self._dice, number, rid=f"abort-{number}")
        expected = self._reference.expected(ask)
        self._may_run(ask, expected)
        asking = asyncio.create_task(self._send(ask))
        await asyncio.sleep(self._dice.uniform(*ABORT_AFTER_S))
        sent_s = time.monotonic()
        told = await self._post("/abort_request", {"rid": ask.rid})
        answer = await asking
        if told.status != 200:
            return f"/abort_request: {told.status} {told.body[:200]!r}"
        self.tally.http["ok"] += 1
        if answer.status == 499:
            self._was_aborted(ask, "refused")
            return judge.error(ask.path, answer, 499, "aborted")
        received = read(ask, answer)
        if answer.status == 200 and judge.aborted(received):
            self._was_aborted(ask, "aborted")
            return judge.beginning(ask, expected, received) or _ends_of_abort(ask, received)
        running = ask.stream and 0.0 < answer.first_byte_s < sent_s
        if running and answer.last_byte_s > sent_s + ABORT_TAKES_S:
            return f"aborted at {sent_s - answer.first_byte_s:.2f} s, still ran {answer.last_byte_s - sent_s:.2f} s"
        self.tally.outcomes["ended before its abort"] += 1
        return self._judge_whole(ask, expected, answer, counted=True)

    async def _left(self, number: int) -> str | None:
        """A client that goes away at any moment, some before they have sent everything."""
        dice = self._dice
        ask = draw_long_ask(dice, number, None) if dice.random() < 0.7 else draw_ask(dice, number)
        ask = replace(ask, rid=None)
        expected = self._reference.expected(ask)
        self._may_run(ask, expected)
        self.tally.left_at_most += 1
        self.tally.rows_under_way_at_most += sum(min(len(one.ids) + 2, LATE_ROWS_A_CHOICE) for one in expected)
        request = self._request(ask)
        part = dice.random() < 0.15
        sent = request[: dice.randrange(1, len(request))] if part else request
        data = await self._client.leave(sent, dice.uniform(*LEAVE_AFTER_S), reset=dice.random() < 0.5)
        answer = parse_beginning(data)
        if part or answer is None or (not ask.stream and not answer.body):
            self.tally.outcomes["left without a byte"] += 1
            return f"an answer to a part of a request: {data[:200]!r}" if part and data else None
        self.tally.outcomes["left in the middle"] += 1
        if answer.status != 200:
            return f"status {answer.status}: {answer.body[:200]!r}"
        if not ask.stream and len(answer.body) < int(answer.headers.get("content-length", 0)):
            return None
        received = read(ask, answer)
        if received.errors:
            return f"error events: {received.errors}"
        return judge.beginning(ask, expected, received)

    async def _duplicated(self, number: int) -> str | None:
        """Two at once with one id: one is served and one refused, unless they did not meet."""
        rid = f"twice-{number}"
        asks = [replace(draw_long_ask(self._dice, number, rid), n=1, stream=True) for _ in range(2)]
        expected = [self._reference.expected(ask) for ask in asks]
        answers = await asyncio.gather(*(self._send(ask) for ask in asks))
        for ask, one, answer in zip(asks, expected, answers, strict=True):
            if answer.status == 200:
                problem = self._judge_whole(ask, one, answer)
            else:
                self.tally.http["refused"] += 1
                self.tally.prompt_tokens_at_most += sum(each.prompt_tokens for each in one)
                problem = judge.error(ask.path, answer, 400, "duplicate_rid")
            if problem is not None:
                return problem
        served = [answer for answer in answers if answer.status == 200]
        if not served:
            return "both were refused"
        if len(served) == 1:
            self.tally.outcomes["duplicates refused"] += 1
            return None
        first, second = sorted(served, key=lambda answer: answer.first_byte_s)
        self.tally.outcomes["duplicates that did not meet"] += 1
        overlap_s = first.last_byte_s - second.first_byte_s
        return f"two of one id ran together for {overlap_s:.2f} s" if overlap_s > OVERLAP_S else None

    async def _embedded(self) -> str | None:
        dice = self._dice
        path = dice.choice(("/v1/embeddings", "/encode"))
        prompts = draw_prompts(dice, "generate", dice.choice((1, 2, 3, 8)))
        field_name = "input" if path == "/v1/embeddings" else "text" if isinstance(prompts[0], str) else "input_ids"
        body: dict[str, object] = {field_name: list(prompts) if len(prompts) > 1 else prompts[0]}
        as_base64 = path == "/v1/embeddings" and dice.random() < 0.5
        if as_base64:
            body["encoding_format"] = "base64"
        expected = [self._reference.embedding(prompt) for prompt in prompts]
        answer = await self._post(path, body)
        if answer.status != 200:
            return f"{path}: {answer.status} {answer.body[:200]!r}"
        self.tally.http["ok"] += 1
        self.tally.prompt_tokens += sum(count for _, count in expected)
        return judge.vectors(path, as_base64, expected, answer)

    async def _refusal(self, refused: Refused) -> str | None:
        request = self._client.request(refused.method, refused.path, refused.payload, refused.content_type)
        answer = await self._client.send(request, refused.path, time.monotonic() + ANSWER_WITHIN_S)
        self.tally.http["failed" if answer.status >= 500 else "refused"] += 1
        problem = judge.error(refused.path, answer, refused.status, refused.code, refused.param)
        return None if problem is None else f"{refused.path} {refused.payload[:100]!r}: {problem}"

    # what they share

    def _request(self, ask: Ask) -> bytes:
        return self._client.request("POST", ask.path, msgspec.json.encode(ask.body()))

    async def _send(self, ask: Ask) -> HttpAnswer:
        began_s = time.monotonic()
        answer = await self._client.send(self._request(ask), ask.path, began_s + ANSWER_WITHIN_S)
        self.tally.longest_s = max(self.tally.longest_s, time.monotonic() - began_s)
        return answer

    async def _post(self, path: str, body: dict[str, object]) -> HttpAnswer:
        return await self._client.post(path, body, time.monotonic() + ANSWER_WITHIN_S)

    def _judge_whole(self, ask: Ask, expected: list[Expected], answer: HttpAnswer, counted: bool = False) -> str | None:
        """`counted`: its tokens were already added to what there may be at most."""
        tally, what = self.tally, f"{'streamed' if ask.stream else 'whole'} {ask.kind}"
        if answer.status != 200:
            return f"{what}: status {answer.status}: {answer.body[:300]!r}"
        tally.http["ok"] += 1
        tally.outcomes[f"{what}s"] += 1
        if not counted:
            tally.tokens += sum(len(one.ids) for one in expected)
            tally.prompt_tokens += sum(one.prompt_tokens for one in expected[:: ask.n])
        problem = judge.whole(ask, expected, read(ask, answer))
        return None if problem is None else f"{what} {ask}: {problem}"

    def _may_run(self, ask: Ask, expected: list[Expected]) -> None:
        """Nobody knows how far the server will get with it."""
        self.tally.tokens_at_most += sum(len(one.ids) for one in expected)
        self.tally.prompt_tokens_at_most += sum(one.prompt_tokens for one in expected[:: ask.n])

    def _was_aborted(self, ask: Ask, outcome: str) -> None:
        self.tally.http["aborted"] += 1
        self.tally.outcomes[f"{outcome} by id"] += 1
        self.tally.aborted_requests += 1
        self.tally.aborted_choices_at_most += ask.choices


def _ends_of_abort(ask: Ask, received: Received) -> str | None:
    """An aborted stream ends like any other."""
    if not received.done:
        return "an aborted stream without its terminator"
    if ask.kind == "generate" and any(choice.finish is None for choice in received.choices.values()):
        return "an aborted stream without its finish reason"
    return None
