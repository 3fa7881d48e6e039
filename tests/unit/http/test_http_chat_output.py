"""Chats with tools and of models that reason, as clients read them: the official types, streamed equal to whole."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from sglmt.http.errors import ApiError
from sglmt.http.formatting import ChoiceResult, ChoiceUsage, FormatContext
from sglmt.http.generation import GenerationRequest
from sglmt.http.limits import ModelLimits
from sglmt.http.openai.chat import parse_chat
from sglmt.http.openai.chat_format import ChatFormatter
from sglmt.http.output.rules import OutputRules
from sglmt.messages.sampling import FinishReason, TokenLogprobs

STOP = FinishReason(kind="stop", matched=2)
LENGTH = FinishReason(kind="length")
END_ID = 9
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "世界\u2028"}}\n</tool_call>'
LIMITS = ModelLimits(
    model_name="smol",
    context_length=64,
    vocab_size=1000,
    max_prompts_per_request=16,
    engine="plain",
    capabilities={"chosen_logprobs": "exact"},
    output=OutputRules(
        "hermes", "qwen3", special_marks={"<tool_call>": 5, "</think>": END_ID}, reasoning_end_id=END_ID
    ),
)


def chat(limits: ModelLimits = LIMITS, **fields: Any) -> GenerationRequest:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [FUNCTION], **fields}
    return parse_chat(json.dumps(body).encode(), limits)


def context(prompt: str = "") -> FormatContext:
    return FormatContext("smol", 1700, "r", str, lambda i: str(i).encode(), prompt_texts=[prompt])


def whole(
    text: str, ids: list[int], finish: FinishReason = STOP, prompt: str = "", **fields: Any
) -> tuple[ChatCompletion, dict[str, Any]]:
    request = chat(**fields)
    logprobs = TokenLogprobs(chosen=[-0.5] * len(ids)) if request.logprobs is not None else None
    result = ChoiceResult(0, 0, text, ids, logprobs, None, finish, ChoiceUsage(3, len(ids), 0))
    body = request.make_formatter(context(prompt)).result([result])
    return ChatCompletion.model_validate_json(body), json.loads(body)


def streamed(
    parts: list[str], finish: FinishReason = STOP, prompt: str = "", **fields: Any
) -> list[ChatCompletionChunk]:
    """A chunk a part, one id a part."""
    request = chat(stream=True, **fields)
    formatter = request.make_formatter(context(prompt))
    logprobs = TokenLogprobs(chosen=[-0.5]) if request.logprobs is not None else None
    out = [formatter.stream_start()]
    out += [formatter.delta(0, part, [END_ID if part == "</think>" else 1], logprobs) for part in parts]
    out.append(formatter.finish(0, "", [2], logprobs, finish, ChoiceUsage(3, len(parts) + 1, 0)))
    lines = b"".join([*out, formatter.stream_end()]).decode().splitlines()
    assert lines[-2:] == ["data: [DONE]", ""]
    return [ChatCompletionChunk.model_validate_json(line.removeprefix("data: ")) for line in lines[:-2] if line]


def joined(chunks: list[ChatCompletionChunk]) -> dict[str, Any]:
    """What a client makes of a stream."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reason": None}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning"] += (delta.model_extra or {}).get("reasoning_content", "")
            for call in delta.tool_calls or []:
                assert call.function is not None
                if call.id is not None:
                    assert (call.index, call.type) == (len(message["calls"]), "function")
                    message["calls"].append([call.id, call.function.name, ""])
                assert call.function.arguments is not None
                message["calls"][call.index][2] += call.function.arguments
            message["reason"] = choice.finish_reason or message["reason"]
    return message


def test_a_call_streamed_and_whole() -> None:
    answer, body = whole(f"So.\n{CALL}\n{CALL}", [1, 2])
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "So.")
    calls = choice.message.tool_calls or []
    assert [call.type for call in calls] == ["function", "function"]
    assert [call.function.name for call in calls if call.type == "function"] == ["f", "f"]
    assert len({call.id for call in calls}) == 2
    assert "reasoning_content" not in body["choices"][0]["message"]
    said = joined(streamed([*f"So.\n{CALL}\n{CALL}"]))
    assert (said["content"], said["reason"], len(said["calls"])) == ("So.", "tool_calls", 2)
    assert len({call_id for call_id, _, _ in said["calls"]}) == 2
    assert all(json.loads(arguments) == {"a": "世界\u2028"} for _, _, arguments in said["calls"])


def test_an_answer_of_calls_only_has_no_content() -> None:
    answer, _ = whole(CALL, [1])
    assert answer.choices[0].message.content is None
    empty, _ = whole("", [2])
    assert (empty.choices[0].message.content, empty.choices[0].finish_reason) == ("", "stop")


def test_a_limit_stays_the_reason_and_a_call_that_was_cut_off_is_text() -> None:
    answer, _ = whole(CALL[:40], [1], LENGTH)
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("length", CALL[:40])
    assert not answer.choices[0].message.tool_calls
    both, _ = whole(CALL + CALL[:40], [1], LENGTH)
    assert both.choices[0].finish_reason == "length"
    assert len(both.choices[0].message.tool_calls or []) == 1
    assert joined(streamed([CALL[:40]], LENGTH))["reason"] == "length"


def test_reasoning_is_apart_and_counted() -> None:
    text = "<think>\nhm\n</think>\n\nyes"
    answer, body = whole(text, [1, 1, END_ID, 1, 2])
    assert body["choices"][0]["message"]["reasoning_content"] == "hm"
    assert answer.choices[0].message.content == "yes"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 3
    chunks = streamed(["<think>", "\nhm\n", "</think>", "\n\nyes"], stream_options={"include_usage": True})
    said = joined(chunks)
    assert (said["reasoning"], said["content"], said["reason"]) == ("hm", "yes", "stop")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens_details is not None
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 3


def test_reasoning_the_prompt_has_opened_and_none_at_all() -> None:
    said = joined(streamed(["hm", "</think>", "yes"], prompt="<|assistant|>\n<think>\n"))
    assert (said["reasoning"], said["content"]) == ("hm", "yes")
    answer, body = whole("yes", [1, 2])
    assert "reasoning_content" not in body["choices"][0]["message"]
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert answer.choices[0].message.content == "yes"


def test_reasoning_stays_in_the_content_on_request() -> None:
    text = "<think>\nhm\n</think>\n\nyes"
    answer, body = whole(text, [1, END_ID, 2], separate_reasoning=False)
    assert answer.choices[0].message.content == text
    assert "reasoning_content" not in body["choices"][0]["message"]
    assert joined(streamed([*text], separate_reasoning=False))["content"] == text


def test_tokens_that_cannot_be_counted_are_not_told() -> None:
    limits = dataclasses.replace(LIMITS, output=OutputRules("hermes", "qwen3"))
    request = chat(limits)
    result = ChoiceResult(0, 0, "<think>a</think>b", [1], None, None, STOP, ChoiceUsage(3, 1, 0))
    usage = json.loads(request.make_formatter(context()).result([result]))["usage"]
    assert "completion_tokens_details" not in usage


def test_logprobs_of_every_token_come_once() -> None:
    parts = ["<think>", "a", "</think>", "b", *CALL]
    chunks = streamed(parts, logprobs=True)
    tokens = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or []
    ]
    assert len(tokens) == len(parts) + 1
    answer, _ = whole("".join(parts), [1] * 5, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or []) == 5


@given(st.lists(st.sampled_from(["<think>", "</think>", CALL, CALL[:30], "x", "\n", " ", "世"]), max_size=8))
def test_streams_say_what_whole_answers_say(parts: list[str]) -> None:
    answer, body = whole("".join(parts), [1])
    message = answer.choices[0].message
    said = joined(streamed(parts))
    assert said["reasoning"] == body["choices"][0]["message"].get("reasoning_content", "")
    complete = [(name, arguments) for _, name, arguments in said["calls"] if _is_json(arguments)]
    assert complete == [
        (c.function.name, c.function.arguments) for c in message.tool_calls or [] if c.type == "function"
    ]
    if len(complete) == len(said["calls"]):
        assert said["content"] == (message.content or "")
        assert said["reason"] == answer.choices[0].finish_reason


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def test_only_chats_that_need_it_are_taken_apart() -> None:
    plain = dataclasses.replace(LIMITS, output=OutputRules("hermes"))
    assert chat(plain).output is not None
    for fields in ({"tools": None}, {"tool_choice": "none"}, {"tools": []}):
        request = chat(plain, **fields)
        assert request.output is None
        assert isinstance(request.make_formatter(context()), ChatFormatter)
        assert request.text.shown_ids == ()
    assert chat(dataclasses.replace(LIMITS, output=OutputRules())).output is None
    assert chat().text.shown_ids == (5, END_ID)
    assert chat(tools=None).text.shown_ids == (END_ID,)
    assert chat(tools=None).output is not None


def test_ids_of_calls_are_what_mistrals_templates_take() -> None:
    limits = dataclasses.replace(LIMITS, output=OutputRules("mistral"))
    result = ChoiceResult(0, 0, "[TOOL_CALLS]f[ARGS]{}", [1], None, None, STOP, ChoiceUsage(3, 1, 0))
    body = json.loads(chat(limits).make_formatter(context()).result([result]))
    (call,) = body["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def named(name: str) -> dict[str, Any]:
    return {"tool_choice": {"type": "function", "function": {"name": name}}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"tools": [function(parameters="x")]}, "tools[0].function.parameters", "object"),
        ({"tools": [function(name="")]}, "tools[0].function.name", "name"),
        ({"tools": [function(name="x" * 300)]}, "tools[0].function.name", "name"),
        ({"tools": [function(description=3)]}, "tools[0].function.description", "string"),
        ({"tools": [function(), function()]}, "tools[1].function.name", "twice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"tool_choice": "required"}, "tool_choice", "plain engine"),
        (named("f"), "tool_choice", "plain engine"),
        (named("g"), "tool_choice.function.name", "none of the tools"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "function is expected"),
        ({"tool_choice": "any"}, "tool_choice", "auto, none, required"),
        ({"tool_choice": "required", "tools": None}, "tool_choice", "no tools"),
        ({"response_format": {"type": "json_object"}}, "response_format", "plain engine"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format",
            "plain engine",
        ),
    ],
)
def test_what_cannot_be_done_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in caught.value.message
