"""Steady requests are an economy, never a difference: a frontend with them does what one without them does."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglmt.delivery.keys import make_key, make_life
from sglmt.messages.columns import RaggedColumn, pack
from sglmt.messages.sampling import FinishReason, SamplingParams, TextSpec, TokenLogprobs
from sglmt.messages.to_scheduler import TokenizedGenerateReqInput
from sglmt.messages.to_worker import BatchStrOutput
from sglmt.workers.frontend import Frontend
from sglmt.workers.live_request import LiveRequest
from sglmt.workers.steady_requests import MAX_STEPS, SteadyRequests

LIFE = make_life(0, 1)
REQUESTS = 6


class NeverSteady(SteadyRequests):
    """Nobody ever joins."""

    def join(self, order: bytes, requests: Sequence[LiveRequest], now_s: float) -> None:
        """Not here."""


class Words(Counter[int]):
    """A slot."""

    def add(self, word: int, amount: int = 1) -> None:
        self[word] += amount


class Log:
    """A sink, and its short way when it has one, that note what they get; the short way is sometimes closed."""

    def __init__(self, has_line: bool, refuses: list[bool]) -> None:
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.end: str | None = None
        self.straight = 0
        self._has_line, self._refuses = has_line, refuses

    def admitted(self, request: LiveRequest) -> None:
        self.texts.append("admitted")

    def row(self, request: LiveRequest, text: str, token_ids: Sequence[int], logprobs: object) -> None:
        assert self.end is None
        request.text_line = self if self._has_line else None
        self.texts.append(text)

    def write(self, text: str, now_s: float) -> bool:
        assert text
        if self._refuses and self._refuses.pop():
            return False
        self.straight += 1
        self.texts.append(text)
        return True

    def finished(
        self, request: LiveRequest, text: str, token_ids: Sequence[int], logprobs: object, finish: FinishReason
    ) -> None:
        assert self.end is None
        assert request.tokens == len(request.output_ids)
        self.ids = list(request.output_ids)
        self.end = f"{finish.kind} {request.tokens} {request.chars} {text}"


def frontend(steady: bool, lines: list[bool], refuses: list[bool]) -> tuple[Frontend, list[Log]]:
    """A frontend with requests 0..`REQUESTS`-1 and their sinks."""
    sent: list[bytes] = []
    outbox = SimpleNamespace(send=sent.append, backlog_bytes=0, dropped=0, flush=lambda: True)
    child: Any = SimpleNamespace(
        slot=Words(),
        clock=lambda: 1.0,
        page=SimpleNamespace(generation=lambda *_: 1, header=lambda *_: 1),
        index=0,
        generation=1,
        run_dir=Path("/"),
        args=SimpleNamespace(mode="multi", max_resubmits=3, detokenizers=1),
        transport=SimpleNamespace(outbox=lambda address: outbox),
        writer=SimpleNamespace(frame=lambda *arguments: b"frame"),
    )
    made = Frontend(child)
    if not steady:
        made.rows.steady = NeverSteady()
    logs = [Log(has_line, list(refuses)) for has_line in lines]
    for number, log in enumerate(logs):
        submission = TokenizedGenerateReqInput(
            key=made.next_key(), attempt=1, rid=str(number), group=0, input_ids=pack("I", [1]),
            sampling=SamplingParams(max_new_tokens=100), text=TextSpec(),
        )  # fmt: skip
        made.submit(submission, 0, 1, log)  # type: ignore[arg-type]
    return made, logs


Row = tuple[int, int, int, int, list[int], str, FinishReason | None]
"""(request, attempt, offset, text offset, ids, text, finish)"""


def batch_of(rows: list[Row]) -> BatchStrOutput:
    lengths = [len(row[4]) for row in rows]
    return BatchStrOutput(
        keys=pack("Q", [make_key(LIFE, row[0] + 1) for row in rows]),
        attempts=pack("I", [row[1] for row in rows]),
        offsets=pack("I", [row[2] for row in rows]),
        text_offsets=pack("I", [row[3] for row in rows]),
        output_ids=RaggedColumn(
            None if all(length == 1 for length in lengths) else pack("I", lengths),
            pack("I", [token_id for row in rows for token_id in row[4]]),
        ),
        texts=[row[5] for row in rows],
        finish_reasons={number: row[6] for number, row in enumerate(rows) if row[6] is not None},
    )


@st.composite
def histories(draw: st.DrawFn) -> list[Any]:
    """Steps: a batch, or something else that happens. Mostly every request moves on, in the same order."""
    at = [(0, 0)] * REQUESTS  # (tokens, chars) sent of each
    order = list(range(REQUESTS))
    gone: set[int] = set()
    steps: list[Any] = []
    for _ in range(draw(st.integers(1, 25))):
        event = draw(st.sampled_from(["step"] * 12 + ["list", "cancel", "unknown", "shuffle", "pause"]))
        if event in ("cancel", "unknown"):
            steps.append((event, draw(st.integers(0, REQUESTS - 1))))
        elif event == "list":
            steps.append((event, 0))
        elif event == "shuffle":
            order = draw(st.permutations(order))
        else:
            moving = [n for n in order if n not in gone]
            if event == "pause":
                moving = [n for n in moving if draw(st.booleans())]
            plain: list[Row] = []
            last: list[Row] = []
            for number in moving:
                offset, chars = at[number]
                kind = draw(st.sampled_from(["go on"] * 30 + ["finish", "two", "none", "again", "gap", "old", "twice"]))
                text = draw(st.sampled_from(["a", "bc", "", "日本"]))
                ids = {"two": [7, 8], "none": []}.get(kind, [len(steps)])
                finish = FinishReason(kind="stop") if kind == "finish" else None
                if kind == "again":
                    offset, chars = max(0, offset - 1), max(0, chars - 1)
                elif kind == "gap":
                    offset += 1
                row = (number, 0 if kind == "old" else 1, offset, chars, ids, text, finish)
                (plain if kind == "go on" or draw(st.booleans()) else last).append(row)
                if kind == "twice":
                    ids = draw(st.sampled_from([[9], [9, 10]]))
                    end = FinishReason(kind="stop") if draw(st.booleans()) else None
                    last.append((number, 1, offset + 1, chars + len(text), ids, "t", end))
                    offset, chars, text = offset + 1, chars + len(text), "t"
                    if end is not None:
                        gone.add(number)
                if kind == "finish":
                    gone.add(number)
                if kind in ("go on", "two", "none", "finish", "twice"):
                    at[number] = (offset + len(ids), chars + len(text))
            if plain or last:
                steps.append(("batch", (plain + last, draw(st.booleans()))))
    return steps


def play(made: Frontend, logs: list[Log], steps: list[Any]) -> list[Any]:
    """All that can be seen of a frontend from outside, after every step and at the end."""
    seen: list[Any] = []
    for kind, what in steps:
        if kind == "batch":
            made.take_batch(batch_of(what[0]), what[1])
        elif kind == "list":
            message = made._list()
            seen.append((message.keys, message.attempts, message.offsets))
        elif kind == "cancel":
            made.cancel([r for r in made.live.values() if r.key == make_key(LIFE, what + 1)])
        else:
            request = made.live.get(make_key(LIFE, what + 1))
            if request is not None and request.tokens + request.steady:
                made._resubmit(request)
                seen.append((request.attempt, request.output_ids.tolist()))
        seen.append([list(log.texts) for log in logs])
    made.rows.steady.give_back()
    for request in made.live.values():
        assert not request.steady
        seen.append((request.key, request.tokens, request.chars, request.attempt, request.output_ids.tolist()))
    seen.append([(log.end, log.ids) for log in logs])
    seen.append({word: count for word, count in made.slot.items() if count})
    return seen


@settings(max_examples=400, deadline=None)
@given(
    histories(),
    st.lists(st.booleans(), min_size=REQUESTS, max_size=REQUESTS),
    st.lists(st.booleans(), max_size=10),
)
def test_nobody_sees_a_difference(steps: list[Any], lines: list[bool], refuses: list[bool]) -> None:
    assert play(*frontend(True, lines, refuses), steps) == play(*frontend(False, lines, refuses), steps)


def going_on(step: int, numbers: Sequence[int]) -> list[Row]:
    return [(number, 1, step, step, [100 * step + number], "x", None) for number in numbers]


def steady_frontend(steps: int) -> tuple[Frontend, list[Log]]:
    made, logs = frontend(True, [True] * REQUESTS, [])
    for step in range(steps):
        made.take_batch(batch_of(going_on(step, range(REQUESTS))))
    return made, logs


def test_an_order_that_repeats_makes_requests_steady() -> None:
    made, logs = steady_frontend(2)
    assert len(made.rows.steady) == 0
    made, logs = steady_frontend(3)
    assert len(made.rows.steady) == REQUESTS
    assert all(request.steady for request in made.live.values())
    made.take_batch(batch_of(going_on(3, range(REQUESTS))))
    assert logs[0].texts == ["x"] * 4
    assert logs[0].straight == 3


def test_only_who_does_not_come_is_given_back() -> None:
    made, _ = steady_frontend(5)
    made.take_batch(batch_of(going_on(5, [0, 1, 3, 4, 5])))
    assert [request.steady for request in made.live.values()] == [True, True, False, True, True, True]
    paused = made.live[make_key(LIFE, 3)]
    assert (paused.tokens, paused.output_ids.tolist()) == (5, [2, 102, 202, 302, 402])


def test_a_second_row_in_the_batch_that_makes_a_request_steady() -> None:
    made, logs = frontend(True, [True] * REQUESTS, [])
    for step in range(5):
        made.take_batch(batch_of(going_on(step, range(REQUESTS - 1))))
        made.take_batch(batch_of(going_on(step, [REQUESTS - 1])))
    rows = [*going_on(5, range(REQUESTS)), (REQUESTS - 1, 1, 6, 6, [7, 8], "yz", None)]
    made.take_batch(batch_of(rows))
    request = made.live[make_key(LIFE, REQUESTS)]
    assert (request.tokens, request.chars) == (8, 8)
    made.take_batch(batch_of([(REQUESTS - 1, 1, 8, 8, [9], "!", None)]))
    assert "".join(logs[-1].texts) == "xxxxxxyz!"


def test_a_batch_of_others_changes_nothing() -> None:
    made, _ = steady_frontend(5)
    made.cancel([made.live[make_key(LIFE, REQUESTS)]])
    made.take_batch(batch_of(going_on(5, range(REQUESTS - 1))))
    assert len(made.rows.steady) == REQUESTS - 1
    made.take_batch(batch_of([(REQUESTS - 1, 1, 5, 5, [], "", None)]))  # as one that has just been admitted
    assert len(made.rows.steady) == REQUESTS - 1


def test_log_probabilities_of_the_prompt_come_once() -> None:
    made, _ = frontend(True, [True], [])
    request = made.live[make_key(LIFE, 1)]
    seen: list[object] = []
    for ids in ([1], [1, 2], [1, 2, 3]):  # each a replay from the first id on
        batch = batch_of([(0, 1, 0, 0, ids, "x" * len(ids), None)])
        batch.input_logprobs = {0: TokenLogprobs(chosen=[-1.0])}
        made.take_batch(batch)
        seen.append(request.input_logprobs)
        request.input_logprobs = None  # a stream's sink has taken them
    assert [value is not None for value in seen] == [True, False, False]


def test_who_ends_leaves_and_who_is_new_joins() -> None:
    made, logs = steady_frontend(5)
    rows = [*going_on(5, [0, 1, 2, 3, 4]), (5, 1, 5, 5, [505], "y", FinishReason(kind="stop"))]
    made.take_batch(batch_of(rows))
    assert logs[5].end == "stop 6 6 y"
    assert logs[5].ids == [5, 105, 205, 305, 405, 505]
    made.take_batch(batch_of(going_on(6, [0, 1, 2, 3, 4])))
    assert len(made.rows.steady) == 5


@pytest.mark.parametrize("steps", [MAX_STEPS - 1, MAX_STEPS + 5, 3 * MAX_STEPS])
def test_ids_are_written_into_their_requests_now_and_then(steps: int) -> None:
    made, _ = steady_frontend(steps)
    made.rows.steady.give_back()
    for number, request in enumerate(made.live.values()):
        assert request.output_ids == array("I", [100 * step + number for step in range(steps)])
