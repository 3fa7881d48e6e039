"""The chaos command sees what is wrong: cut answers, repeated or missing tokens, errors dressed as answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglmt.chaos.answers import Answer, AnswerError, Kind, parse
from sglmt.chaos.client import ConnectionFailed, HttpAnswer, parse_answer
from sglmt.chaos.plan import make_plan, with_stop

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def sse(*events: Any, end: bool = True) -> HttpAnswer:
    """A whole streamed body."""
    blocks = [f"data: {json.dumps(event)}\n\n" for event in events]
    return HttpAnswer(200, {}, "".join(blocks + ["data: [DONE]\n\n"] * end).encode())


def native(ids: list[int], claimed: int, finish: dict[str, Any] | None = None) -> dict[str, Any]:
    """One event of a `/generate` stream; the text of an id is its number."""
    meta = {"id": "r", "prompt_tokens": 3, "completion_tokens": claimed, "finish_reason": finish}
    return {"text": "".join(map(str, ids)), "output_ids": ids, "meta_info": meta}


LENGTH = {"type": "length", "length": 2}
GOOD = (native([7], 1), native([8], 2, LENGTH))


def chunk(text: str, finish: str | None = None, usage: Any = None) -> dict[str, Any]:
    """One event of a completion stream."""
    choices = [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}]
    return {"id": "c", "choices": [] if usage else choices, "usage": usage}


def test_a_stream_and_a_whole_answer_are_the_same_answer() -> None:
    streamed = parse("generate", True, sse(*GOOD))
    body = {"text": "78", "output_ids": [7, 8], "meta_info": native([], 2, LENGTH)["meta_info"]}
    whole = parse("generate", False, HttpAnswer(200, {}, json.dumps(body).encode()))
    assert streamed == whole
    assert streamed.difference(whole) is None
    completion = parse("completion", True, sse(chunk("a"), chunk("b", "length"), chunk("", usage=USAGE)))
    assert (completion.text, completion.completion_tokens, completion.finish) == ("ab", 2, "length")


@pytest.mark.parametrize(
    ("kind", "answer", "words"),
    [
        ("generate", sse(*GOOD, end=False), "no end"),
        ("generate", sse(native([7], 1), native([7], 1, LENGTH)), "2 ids came"),
        ("generate", sse(native([7], 1)), "finish reason"),
        ("generate", sse(native([7], 1, LENGTH), native([8], 2, LENGTH)), "finish reason"),
        ("generate", sse(native([7], 1), native([], 1, {"type": "abort", "message": "x"})), "aborted"),
        ("generate", sse(native([7], 1), {"error": {"message": "x"}}), "error event"),
        ("generate", HttpAnswer(200, {}, b"event: error\ndata: {}\n\ndata: [DONE]\n\n"), "error event"),
        ("generate", HttpAnswer(503, {}, b"{}"), "503"),
        ("completion", sse(chunk("a", "length")), "usages"),
        ("completion", sse(chunk("a", "length"), chunk("b"), chunk("", usage=USAGE)), "after the finish"),
        ("completion", sse(chunk("a"), chunk("", usage=USAGE)), "0 finish reasons"),
        ("completion", sse(chunk("a", "length"), chunk("", usage={**USAGE, "total_tokens": 9})), "add up"),
    ],
)
def test_what_is_no_good_answer_is_refused(kind: Kind, answer: HttpAnswer, words: str) -> None:
    with pytest.raises(AnswerError, match=words):
        parse(kind, True, answer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text": "7788"}, "text: differs at 1 of 2"),
        ({"token_ids": (7,)}, "token_ids: differs at 1 of 2"),
        ({"logprobs": ((-0.5, 7),)}, "logprobs"),
        ({"completion_tokens": 3}, "completion_tokens: got 3, expected 2"),
        ({"finish": "stop None"}, "finish"),
    ],
)
def test_every_difference_is_named(change: dict[str, Any], words: str) -> None:
    values: dict[str, Any] = {
        "text": "78", "token_ids": (7, 8), "logprobs": None, "prompt_tokens": 3, "completion_tokens": 2,
        "finish": "length 2", "rid": "r",
    }  # fmt: skip
    problem = Answer(**values).difference(Answer(**{**values, **change, "rid": "another"}))
    assert problem is not None
    assert words in problem


@pytest.mark.parametrize("keep", [0, 10, 60, -1, -4])
def test_a_cut_answer_is_no_answer(keep: int) -> None:
    whole = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n"
    assert parse_answer(whole).body == b"hello world"
    with pytest.raises(ConnectionFailed) as failed:
        parse_answer(whole[:keep] if keep >= 0 else whole[: keep - 4], doomed=True)
    assert failed.value.doomed
    sized = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
    assert parse_answer(sized).body == b"hello"
    with pytest.raises(ConnectionFailed):
        parse_answer(sized[:-1])


def test_the_plan_is_made_from_its_seed_and_mixes_everything() -> None:
    plan = make_plan(96, 1, (16, 160), ignore_eos=False)
    assert plan == make_plan(96, 1, (16, 160), ignore_eos=False) != make_plan(96, 2, (16, 160), ignore_eos=False)
    assert {wanted.kind for wanted in plan} == {"chat", "completion", "generate"}
    assert sum(wanted.logprobs for wanted in plan) == 24
    assert {wanted.kind for wanted in plan if wanted.logprobs} == {"chat", "completion", "generate"}
    answer = Answer("abcdefghi", None, None, 1, 9, "length", "r")
    assert with_stop(plan[0], answer).stop == "ghi"
    assert with_stop(plan[0], Answer("ab\ufffd\ufffd", None, None, 1, 4, "length", "r")) == plan[0]
