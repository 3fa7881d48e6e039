"""The mixed command sees what is wrong with an answer, and lets a true beginning of one pass."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglmt.chaos import mixed_judge as judge
from sglmt.chaos.answers import AnswerError
from sglmt.chaos.client import HttpAnswer, parse_beginning
from sglmt.chaos.mixed_answers import Received, read
from sglmt.chaos.mixed_plan import Ask, draw_action, draw_ask
from sglmt.chaos.mixed_reference import Expected, Reference
from sglmt.chaos.mixed_state import grown

ASK = Ask(1, "generate", ("a", "b"), is_batch=True, n=1, max_tokens=3, stream=True, logprobs=1)
EXPECTED = [
    Expected("abc", (1, 2, 3), "length", None, 4, (-0.1, -0.2, -0.3), (((1, -0.1),), ((2, -0.2),), ((3, -0.3),))),
    Expected("de", (4, 5), "stop", "f", 5, (-0.4, -0.5), (((4, -0.4),), ((5, -0.5),))),
]


def event(index: int, text: str, ids: list[int], so_far: int, finish: dict[str, Any] | None = None) -> dict[str, Any]:
    """One event; the log-probability of an id is a tenth of it, negative."""
    meta = {
        "id": f"r_{index}", "prompt_tokens": 4 + index, "completion_tokens": so_far, "finish_reason": finish,
        "output_token_logprobs": [[-each / 10, each, None] for each in ids],
        "output_top_logprobs": [[[-each / 10, each, None]] for each in ids],
    }  # fmt: skip
    return {"text": text, "output_ids": ids, "meta_info": meta, "index": index}


GOOD = [
    event(0, "a", [1], 1),
    event(1, "d", [4], 1),
    event(0, "bc", [2, 3], 3, {"type": "length", "length": 3}),
    event(1, "e", [5], 2, {"type": "stop", "matched": "f"}),
]


def received(events: list[dict[str, Any]], end: bool = True, ask: Ask = ASK) -> Received:
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n" * end
    return read(ask, HttpAnswer(200, {}, body.encode()))


def changed(change: Callable[[list[dict[str, Any]]], Any]) -> list[dict[str, Any]]:
    """A deep copy of the good events with a fault in it."""
    events: list[dict[str, Any]] = json.loads(json.dumps(GOOD))
    change(events)
    return events


def test_the_right_answer_is_right() -> None:
    assert judge.whole(ASK, EXPECTED, received(GOOD)) is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda events: events[0].update(text="x"), "text"),
        (lambda events: events[2].update(output_ids=[2, 9]), "ids"),
        (lambda events: events[2]["meta_info"].update(output_token_logprobs=[[-0.2, 2, None]]), "log-probabilities"),
        (lambda events: events[2]["meta_info"].update(output_top_logprobs=[]), "alternatives"),
        (lambda events: events[3]["meta_info"].update(finish_reason={"type": "stop", "matched": "g"}), "finish"),
        (lambda events: events[3]["meta_info"].update(finish_reason={"type": "length", "length": 2}), "finish"),
        (lambda events: events[3]["meta_info"].update(finish_reason=None), "finish"),
        (lambda events: events[3]["meta_info"].update(prompt_tokens=4), "prompt tokens"),
        (lambda events: [each["meta_info"].update(id="r_0") for each in events], "names"),
        (lambda events: [each.update(index=0) for each in (events[1], events[3])], "completion_tokens"),
    ],
)
def test_a_wrong_answer_is_seen(change: Callable[[list[dict[str, Any]]], Any], word: str) -> None:
    try:
        problem = judge.whole(ASK, EXPECTED, received(changed(change)))
    except AnswerError as error:
        problem = str(error)
    assert problem is not None
    assert word in problem


def test_a_missing_row_and_a_missing_end_are_seen() -> None:
    assert "choices" in str(judge.whole(ASK, EXPECTED, received([GOOD[0], GOOD[2]])))
    assert "terminator" in str(judge.whole(ASK, EXPECTED, received(GOOD, end=False)))
    with pytest.raises(AnswerError, match="completion_tokens"):
        received([event(0, "abc", [1, 2], 3)])
    with pytest.raises(AnswerError, match="only grow"):
        received([event(0, "a", [1], 1), event(0, "b", [1, 2], 2)], ask=replace(ASK, incremental=False))


def test_a_beginning_is_the_beginning_of_the_right_answer() -> None:
    assert judge.beginning(ASK, EXPECTED, received(GOOD[:2], end=False)) is None
    wrong = received([event(0, "x", [1], 1)], end=False)
    assert "no beginning" in str(judge.beginning(ASK, EXPECTED, wrong))
    aborted = {"type": "abort", "code": "aborted", "message": "m", "status_code": 499}
    cut = received([GOOD[0], event(0, "\ufffd", [], 1, aborted), event(1, "", [], 0, aborted)])
    assert judge.beginning(ASK, EXPECTED, cut) is None
    assert judge.aborted(cut) == 2
    half = received([event(0, "\ufffd", [1], 1)], end=False)  # nothing says that the answer ends there
    assert judge.beginning(ASK, EXPECTED, half) is not None


def test_usage_is_counted_again() -> None:
    ask = Ask(2, "completion", ("a",), is_batch=False, n=2, max_tokens=3, stream=False)
    expected = [Expected("abc", (1, 2, 3), "length", None, 4), Expected("de", (4, 5), "stop", None, 4)]
    choices = [
        {"index": index, "text": one.text, "logprobs": None, "finish_reason": one.finish}
        for index, one in enumerate(expected)
    ]

    def verdict(prompt: int, completion: int) -> str | None:
        usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
        body = json.dumps({"id": "c", "choices": choices, "usage": usage})
        return judge.whole(ask, expected, read(ask, HttpAnswer(200, {}, body.encode())))

    assert verdict(4, 5) is None
    assert "usage" in str(verdict(8, 5))  # a prompt with two answers counts once
    assert "usage" in str(verdict(4, 3))


def test_errors_have_their_shape() -> None:
    def answer(path: str, **told: Any) -> str | None:
        fields = {"message": "m", "type": "t", "param": None, "code": "c", **told}
        body = {"error": fields, **({} if path.startswith("/v1/") else {"message": "m"})}
        headers = {"content-type": "application/json"}
        return judge.error(path, HttpAnswer(400, headers, json.dumps(body).encode()), 400, "c")

    assert answer("/v1/x") is None
    assert answer("/generate") is None
    assert answer("/generate", code="d") is not None
    assert answer("/generate", more=1) is not None
    assert judge.error("/v1/x", HttpAnswer(500, {}, b"oops"), 500, None) is not None


def test_what_a_client_had_when_it_left() -> None:
    assert parse_beginning(b"HTTP/1.1 200 OK\r\ncontent-le") is None
    data = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n5\r\nde"
    answer = parse_beginning(data)
    assert answer is not None
    assert (answer.status, answer.body) == (200, b"abcde")


def test_growth_beyond_the_tolerance_and_other_processes_are_seen() -> None:
    assert grown({"a": 100, "b": 100}, {"a": 110, "b": 111}, 10) == {"b": "100 → 111 KiB"}
    assert set(grown({"a": 100}, {"c": 100}, 10)) == {"a", "c"}


def test_every_kind_of_request_is_drawn_and_its_stop_is_in_its_text(tmp_path: Path) -> None:
    dice, reference = random.Random(1), Reference(tmp_path)
    asks = [draw_ask(dice, number) for number in range(300)]
    assert len({(ask.kind, ask.stream, ask.n, len(ask.prompts), ask.logprobs) for ask in asks}) > 60
    assert len({draw_action(dice) for _ in range(300)}) == 6
    stopped = 0
    for ask in asks:
        if ask.stops_wanted:
            first = reference.expected(reference.with_stops(ask, 0.5))[0]
            plain = reference.expected(ask)[0]
            assert plain.ids[: len(first.ids)] == first.ids
            if first.matched is not None:
                stopped += 1
                kept = first.text if ask.no_stop_trim else first.text + first.matched
                assert plain.text.startswith(kept)
                assert plain.text.index(first.matched) + len(first.matched) == len(kept)
    assert stopped > 10
