"""Answers as clients read them: parsed with the official client's own types, streamed equal to whole."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from sglmt.http.errors import ApiError, unavailable
from sglmt.http.formatting import ChoiceResult, ChoiceUsage, FormatContext, Formatter
from sglmt.http.generation import GenerationRequest
from sglmt.http.limits import ModelLimits
from sglmt.http.native.generate import parse_generate
from sglmt.http.openai.chat import parse_chat
from sglmt.http.openai.completions import parse_completion
from sglmt.messages.sampling import FinishReason, TokenLogprobs

WORDS = ["zero", " one", "é", "世界", " four", "<end>"]
STOP = FinishReason(kind="stop", matched="END")
LENGTH = FinishReason(kind="length")
ABORT = FinishReason(kind="abort", status=503, message="the server stops", code="draining")
ERROR = FinishReason(kind="error", message="the engine failed")

LIMITS = ModelLimits(
    model_name="smol",
    context_length=64,
    vocab_size=1000,
    max_prompts_per_request=16,
    engine="able",
    capabilities=dict.fromkeys(
        ("chosen_logprobs", "top_logprobs", "prompt_logprobs", "token_ids_logprobs", "temperature"), "exact"
    ),
)


def context(**more: Any) -> FormatContext:
    return FormatContext("smol", 1700, 'r"1', lambda i: WORDS[i], lambda i: WORDS[i].encode(), **more)


def completion(**fields: Any) -> GenerationRequest:
    return parse_completion(json.dumps({"prompt": "Say:", **fields}).encode(), LIMITS)


def chat(**fields: Any) -> GenerationRequest:
    messages = [{"role": "user", "content": "a"}]
    return parse_chat(json.dumps({"messages": messages, **fields}).encode(), LIMITS)


def generate(**fields: Any) -> GenerationRequest:
    return parse_generate(json.dumps({"text": "Say:", **fields}).encode(), LIMITS)


def events(data: bytes) -> list[Any]:
    """The JSON of each event, for a client that takes lines as Unicode has them; the terminator must be last."""
    lines = [line for line in data.decode("utf-8").splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert data.endswith(b"\n\n")
    return [json.loads(line.removeprefix("data: "), parse_constant=pytest.fail) for line in lines[:-1]]


def stream(
    formatter: Formatter, pieces: Sequence[Sequence[str]], finish: FinishReason = LENGTH, prompt_tokens: int = 3
) -> bytes:
    """Each choice's pieces, one id a piece, the last one with the finish."""
    out = [formatter.stream_start()]
    for choice, texts in enumerate(pieces):
        out.extend(formatter.delta(choice, text, [1], None) for text in texts[:-1])
        usage = ChoiceUsage(prompt_tokens, len(texts), 1)
        out.append(formatter.finish(choice, texts[-1], [1], None, finish, usage))
    return b"".join([*out, formatter.stream_end()])


def results(pieces: Sequence[Sequence[str]], n: int, finish: FinishReason = LENGTH) -> list[ChoiceResult]:
    return [
        ChoiceResult(
            *divmod(choice, n), "".join(texts), [1] * len(texts), None, None, finish, ChoiceUsage(3, len(texts), 1)
        )
        for choice, texts in enumerate(pieces)
    ]


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ["\u2028", "\u2029", "\x85", "\r\n", '"', "\\", "\x00", "data: [DONE]\n\n", "\U0001f468\u200d\U0001f469"]
)
PIECES = st.lists(TEXTS, min_size=1, max_size=6)


@given(PIECES, st.booleans())
def test_completion_deltas_are_the_whole_text(pieces: list[str], echo: bool) -> None:
    chunks = events(stream(completion(stream=True, echo=echo).make_formatter(context()), [pieces]))
    for chunk in chunks:  # the client's type knows no null, though the API's own streams have it
        choice = {**chunk["choices"][0], "finish_reason": chunk["choices"][0]["finish_reason"] or "stop"}
        Completion.model_validate({**chunk, "choices": [choice]})
    whole = Completion.model_validate_json(completion(echo=echo).make_formatter(context()).result(results([pieces], 1)))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole.choices[0].text
    assert whole.choices[0].text == ("Say:" if echo else "") + "".join(pieces)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


@given(PIECES)
def test_chat_deltas_are_the_whole_text(pieces: list[str]) -> None:
    chunks = [
        ChatCompletionChunk.model_validate(c)
        for c in events(stream(chat(stream=True).make_formatter(context()), [pieces]))
    ]
    whole = ChatCompletion.model_validate_json(chat().make_formatter(context()).result(results([pieces], 1)))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert {chunk.id for chunk in chunks} == {'chatcmpl-r"1'}


@given(PIECES, st.booleans())
def test_generate_events_lead_to_the_whole_answer(pieces: list[str], incremental: bool) -> None:
    request = generate(stream=True, incremental_streaming_output=incremental, rid="x")
    got = events(stream(request.make_formatter(context()), [pieces]))
    whole = json.loads(generate(rid="x").make_formatter(context()).result(results([pieces], 1)))
    if incremental:
        assert "".join(event["text"] for event in got) == whole["text"]
        assert flat(event["output_ids"] for event in got) == whole["output_ids"]
    else:
        assert got[-1] == whole
        texts = [event["text"] for event in got]
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert [event["meta_info"]["finish_reason"] for event in got[:-1]] == [None] * (len(got) - 1)
    assert got[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": len(pieces)}
    assert [event["meta_info"]["completion_tokens"] for event in got] == list(range(1, len(pieces) + 1))


def test_choices_are_prompt_major_and_prompts_count_once() -> None:
    fields = {"prompt": ["a", "b"], "n": 2, "stream_options": {"include_usage": True}}
    pieces = [["w"], ["x", "y"], ["z"], ["q"]]
    chunks = events(stream(completion(stream=True, **fields).make_formatter(context()), pieces))
    whole = json.loads(completion(**fields).make_formatter(context()).result(results(pieces, 2)[::-1]))
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    texts = ["".join(c["choices"][0]["text"] for c in chunks[:-1] if c["choices"][0]["index"] == k) for k in range(4)]
    assert texts == [choice["text"] for choice in whole["choices"]] == ["w", "xy", "z", "q"]
    assert whole["usage"] == chunks[-1]["usage"]
    assert whole["usage"]["prompt_tokens"] == 6
    assert whole["usage"]["completion_tokens"] == 5
    assert whole["usage"]["total_tokens"] == 11
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("make", [completion, chat])
def test_usage_comes_last_and_only_when_asked(make: Any) -> None:
    asked = make(stream=True, stream_options={"include_usage": True})
    chunks = events(stream(asked.make_formatter(context()), [["a", "b"]]))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 5
    for options in ({"include_usage": False}, None):
        plain = make(stream=True, stream_options=options).make_formatter(context())
        assert all("usage" not in chunk for chunk in events(stream(plain, [["a", "b"]])))


@pytest.mark.parametrize("make", [completion, chat])
def test_nothing_is_sent_for_a_token_without_text(make: Any) -> None:
    formatter = make(stream=True).make_formatter(context())
    assert formatter.delta(0, "", [5], None) == b""


def test_a_generate_token_without_text_still_has_its_id() -> None:
    formatter = generate(stream=True).make_formatter(context(prompt_ids=[[7, 8]]))
    event = json.loads(formatter.delta(0, "", [5], None).removeprefix(b"data: "))
    assert (event["text"], event["output_ids"]) == ("", [5])
    assert event["meta_info"]["prompt_tokens"] == 2
    assert formatter.delta(0, "", [], None) == b""


@pytest.mark.parametrize("make", [completion, chat, generate])
def test_a_failure_in_mid_stream_is_an_error_event_and_the_terminator(make: Any) -> None:
    formatter = make(stream=True).make_formatter(context())
    data = formatter.stream_start() + formatter.delta(0, "a", [1], None)
    data += formatter.stream_error(unavailable("the \u2028 engine is away"))
    last = events(data)[-1]
    assert last["error"]["type"] == "service_unavailable_error"
    assert last["error"]["message"] == "the \u2028 engine is away"
    assert "length" not in data.decode()


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize("finish", [ABORT, ERROR])
def test_a_failed_choice_is_never_a_normal_finish(make: Any, finish: FinishReason) -> None:
    got = events(stream(make(stream=True).make_formatter(context()), [["a", "b"]], finish))
    assert got[-1]["error"]["code"] == (finish.code or "internal_error")
    assert all(event["choices"][0]["finish_reason"] is None for event in got[:-1])
    with pytest.raises(ApiError) as caught:
        make().make_formatter(context()).result(results([["a"]], 1, finish))
    assert caught.value.status == (finish.status or 500)


def test_generate_tells_of_aborts_in_its_own_way() -> None:
    got = events(stream(generate(stream=True).make_formatter(context()), [["a", "b"]], ABORT))
    reason = {"type": "abort", "message": "the server stops", "status_code": 503, "code": "draining"}
    assert got[-1]["meta_info"]["finish_reason"] == reason
    failed = events(stream(generate(stream=True).make_formatter(context()), [["a", "b"]], ERROR))
    assert failed[-1]["error"]["message"] == "the engine failed"
    with pytest.raises(ApiError, match="the server stops"):
        generate().make_formatter(context()).result(results([["a"]], 1, ABORT))
    mixed = [*results([["a"]], 1), *results([["b"]], 1, ABORT)]
    mixed[1].prompt_index = 1
    whole = json.loads(generate(text=["a", "b"]).make_formatter(context()).result(mixed))
    assert [item["meta_info"]["finish_reason"]["type"] for item in whole] == ["length", "abort"]


def test_generate_lists_and_indexes() -> None:
    request = generate(sampling_params={"n": 3}, rid="x", stream=True)
    got = events(stream(request.make_formatter(context()), [["a"], ["b"], ["c"]], STOP))
    assert [(event["index"], event["text"], event["meta_info"]["id"]) for event in got] == [
        (0, "a", "x_0"),
        (1, "b", "x_1"),
        (2, "c", "x_2"),
    ]
    assert got[0]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "END"}
    whole = json.loads(generate(text=["a"]).make_formatter(context()).result(results([["a"]], 1)))
    assert isinstance(whole, list)


def test_generate_says_how_long_it_took() -> None:
    formatter = generate().make_formatter(context(started_s=10.0, now=lambda: 12.5))
    assert json.loads(formatter.result(results([["a"]], 1)))["meta_info"]["e2e_latency"] == 2.5


def logprobs(chosen: list[float | None], top: Any = None, requested: Any = None) -> TokenLogprobs:
    return TokenLogprobs(chosen=chosen, top=top, requested=requested)


def test_completion_logprobs_stream_equals_whole() -> None:
    ids, chosen = [1, 2, 3, 4], [-0.5, float("-inf"), -1.0, -2.0]
    top = [[(1, -0.5), (2, -3.0)], [(4, -0.1)], [(3, -1.0)], [(4, -2.0)]]
    request = completion(stream=True, logprobs=2)
    formatter = request.make_formatter(context())
    data = formatter.delta(0, " one", ids[:1], logprobs(chosen[:1], top[:1]))
    data += formatter.delta(0, "", ids[1:2], logprobs(chosen[1:2], top[1:2]))
    data += formatter.finish(0, "é世界 four", ids[2:], logprobs(chosen[2:], top[2:]), LENGTH, ChoiceUsage(3, 4, 0))
    parts = [event["choices"][0]["logprobs"] for event in events(data + formatter.stream_end())]
    result = ChoiceResult(0, 0, " oneé世界 four", ids, logprobs(chosen, top), None, LENGTH, ChoiceUsage(3, 4, 0))
    body = completion(logprobs=2).make_formatter(context()).result([result])
    whole = Completion.model_validate_json(body).choices[0].logprobs
    assert whole is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert flat(part[name] for part in parts) == getattr(whole, name)
    assert whole.text_offset == [4, 8, 9, 11]
    assert whole.token_logprobs == [-0.5, -9999.0, -1.0, -2.0]
    assert whole.top_logprobs is not None
    assert whole.top_logprobs[1] == {" four": -0.1, "é": -9999.0}


def test_tokens_inside_a_character_point_at_it() -> None:
    halves = {1: "世".encode()[:1], 2: "世".encode()[1:], 3: b"x"}
    told = FormatContext("smol", 1, "r", str, lambda i: halves[i])
    result = ChoiceResult(0, 0, "世x", [1, 2, 3], logprobs([-1.0] * 3), None, LENGTH, ChoiceUsage(3, 3, 0))
    body = json.loads(completion(logprobs=0).make_formatter(told).result([result]))
    assert body["choices"][0]["logprobs"]["text_offset"] == [4, 4, 5]
    assert body["choices"][0]["logprobs"]["top_logprobs"] is None


def test_echo_with_logprobs_covers_the_prompt_both_ways() -> None:
    told = context(prompt_texts=["zero one"], prompt_ids=[[0, 1]])
    of_prompt = logprobs([None, -0.25], [[], [(1, -0.25)]])
    own = logprobs([-1.0], [[(4, -1.0)]])
    usage = ChoiceUsage(2, 1, 0)
    result = ChoiceResult(0, 0, " four", [4], own, of_prompt, LENGTH, usage)
    body = json.loads(completion(echo=True, logprobs=1).make_formatter(told).result([result]))
    whole = body["choices"][0]
    assert whole["text"] == "zero one four"
    assert whole["logprobs"]["token_logprobs"] == [None, -0.25, -1.0]
    assert whole["logprobs"]["top_logprobs"] == [None, {" one": -0.25}, {" four": -1.0}]
    assert whole["logprobs"]["text_offset"] == [0, 4, 8]
    formatter = completion(echo=True, logprobs=1, stream=True).make_formatter(told)
    data = formatter.stream_start() + formatter.prompt_logprobs(0, of_prompt)
    data += formatter.finish(0, " four", [4], own, LENGTH, usage) + formatter.stream_end()
    choices = [event["choices"][0] for event in events(data)]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert flat(choice["logprobs"]["text_offset"] for choice in choices) == [0, 4, 8]


def test_tokens_before_the_text_are_at_its_start() -> None:
    told = context(prompt_texts=["zero one"], prompt_ids=[[5, 0, 1]])
    of_prompt = logprobs([None, -1.0, -1.0])
    result = ChoiceResult(0, 0, " four", [4], logprobs([-1.0]), of_prompt, LENGTH, ChoiceUsage(3, 1, 0))
    body = json.loads(completion(echo=True, logprobs=0).make_formatter(told).result([result]))
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 0, 4, 8]


def test_chat_logprobs_are_the_clients_type() -> None:
    top = [[(1, -0.5), (2, float("-inf"))]]
    request = chat(stream=True, logprobs=True, top_logprobs=2)
    formatter = request.make_formatter(context())
    data = formatter.delta(0, " one", [1], logprobs([-0.5], top))
    data += formatter.finish(0, "", [5], logprobs([-0.1], [[]]), STOP, ChoiceUsage(3, 2, 0)) + formatter.stream_end()
    chunks = [ChatCompletionChunk.model_validate(event) for event in events(data)]
    streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content or []]
    both = logprobs([-0.5, -0.1], [*top, []])
    result = ChoiceResult(0, 0, " one", [1, 5], both, None, STOP, ChoiceUsage(3, 2, 0))
    body = chat(logprobs=True, top_logprobs=2).make_formatter(context()).result([result])
    whole = ChatCompletion.model_validate_json(body).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    assert [entry.model_dump() for entry in whole.content] == [entry.model_dump() for entry in streamed]
    assert whole.content[0].bytes == list(b" one")
    assert [entry.logprob for entry in whole.content[0].top_logprobs] == [-0.5, -9999.0]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("with_text", [False, True])
def test_generate_logprobs(incremental: bool, with_text: bool) -> None:
    fields = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 1, "token_ids_logprob": [5]}
    more = {"incremental_streaming_output": incremental, "return_text_in_logprobs": with_text}
    told = context(prompt_ids=[[0, 1]])
    of_prompt = logprobs([-0.25], [[(1, -0.25)]], [[(5, -9.0)]])
    own = logprobs([-1.0, float("-inf")], [[(4, -1.0)], [(2, -1.0)]], [[(5, -8.0)], [(5, -7.0)]])
    formatter = generate(stream=True, **fields, **more).make_formatter(told)
    data = formatter.prompt_logprobs(0, of_prompt)
    data += formatter.delta(0, " four", [4], own.slice(0, 1))
    data += formatter.finish(0, "é", [2], own.slice(1), LENGTH, ChoiceUsage(2, 2, 0)) + formatter.stream_end()
    got = [event["meta_info"] for event in events(data)]
    result = ChoiceResult(0, 0, " fouré", [4, 2], own, of_prompt, LENGTH, ChoiceUsage(2, 2, 0))
    whole = json.loads(generate(**fields, **more).make_formatter(told).result([result]))["meta_info"]
    words = WORDS if with_text else [None] * len(WORDS)
    assert whole["output_token_logprobs"] == [[-1.0, 4, words[4]], [-9999.0, 2, words[2]]]
    assert whole["output_top_logprobs"] == [[[-1.0, 4, words[4]]], [[-1.0, 2, words[2]]]]
    assert whole["input_token_logprobs"] == [[-0.25, 1, words[1]]]
    names = [name for name in whole if name.endswith("logprobs")]
    assert len(names) == 6
    for name in names:
        parts = [meta.get(name, []) for meta in got]
        assert (flat(parts) if incremental else parts[-1]) == whole[name]
