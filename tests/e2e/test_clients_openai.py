"""The official client against live servers with two workers: the shipped model, and a simulator with a text of ours.

The simulator's text has reasoning, prose and two tool calls, so that everything a chat can bring is read by the client
as its makers meant it. What is refused is read as the client's own exceptions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.instance import Instance
from tests.support.serving import ANSWER_WITHIN_S, events_of, look, post

REASONING = "They want the weather.\nIn two cities."
PROSE = "Let me look."
ARGUMENTS = ({"city": "Paris", "units": ["°C", "km/h"]}, {"city": "東京", "note": 'a "quote" and </tool_call>'})
SAID = f"<think>\n{REASONING}\n</think>\n\n{PROSE}\n" + "\n".join(
    f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': each}, ensure_ascii=False)}\n</tool_call>"
    for each in ARGUMENTS
)
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris and 東京?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": SCHEMA}}]
ASKED: dict[str, Any] = {"model": "default", "messages": MESSAGES, "tools": TOOLS}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with Instance(runtime_dir=Path(tmp_path_factory.mktemp("r"))) as made:
        yield made.launch("--workers", "2")


@pytest.fixture(scope="module")
def scripted(real: Instance, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    ids = post(real, "/tokenize", prompt=SAID, add_special_tokens=False).json()["tokens"]
    end = post(real, "/tokenize", prompt="<|im_end|>", add_special_tokens=False).json()["tokens"]
    script = ",".join(map(str, [*ids, *end]))
    with Instance(runtime_dir=Path(tmp_path_factory.mktemp("s"))) as made:
        yield made.launch(
            "--workers", "2", "--engine", "simulator", "--simulator-tokens", script, "--simulator-step-ms", "1",
            "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--max-request-bytes", str(4 << 20),
        )  # fmt: skip


def client_of(instance: Instance) -> openai.OpenAI:
    return openai.OpenAI(base_url=instance.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(real: Instance) -> Iterator[openai.OpenAI]:
    with client_of(real) as made:
        yield made


@pytest.fixture
def talker(scripted: Instance) -> Iterator[openai.OpenAI]:
    with client_of(scripted) as made:
        yield made


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


EXPECTED_CALLS = [("get_weather", each) for each in ARGUMENTS]


# the real model


def test_two_names_for_the_length(client: openai.OpenAI) -> None:
    def tokens(**limits: Any) -> int:
        question: Any = [{"role": "user", "content": "Count to one hundred."}]
        answer = client.chat.completions.create(model="default", messages=question, temperature=0, **limits)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        return answer.usage.completion_tokens

    assert tokens(max_completion_tokens=3) == tokens(max_tokens=3) == 3
    assert tokens(max_tokens=9, max_completion_tokens=2) == 2
    for wrong in ({"max_tokens": 0}, {"max_completion_tokens": 0}, {"max_tokens": -1}, {"max_completion_tokens": -1}):
        with pytest.raises(openai.BadRequestError) as refused:
            tokens(**wrong)
        assert refused.value.param == next(iter(wrong))


def test_what_the_engine_cannot_do_is_refused_by_its_name(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create
    for fields in (
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
        {"logprobs": True, "top_logprobs": 2},
    ):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="openvino") as refused:
                chat(model="default", messages=MESSAGES, stream=stream, **fields)  # type: ignore[call-overload]
            assert refused.value.code == "unsupported_by_engine"
    for more in ({"logprobs": 3}, {"echo": True, "logprobs": 0, "max_tokens": 0}):
        with pytest.raises(openai.BadRequestError, match="openvino"):
            client.completions.create(model="default", prompt="a", **more)  # type: ignore[call-overload]


def test_chosen_logprobs_of_the_real_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="default", messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=0
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 4
    assert (
        b"".join(bytes(entry.bytes or []) for entry in content).decode("utf-8", "replace")
        == answer.choices[0].message.content
    )
    completion = client.completions.create(model="default", prompt="One, two,", max_tokens=4, logprobs=0)
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or []) == len(logprobs.token_logprobs or []) == 4
    assert (logprobs.text_offset or [None])[0] == len("One, two,")


def test_a_history_with_tools_is_a_prompt(client: openai.OpenAI) -> None:
    """The shipped model's template knows no tools: its answer is text, and that is fine."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    history: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "21 degrees"},
    ]
    answer = client.chat.completions.create(model="default", messages=history, tools=TOOLS, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.choices[0].message.tool_calls is None


# tools and reasoning


def test_tool_calls_and_reasoning(talker: openai.OpenAI) -> None:
    answer = talker.chat.completions.create(**ASKED, tool_choice="auto", parallel_tool_calls=True)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == PROSE
    assert calls_of(choice.message) == EXPECTED_CALLS
    assert (choice.message.model_extra or {})["reasoning_content"] == REASONING
    ids = [call.id for call in choice.message.tool_calls or []]
    assert len(set(ids)) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is None  # this model's tags are several tokens


def test_tool_calls_and_reasoning_in_a_stream(talker: openai.OpenAI) -> None:
    whole = talker.chat.completions.create(**ASKED)
    with talker.chat.completions.stream(**ASKED, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    choice = final.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", PROSE)
    assert calls_of(choice.message) == EXPECTED_CALLS
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    chunks = [event.chunk for event in events if event.type == "chunk"]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == REASONING
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    heads = [call for call in calls if call.id is not None]
    assert [(call.index, call.function.name, call.function.arguments) for call in heads if call.function] == [
        (0, "get_weather", ""),
        (1, "get_weather", ""),
    ]
    assert len(calls) > 10  # arguments come while they are written
    assert all(call.function is not None and call.function.name is None for call in calls if call.id is None)


def test_the_turn_after_a_tool_call(talker: openai.OpenAI) -> None:
    first = talker.chat.completions.create(**ASKED).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"{number} degrees"}
        for number, call in enumerate(first.tool_calls or [])
    ]
    history: Any = [*MESSAGES, first.model_dump(exclude_none=True), *results]
    again = talker.chat.completions.create(model="default", messages=history, tools=TOOLS)
    assert calls_of(again.choices[0].message) == EXPECTED_CALLS


def test_tools_only_where_they_are_offered(talker: openai.OpenAI) -> None:
    calls = SAID.partition("</think>\n\n")[2]
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        answer = talker.chat.completions.create(model="default", messages=MESSAGES, **fields)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == calls
        assert answer.choices[0].finish_reason == "stop"
    one = talker.chat.completions.create(**ASKED, parallel_tool_calls=False).choices[0]
    assert calls_of(one.message) == EXPECTED_CALLS[:1]
    assert "<tool_call>" in (one.message.content or "")
    kept = talker.chat.completions.create(**ASKED, extra_body={"separate_reasoning": False}).choices[0].message
    assert (kept.content or "").startswith(f"<think>\n{REASONING}\n</think>\n\n{PROSE}")
    assert "reasoning_content" not in (kept.model_extra or {})


def test_a_limit_inside_a_call_loses_nothing(talker: openai.OpenAI) -> None:
    for limit in (5, 30, 40, 55):
        answer = talker.chat.completions.create(**ASKED, max_tokens=limit).choices[0]
        assert answer.finish_reason == "length"
        text = (answer.message.model_extra or {}).get("reasoning_content", "") + (answer.message.content or "")
        plain = (
            talker.chat.completions.create(
                model="default", messages=MESSAGES, max_tokens=limit, extra_body={"separate_reasoning": False}
            )
            .choices[0]
            .message.content
        )
        assert plain is not None
        if not answer.message.tool_calls:
            without_tags = plain.replace("<think>", "").replace("</think>", "")
            assert "".join(text.split()) == "".join(without_tags.split())


# logprobs, echo, evaluation harnesses


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_and_logprobs(talker: openai.OpenAI, count: int, max_tokens: int) -> None:
    prompt = "Hello wörld, 東京"
    fields: Any = {"model": "default", "prompt": prompt, "echo": True, "logprobs": count, "max_tokens": max_tokens}
    answer = talker.completions.create(**fields)
    choice = answer.choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None
    assert answer.usage is not None
    length = answer.usage.prompt_tokens + max_tokens
    tokens, values, offsets = logprobs.tokens or [], logprobs.token_logprobs or [], logprobs.text_offset or []
    assert len(tokens) == len(values) == len(offsets) == length
    assert [index for index, value in enumerate(values) if value is None] == [0]
    assert choice.text.startswith(prompt)
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    if max_tokens:
        assert offsets[-max_tokens] == len(prompt)
    if count:
        assert logprobs.top_logprobs is not None
        assert [len(top or {}) >= count for top in logprobs.top_logprobs[1:]] == [True] * (length - 1)
    else:
        assert logprobs.top_logprobs is None
    pieces = [piece.choices[0] for piece in talker.completions.create(**fields, stream=True)]
    assert "".join(piece.text for piece in pieces) == choice.text
    parts = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    assert [token for part in parts for token in part.tokens or []] == tokens
    assert [value for part in parts for value in part.token_logprobs or []] == values
    assert [offset for part in parts for offset in part.text_offset or []] == offsets
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]


def test_an_evaluation_harness_sends_rows_of_ids(talker: openai.OpenAI) -> None:
    rows = [[1, 2, 300, 4000], [5, 6]]
    answer = talker.completions.create(
        model="default", prompt=rows, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for row, choice in zip(rows, answer.choices, strict=True):
        assert choice.logprobs is not None
        assert len(choice.logprobs.token_logprobs or []) == len(row) + 1
        assert len(choice.logprobs.top_logprobs or []) == len(row) + 1
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 2)


# streams and errors, on the wire and through the client


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_in_streams(scripted: Instance, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 5, **({"messages": MESSAGES} if "chat" in path else {"prompt": "a"})}
    whole = post(scripted, path, **body, stream_options={"include_usage": True}).json()
    events = events_of(post(scripted, path, **body, stream=True, stream_options={"include_usage": True}).text)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert sum(bool(choice["finish_reason"]) for event in events for choice in event["choices"]) == 1
    for options in ({"stream_options": {"include_usage": False}}, {"stream_options": None}, {}):
        events = events_of(post(scripted, path, **body, stream=True, **options).text)
        assert all("usage" not in event and event["choices"] for event in events)


def raw(instance: Instance, method: str, path: str, content: bytes, **headers: str) -> httpx.Response:
    sent = {"content-type": "application/json", **headers}
    return httpx.request(method, instance.url + path, content=content, headers=sent, timeout=ANSWER_WITHIN_S)


def check_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert not any(word in answer.text for word in ("Error(", "Traceback", ".py", "msgspec", "codec"))
    return error


def test_errors_have_one_shape_whoever_made_them(scripted: Instance, talker: openai.OpenAI) -> None:
    chat = "/v1/chat/completions"
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as too_long:
            talker.chat.completions.create(model="default", messages=MESSAGES, max_tokens=999_999, stream=stream)
        assert too_long.value.code == "context_length_exceeded"
        assert "8192" in too_long.value.message
        with pytest.raises(openai.NotFoundError) as unknown:
            talker.chat.completions.create(model="other", messages=MESSAGES, stream=stream)
        assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
        body = json.dumps({"model": "default", "stream": stream}).encode()
        assert check_error(raw(scripted, "POST", chat, body), 400)["param"] == "messages"
        assert check_error(raw(scripted, "POST", chat, body[:-1]), 400)["code"] == "invalid_json"
    check_error(raw(scripted, "POST", chat, b"{}", **{"content-type": "text/plain"}), 415)
    check_error(raw(scripted, "GET", "/v1/nothing", b""), 404)
    check_error(raw(scripted, "DELETE", chat, b""), 405)
    check_error(raw(scripted, "POST", chat, b'{"messages":"' + b"a" * (5 << 20) + b'"}'), 413)


SURROGATES = [
    ("/v1/chat/completions", '{"messages":[{"role":"user","content":"hi %s"}]%s}'),
    ("/v1/chat/completions", '{"messages":[{"role":"user","name":"%s","content":"a"}]%s}'),
    ("/v1/chat/completions", '{"messages":[{"role":"user","content":"a"}],"stop":"%s"%s}'),
    (
        "/v1/chat/completions",
        '{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\":\\"%s\\"}"}}]}]%s}',
    ),
    ("/v1/completions", '{"prompt":"%s"%s}'),
    ("/v1/completions", '{"prompt":"a","rid":"%s"%s}'),
    ("/v1/completions", '{"prompt":"a","model":"%s"%s}'),
]


@pytest.mark.parametrize(("path", "body"), SURROGATES)
def test_half_a_surrogate_pair_is_refused_before_anything_is_sent(scripted: Instance, path: str, body: str) -> None:
    escape = "\\\\u" if "arguments" in body else "\\u"  # there it is JSON in JSON
    for half in (f"{escape}d83d", f"{escape}dc00z"):
        for stream in (',"stream":true,"max_tokens":1', ',"max_tokens":1'):
            check_error(raw(scripted, "POST", path, (body % (half, stream)).encode()), 400)
    whole = raw(scripted, "POST", path, (body % (f"{escape}d83d{escape}de00", ',"max_tokens":1')).encode())
    assert whole.status_code == (404 if '"model"' in body else 200), whole.text
    check_error(raw(scripted, "POST", path, b'{"prompt":"\xff"}'), 400)


def test_silly_numbers_of_answers(scripted: Instance) -> None:
    for n in ("0", "-1", "1.5", '"2"', "9223372036854775807", "1000000"):
        for stream in ("true", "false"):
            body = f'{{"prompt":"a","n":{n},"stream":{stream}}}'.encode()
            assert check_error(raw(scripted, "POST", "/v1/completions", body), 400)["param"] == "n"
    body = json.dumps({"prompt": "a", "rid": "r" * 128, "n": 11}).encode()
    assert check_error(raw(scripted, "POST", "/v1/completions", body), 400)["param"] == "rid"


def test_prompts_around_the_context_length(scripted: Instance, talker: openai.OpenAI) -> None:
    answer = talker.completions.create(model="default", prompt=[5] * 8191)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8191, 1)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ([5] * 8192, {}, "8192"),
        ([5] * 8193, {}, "8193"),
        ([5] * 200_000, {}, "200000"),
        ("a b " * 500_000, {}, "at least"),
        ([5] * 8000, {"max_tokens": 400}, "8400"),
    ]
    for prompt, fields, number in cases:
        with pytest.raises(openai.BadRequestError) as refused:
            talker.completions.create(model="default", prompt=prompt, **fields)
        assert refused.value.code == "context_length_exceeded"
        assert "8192" in refused.value.message
        assert number in refused.value.message


def test_nothing_was_restarted(real: Instance, scripted: Instance) -> None:
    for instance in (real, scripted):
        assert {row.restarts for row in look(instance).processes} == {0}
