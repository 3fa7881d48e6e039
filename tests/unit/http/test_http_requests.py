"""What good bodies become: prompts, sampling, limits on the output, the chat that is to be rendered."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from sglmt.http.errors import ApiError
from sglmt.http.generation import ChatRender, GenerationRequest, resolve_max_new_tokens
from sglmt.http.limits import ModelLimits
from sglmt.http.native.abort import parse_abort
from sglmt.http.native.generate import parse_generate
from sglmt.http.native.tokenize import detokenize_body, parse_detokenize, parse_tokenize, tokenize_body
from sglmt.http.openai.chat import parse_chat
from sglmt.http.openai.completions import parse_completion
from sglmt.messages.sampling import LogprobSpec
from sglmt.tokenizer.chat_template import ChatTemplate

USER = {"role": "user", "content": "hi"}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def completion(limits: ModelLimits, **fields: Any) -> GenerationRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), limits)


def chat(limits: ModelLimits, **fields: Any) -> GenerationRequest:
    return parse_chat(json.dumps({"model": "m", "messages": [USER], **fields}).encode(), limits)


def generate(limits: ModelLimits, params: dict[str, Any] | None = None, **fields: Any) -> GenerationRequest:
    if "input_ids" not in fields:
        fields.setdefault("text", "hi")
    return parse_generate(json.dumps({"sampling_params": params or {}, **fields}).encode(), limits)


def rendered(request: GenerationRequest) -> ChatRender:
    assert request.chat is not None
    return request.chat


@pytest.mark.parametrize(
    ("prompt", "rows", "is_batch"),
    [
        ("hi", [("hi", None)], False),
        ([1, 2], [(None, [1, 2])], False),
        (["a", "b"], [("a", None), ("b", None)], True),
        (["a"], [("a", None)], True),
        ([[1], [2, 999]], [(None, [1]), (None, [2, 999])], True),
        (["a", [1]], [("a", None), (None, [1])], True),
        ("\U0001f600 é\u0301", [("\U0001f600 é\u0301", None)], False),
    ],
)
def test_every_form_of_prompt(prompt: Any, rows: list[Any], is_batch: bool, limits: ModelLimits) -> None:
    request = completion(limits, prompt=prompt)
    assert [(item.text, item.input_ids) for item in request.prompts] == rows
    assert request.is_batch is is_batch
    assert len({item.rid for item in request.prompts}) == len(rows)


def test_a_surrogate_pair_is_a_character(limits: ModelLimits) -> None:
    assert parse_completion(b'{"prompt":"\\ud83d\\ude00"}', limits).prompts[0].text == "\U0001f600"


def test_a_byte_order_mark_is_skipped(limits: ModelLimits) -> None:
    assert parse_completion(b'\xef\xbb\xbf{"prompt":"a"}', limits).prompts[0].text == "a"


@pytest.mark.parametrize("name", ["smol", "default", "m", None])
def test_the_model_has_several_names(name: str | None, limits: ModelLimits) -> None:
    assert completion(limits, model=name).model == name


def test_unknown_fields_and_nulls_are_nothing(limits: ModelLimits) -> None:
    bare = completion(limits, rid="x")
    nulls: dict[str, Any] = dict.fromkeys(("temperature", "n", "stop", "seed", "logprobs", "max_tokens", "best_of"))
    assert completion(limits, rid="x", user="u", metadata={"a": [1]}, store=True, **nulls) == bare


def test_sampling_fields_arrive(limits: ModelLimits) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 5, "logit_bias": {"3": -1, "4": 2}}
    more = {"frequency_penalty": 1, "presence_penalty": -1, "repetition_penalty": 1.2, "ignore_eos": True}
    request = completion(limits, **fields, **more, min_tokens=2, stop_token_ids=[5, 6], max_tokens=9)
    sampling = request.sampling_for(10, limits)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.2)
    assert (sampling.seed, sampling.logit_bias) == (5, {3: -1.0, 4: 2.0})
    assert (sampling.max_new_tokens, sampling.min_new_tokens) == (9, 2)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((5, 6), True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (1.0, 1.0, -1)),
        ({"temperature": 0}, (0.0, 1.0, -1)),
        ({"temperature": 1e-300, "top_p": 0.5}, (0.0, 1.0, -1)),
        ({"top_p": 0}, (0.0, 1.0, -1)),
        ({"top_k": 0}, (1.0, 1.0, -1)),
        ({"top_k": -1}, (1.0, 1.0, -1)),
        ({"top_k": 1000}, (1.0, 1.0, -1)),
        ({"top_k": 10**30}, (1.0, 1.0, -1)),
        ({"top_k": 999}, (1.0, 1.0, 999)),
    ],
)
def test_edge_values_are_made_harmless(
    fields: dict[str, Any], expected: tuple[float, float, int], limits: ModelLimits
) -> None:
    sampling = completion(limits, **fields).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == expected


def test_the_models_defaults_apply_where_they_are_usable(limits: ModelLimits, poor_limits: ModelLimits) -> None:
    defaults = {"temperature": 0.6, "top_p": float("nan"), "top_k": 20, "min_p": 7, "repetition_penalty": 1.1}
    able = completion(dataclasses.replace(limits, generation_defaults=defaults)).sampling
    assert (able.temperature, able.top_p, able.top_k, able.min_p) == (0.6, 1.0, 20, 0.0)
    assert able.repetition_penalty == 1.1
    plain = completion(dataclasses.replace(poor_limits, generation_defaults=defaults)).sampling
    assert (plain.temperature, plain.top_k, plain.repetition_penalty) == (0.6, -1, 1.0)
    assert (
        completion(dataclasses.replace(limits, generation_defaults=defaults), temperature=0.2).sampling.temperature
        == 0.2
    )


@pytest.mark.parametrize(("seed", "kept"), [(0, 0), (2**63 - 1, 2**63 - 1), (-1, 2**63 - 1), (-(2**63), 0)])
def test_seeds_are_64_bits_and_not_negative(seed: int, kept: int, limits: ModelLimits) -> None:
    assert completion(limits, seed=seed).sampling.seed == kept
    assert generate(limits, {"sampling_seed": seed}).sampling.seed == kept


def test_each_answer_to_a_prompt_has_a_seed_of_its_own(limits: ModelLimits) -> None:
    request = completion(limits, seed=2**63 - 1, n=3)
    assert [request.sampling_for(1, limits, k).seed for k in range(3)] == [2**63 - 1, 0, 1]
    assert completion(limits, n=2).sampling_for(1, limits, 1).seed is None


def test_stop_in_all_forms(limits: ModelLimits) -> None:
    assert completion(limits, stop="a").text.stop == ("a",)
    assert completion(limits, stop=["a", "bc"]).text.stop == ("a", "bc")
    assert completion(limits, stop=[]).text.stop == ()
    assert completion(limits, include_stop_str_in_output=True).text.no_stop_trim
    assert generate(limits, {"stop": ["x"], "no_stop_trim": True}).text.no_stop_trim
    assert not completion(limits, skip_special_tokens=False).text.skip_special_tokens


def test_n_is_bounded_together_with_the_prompts(limits: ModelLimits) -> None:
    assert completion(limits, prompt=["a"] * 8, n=2).num_choices == 16
    assert generate(limits, {"n": 16}).num_choices == 16
    with pytest.raises(ApiError, match="at most 16"):
        completion(limits, prompt=["a"] * 9, n=2)


def test_request_ids(limits: ModelLimits) -> None:
    assert [item.rid for item in generate(limits, text=["a", "b"], rid="x").prompts] == ["x_0", "x_1"]
    assert [item.rid for item in generate(limits, text=["a", "b"], rid=["p", "q"]).prompts] == ["p", "q"]
    request = generate(limits, {"n": 2}, text=["a", "b"], rid=["p", "q"])
    assert [request.choice_rid(choice) for choice in range(4)] == ["p_0", "p_1", "q_0", "q_1"]
    assert generate(limits, rid="x").choice_rid(0) == "x"
    assert generate(limits, rid="é" * 64).choice_rid(0) == "é" * 64
    assert generate(limits, {"n": 10}, rid="x" * 126).choice_rid(9) == "x" * 126 + "_9"


@pytest.mark.parametrize(
    ("requested", "prompt_tokens", "default", "expected"),
    [
        (None, 10, None, 4086),
        (None, 4095, None, 1),
        (None, 10, 16, 16),
        (None, 4090, 16, 6),
        (4086, 10, None, 4086),
        (0, 4096, None, 0),
        (1, 4095, 16, 1),
    ],
)
def test_how_much_may_be_generated(
    requested: int | None, prompt_tokens: int, default: int | None, expected: int, limits: ModelLimits
) -> None:
    assert resolve_max_new_tokens(requested, prompt_tokens, limits, default) == expected


@pytest.mark.parametrize(
    ("requested", "prompt_tokens", "number"),
    [
        (None, 4096, 4096),
        (None, 4097, 4097),
        (200, 4000, 4200),
        (1, 4096, 4096),
        (0, 4097, 4097),
        (None, 200000, 200000),
    ],
)
def test_what_does_not_fit_names_both_numbers(
    requested: int | None, prompt_tokens: int, number: int, limits: ModelLimits
) -> None:
    with pytest.raises(ApiError) as caught:
        resolve_max_new_tokens(requested, prompt_tokens, limits, 16)
    error = caught.value
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert "maximum context length is 4096 tokens" in error.message
    assert str(number) in error.message


def test_a_row_of_ids_that_is_too_long_is_refused_unread(limits: ModelLimits) -> None:
    with pytest.raises(ApiError) as caught:
        completion(limits, prompt=[1] * 4097)
    assert caught.value.code == "context_length_exceeded"
    assert "4097" in caught.value.message


def test_the_default_length_is_each_apis_own(limits: ModelLimits) -> None:
    assert completion(limits).sampling_for(5, limits).max_new_tokens == 16
    assert generate(limits).sampling_for(5, limits).max_new_tokens == 128
    assert chat(limits).sampling_for(5, limits).max_new_tokens == 4091


def test_min_tokens_never_exceeds_what_fits(limits: ModelLimits) -> None:
    assert completion(limits, min_tokens=100).sampling_for(4090, limits).min_new_tokens == 6


def test_completion_logprobs_and_echo(limits: ModelLimits) -> None:
    assert completion(limits).logprobs is None
    assert completion(limits, logprobs=0).logprobs == LogprobSpec()
    assert completion(limits, logprobs=3, echo=True).logprobs == LogprobSpec(top_logprobs_num=3, prompt_from=0)
    request = completion(limits, echo=True, max_tokens=0)
    assert (request.max_new_tokens, request.echo, request.needs_engine) == (0, True, False)
    assert completion(limits, echo=True, max_tokens=0, logprobs=1).needs_engine
    assert completion(limits, best_of=1).n == completion(limits, best_of=2, n=2).n - 1


def test_chat_lengths_and_logprobs(limits: ModelLimits) -> None:
    assert chat(limits, max_tokens=3).max_new_tokens == 3
    assert chat(limits, max_completion_tokens=4).max_new_tokens == 4
    assert chat(limits, max_completion_tokens=4, max_tokens=3).max_new_tokens == 4
    assert chat(limits, max_completion_tokens=None, max_tokens=None).max_new_tokens is None
    assert chat(limits, logprobs=True, top_logprobs=0).logprobs == LogprobSpec()
    assert chat(limits, logprobs=True, top_logprobs=2).logprobs == LogprobSpec(top_logprobs_num=2)
    assert chat(limits, logprobs=False, top_logprobs=0).logprobs is None


def test_generate_logprobs(limits: ModelLimits) -> None:
    more = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [4, 5], "logprob_start_len": 3}
    assert generate(limits, **more).logprobs == LogprobSpec(top_logprobs_num=2, token_ids=(4, 5), prompt_from=3)
    assert generate(limits, return_logprob=False, top_logprobs_num=2).logprobs is None
    shared = generate(limits, text=["a", "b"], return_logprob=[True, True], token_ids_logprob=[[1], [1]])
    assert shared.logprobs == LogprobSpec(token_ids=(1,))
    assert generate(limits, {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0).max_new_tokens == 0


def test_generate_streams_are_cumulative_unless_asked(limits: ModelLimits) -> None:
    assert not generate(limits, stream=True).incremental
    assert generate(limits, stream=True, incremental_streaming_output=True).incremental


def test_generate_takes_equal_parameters_as_a_list(limits: ModelLimits) -> None:
    body = {"text": ["a", "b"], "sampling_params": [{"temperature": 0, "max_new_tokens": 3}] * 2}
    assert parse_generate(json.dumps(body).encode(), limits).max_new_tokens == 3
    assert parse_generate(b'{"input_ids":[[1],[2]]}', limits).is_batch


def test_messages_reach_the_template_in_its_own_form(limits: ModelLimits) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": {"b": 1}}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "joe"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
        {"role": "assistant", "content": "ok", "tool_calls": None, "refusal": None},
        {"role": "user", "content": "", "extra": {"kept": True}},
    ]
    seen = rendered(chat(limits, messages=messages)).messages
    assert seen[0] == {"role": "system", "content": "be brief"}
    assert seen[1] == {"role": "user", "content": "a\nb", "name": "joe"}
    assert seen[2]["content"] == ""
    assert seen[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": {"b": 1}}}
    assert seen[3] == messages[3]
    assert "tool_calls" not in seen[4]
    assert seen[5] == messages[5]


@pytest.mark.parametrize(
    ("arguments", "seen"), [("", {}), (None, {}), ("{bad", "{bad"), ("[1]", "[1]"), ({"a": 1}, {"a": 1})]
)
def test_tool_arguments_that_are_no_object_stay_text(arguments: Any, seen: Any, limits: ModelLimits) -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    calls = rendered(chat(limits, messages=[message])).messages[0]["tool_calls"]
    assert calls[0]["function"]["arguments"] == seen


def test_tools_are_told_unless_none_may_be_called(limits: ModelLimits) -> None:
    assert rendered(chat(limits, tools=[FUNCTION])).tools == [FUNCTION]
    assert rendered(chat(limits, tools=[FUNCTION], tool_choice="auto")).tools == [FUNCTION]
    assert rendered(chat(limits, tools=[FUNCTION], tool_choice="none")).tools is None
    assert rendered(chat(limits, tools=[])).tools is None


def test_template_variables(limits: ModelLimits) -> None:
    more = {"documents": [{"title": "t"}], "reasoning_effort": "low"}
    request = chat(limits, chat_template_kwargs={"enable_thinking": False}, **more)
    assert rendered(request).kwargs == {"enable_thinking": False, **more}
    assert rendered(request).add_generation_prompt
    assert not request.add_special_tokens
    continued = rendered(chat(limits, continue_final_message=True))
    assert (continued.continue_final_message, continued.add_generation_prompt) == (True, False)
    assert not rendered(chat(limits, add_generation_prompt=False)).add_generation_prompt


def test_response_format(limits: ModelLimits, poor_limits: ModelLimits) -> None:
    schema = {"type": "object", "properties": {"é": {"type": "integer"}}}
    wrapped = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    given = chat(limits, response_format=wrapped).sampling.json_schema
    assert given is not None
    assert json.loads(given) == schema
    assert chat(limits, response_format={"type": "json_object"}).sampling.json_schema == '{"type":"object"}'
    assert chat(poor_limits, response_format={"type": "text"}).sampling.json_schema is None
    assert generate(limits, {"json_schema": '{"type": "object"}'}).sampling.json_schema == '{"type":"object"}'


def test_rendering_through_a_real_template(limits: ModelLimits) -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ mood }}", {})
    request = chat(limits, messages=[USER, {"role": "assistant", "content": "yo"}], chat_template_kwargs={"mood": "!"})
    assert rendered(request).render(template) == "[user]hi[assistant]yo!"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 5 }}", "the chat template cannot use these messages"),
        ("{{ messages[0].content.missing.more }}", "the chat template cannot use these messages"),
    ],
)
def test_what_the_template_refuses_is_a_400_without_internals(source: str, message: str, limits: ModelLimits) -> None:
    with pytest.raises(ApiError) as caught:
        rendered(chat(limits)).render(ChatTemplate(source, {}))
    assert (caught.value.status, caught.value.message) == (400, f"messages: {message}")


def test_tokenize_and_detokenize(limits: ModelLimits) -> None:
    one = parse_tokenize(b'{"model":"m","prompt":"","add_special_tokens":false}', limits)
    assert (one.texts, one.is_batch, one.add_special_tokens) == ([""], False, False)
    assert json.loads(tokenize_body(one, [[1, 2]], limits)) == {"tokens": [1, 2], "count": 2, "max_model_len": 4096}
    many = parse_tokenize(b'{"text":["a","b"]}', limits)
    assert json.loads(tokenize_body(many, [[1], []], limits))["count"] == [1, 0]
    ids = parse_detokenize(b'{"tokens":[1,2]}', limits)
    assert (ids.rows, ids.skip_special_tokens) == ([[1, 2]], True)
    assert json.loads(detokenize_body(ids, ["ab"])) == {"text": "ab"}
    rows = parse_detokenize(b'{"tokens":[[1],[]],"skip_special_tokens":false}', limits)
    assert (rows.rows, rows.skip_special_tokens) == ([[1], []], False)
    assert json.loads(detokenize_body(rows, ["a", ""])) == {"text": ["a", ""]}


def test_abort(limits: ModelLimits) -> None:
    assert parse_abort(b'{"rid":"r-1"}') == ("r-1", False)
    assert parse_abort(b'{"abort_all":true}') == (None, True)
    assert parse_abort(b'{"rid":"r-1","abort_all":false,"x":1}') == ("r-1", False)


def test_priority_and_timeout(limits: ModelLimits) -> None:
    request = chat(limits, priority=-3, timeout_s=2)
    assert (request.priority, request.timeout_s) == (-3, 2.0)
