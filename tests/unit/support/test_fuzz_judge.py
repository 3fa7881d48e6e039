"""The judge of the fuzz run sees what is wrong: a run that finds nothing must mean something."""

from __future__ import annotations

import json
import random

import pytest

from tests.support.fuzz.client import Answer
from tests.support.fuzz.judge import complaint
from tests.support.fuzz.requests import CONTROL_ROUTES, ROUTES, Request, draw

JSON = {"content-type": "application/json"}
SSE = {"content-type": "text/event-stream; charset=utf-8"}
OPENAI = Request("POST", "/v1/completions", (), b"{}")
NATIVE = Request("POST", "/generate", (), b"{}")
ERROR = {"message": "prompt: missing", "type": "invalid_request_error", "param": "prompt", "code": None}
FINISH = 'data: {"choices":[{"index":0,"finish_reason":"stop"}]}\n\n'
DONE = "data: [DONE]\n\n"


def answer(status: int, body: object, headers: dict[str, str] = JSON, took_s: float = 0.1) -> Answer:
    content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    return Answer(status, headers, content, took_s)


@pytest.mark.parametrize(
    ("request_", "given"),
    [
        (OPENAI, answer(200, {"id": 1})),
        (OPENAI, answer(400, {"error": ERROR})),
        (NATIVE, answer(400, {"error": ERROR, "message": "x"})),
        (OPENAI, answer(503, {"error": ERROR})),
        (OPENAI, answer(200, f": keep-alive\n\n{FINISH}{DONE}", SSE)),
        (OPENAI, answer(200, f'data: {{"error":{{}}}}\n\n{DONE}', SSE)),
        (NATIVE, answer(200, f'data: {{"meta_info":{{"finish_reason":{{"type":"stop"}}}}}}\n\n{DONE}', SSE)),
    ],
)
def test_good_answers(request_: Request, given: Answer) -> None:
    assert complaint(request_, given) is None


@pytest.mark.parametrize(
    ("request_", "given", "says"),
    [
        (OPENAI, answer(500, {"error": ERROR}), "status 500"),
        (OPENAI, answer(200, {}, took_s=2.5), "took"),
        (OPENAI, Answer(0, {}, b"", 0.1, "reset"), "reset"),
        (OPENAI, answer(200, '{"a":NaN}'), "strict"),
        (OPENAI, answer(400, "no"), "error object"),
        (OPENAI, answer(400, {"error": ERROR}, {"content-type": "text/plain"}), "content type"),
        (OPENAI, answer(400, {"error": ERROR, "message": "x"}), "other API"),
        (NATIVE, answer(400, {"error": ERROR}), "other API"),
        (OPENAI, answer(400, {"error": {**ERROR, "more": 1}}), "fields"),
        (OPENAI, answer(400, {"error": {**ERROR, "message": "KeyError: 'x'"}}), "insides"),
        (OPENAI, answer(400, {"error": {**ERROR, "message": ""}}), "without message"),
        (OPENAI, answer(200, FINISH, SSE), "ends with"),
        (OPENAI, answer(200, DONE, SSE), "finish reasons"),
        (OPENAI, answer(200, FINISH + FINISH + DONE, SSE), "finish reasons"),
        (OPENAI, answer(200, f"data: x\n\n{DONE}", SSE), "event"),
    ],
)
def test_bad_answers(request_: Request, given: Answer, says: str) -> None:
    assert says in (complaint(request_, given) or "")


@pytest.mark.parametrize(("control", "paths"), [(False, ROUTES), (True, CONTROL_ROUTES)])
def test_every_route_is_drawn_and_the_seed_decides(control: bool, paths: dict[str, object]) -> None:
    drawn = [draw(random.Random(7), control) for _ in range(1)]
    assert drawn == [draw(random.Random(7), control)]
    rng = random.Random(1)
    requests = [draw(rng, control) for _ in range(1500)]
    posted = {request.path for request in requests if request.method == "POST"}
    assert paths.keys() <= posted
    assert any(b'"stream":true' in request.body for request in requests) is not control
    assert {request.chunked for request in requests} == {True, False}
    assert all(request.encode() for request in requests)
