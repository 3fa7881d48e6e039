"""Answers taken apart: calls in every format, reasoning, and what looks like either; however the text was cut."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglmt.http.output.message import Message, MessageParser, OutputPlan, whole_message
from sglmt.http.output.pieces import CallArguments, CallBroken, Piece, Reasoning, Text, merged
from sglmt.http.output.rules import OutputRules, calls_of, output_rules, reasoning_of

OFFERED = frozenset({"f", "g"})


def pieces(
    text: Iterable[str],
    calls: str | None = None,
    reasoning: str | None = None,
    prompt: str = "",
    separate: bool = True,
    max_calls: int | None = None,
) -> list[Piece]:
    plan = OutputPlan(OutputRules(calls, reasoning), OFFERED, max_calls, separate)
    parser = MessageParser(plan, prompt)
    return merged([piece for part in text for piece in parser.feed(part)] + parser.close())


def whole(text: str, calls: str | None = None, **more: object) -> tuple[str, str, list[tuple[str, str]]]:
    """(content, reasoning, calls)"""
    message: Message = whole_message(pieces([text], calls, **more))  # type: ignore[arg-type]
    return message.content, message.reasoning, [(call.name, call.arguments) for call in message.calls]


A = '{"name": "f", "arguments": {"a": 1}}'
B = '{"name": "g", "arguments": {"b": [1, {"c": "}"}]}}'

CALLS = [
    ("hermes", f"<tool_call>\n{A}\n</tool_call>", "", [("f", '{"a": 1}')]),
    ("qwen", f"<tool_call>{A}</tool_call>", "", [("f", '{"a": 1}')]),
    (
        "hermes",
        f"Let me see.\n<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{B}\n</tool_call>\n",
        "Let me see.",
        [("f", '{"a": 1}'), ("g", '{"b": [1, {"c": "}"}]}')],
    ),
    ("hermes", f"a <tool_call>{A}</tool_call> b", "a b", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", f"<tool_call>{A}", "", [("f", '{"a": 1}')]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
        "",
        [("f", '{"a": "</tool_call>"}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny\t\x01\\n"}}</tool_call>',
        "",
        [("f", '{"a": "x\\ny\\t\\u0001\\n"}')],
    ),
    ("hermes", '<tool_call>{"name": "not offered", "arguments": {}}</tool_call>', "", [("not offered", "{}")]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"type": "function", "name": "g", "parameters": {}}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("llama3_json", '<|python_tag|>{"name": "other", "parameters": {}}', "", [("other", "{}")]),
    ("mistral", f"[TOOL_CALLS] [{A}, {B}]", "", [("f", '{"a": 1}'), ("g", '{"b": [1, {"c": "}"}]}')]),
    ("mistral", f"Well. [TOOL_CALLS][{A}", "Well.", [("f", '{"a": 1}')]),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
]

NO_CALLS = [
    ("hermes", "plain text < with <tool things \n "),
    ("hermes", "<tool_call>{bad}</tool_call> x"),
    ("hermes", "<tool_call>I would call f</tool_call>"),
    ("hermes", '<tool_call>{"name": 5}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call> and on'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call> and on'),
    ("hermes", 'so <tool_call>{"name": "f", "arguments": {"a": "cut of'),
    ("hermes", '<tool_call>{"name": "f", "argum'),
    ("hermes", "<tool_ca"),
    ("llama3_json", '{"answer": 42} is it'),
    ("llama3_json", '{"name": "Joe", "parameters": {}}'),
    ("llama3_json", 'Call {"name": "f", "parameters": {}}'),
    ("llama3_json", '<|python_tag|>brave.call(query="x")'),
    ("llama3_json", '{"name": "f", "parameters": {"a": '),
    ("llama3_json", " \n"),
    ("mistral", "[TOOL_CALLS]what is this"),
    ("mistral", "[TOOL_CALLS] [nothing]"),
    ("mistral", "[TOOL"),
    (None, f"<tool_call>{A}</tool_call>"),
]


@pytest.mark.parametrize(("calls", "text", "content", "expected"), CALLS)
def test_calls(calls: str, text: str, content: str, expected: list[tuple[str, str]]) -> None:
    assert whole(text, calls) == (content, "", expected)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in expected)


@pytest.mark.parametrize(("calls", "text"), NO_CALLS)
def test_what_is_no_call_stays_text_to_the_last_character(calls: str | None, text: str) -> None:
    assert whole(text, calls) == (text, "", [])


def test_a_bad_call_costs_itself_only() -> None:
    bad = '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'
    good = f"<tool_call>{A}</tool_call>"
    assert whole(bad + good, "hermes") == (bad, "", [("f", '{"a": 1}')])
    assert whole(good + bad, "hermes") == (bad, "", [("f", '{"a": 1}')])


def test_a_stream_sends_arguments_while_they_are_written_and_all_of_a_call_that_breaks() -> None:
    parser = MessageParser(OutputPlan(OutputRules("hermes"), OFFERED), "")
    seen = [parser.feed(part) for part in ('<tool_call>{"name": "f", "argu', 'ments": {"a": ', '"x', "yz")]
    assert [[type(piece).__name__ for piece in each] for each in seen] == [
        [],
        ["CallStart", "CallArguments"],
        ["CallArguments"],
        ["CallArguments"],
    ]
    rest = parser.close()
    assert rest == [CallBroken('<tool_call>{"name": "f", "arguments": {"a": "xyz')]
    broken = pieces(['<tool_call>{"name": "f", "arguments": {"a": oops} ]</tool_call>'], "hermes")
    assert CallArguments('{"a": oops} ]') in broken


def test_only_as_many_calls_as_wanted() -> None:
    text = f"<tool_call>{A}</tool_call><tool_call>{B}</tool_call>"
    assert whole(text, "hermes", max_calls=1) == (f"<tool_call>{B}</tool_call>", "", [("f", '{"a": 1}')])


REASONING = [
    ("qwen3", "", "<think>\nhm\n\n</think>\n\nyes", "hm", "yes"),
    ("qwen3", "<|assistant|>\n<think>\n", "hm\n</think>\n\nyes", "hm", "yes"),
    ("qwen3", "<think>\n\n</think>\n\n", "yes", "", "yes"),
    ("qwen3", "", "<think>\n\n</think>\n\nyes", "", "yes"),
    ("qwen3", "", "no <think>x</think>", "", "no <think>x</think>"),
    ("qwen3", "", "<thi", "", "<thi"),
    ("qwen3", "", "  ", "", "  "),
    ("qwen3", "", "<think>a </th b</think> c <think>d</think>", "a </th b", "c <think>d</think>"),
    ("deepseek-r1", "", "hm</think>ok", "hm", "ok"),
    ("deepseek-r1", "", "<think>\nhm</think>\n\nok", "hm", "ok"),
    ("deepseek-r1", "<think>\n", "<think> hm <b> </thin", "hm <b> </thin", ""),
    ("deepseek-r1", "<think>\n\n</think>\n\n", "ok", "", "ok"),
    (None, "<think>", "hm</think>ok", "", "hm</think>ok"),
]


@pytest.mark.parametrize(("style", "prompt", "text", "reasoning", "content"), REASONING)
def test_reasoning(style: str | None, prompt: str, text: str, reasoning: str, content: str) -> None:
    assert whole(text, reasoning=style, prompt=prompt) == (content, reasoning, [])
    kept = pieces([text], reasoning=style, prompt=prompt, separate=False)
    assert "".join(piece.text for piece in kept if isinstance(piece, Text | Reasoning)) == text


@pytest.mark.parametrize(
    ("style", "continued", "text", "reasoning", "content"),
    [
        ("qwen3", "<think>so", " far</think>\nyes", " far", "yes"),
        ("qwen3", "<think>so</think>far", " yes <think>", "", " yes <think>"),
        ("qwen3", "so far", "<think>", "", "<think>"),
        ("deepseek-r1", "so", " far</think>yes", " far", "yes"),
        ("deepseek-r1", "so</think>far", " yes", "", " yes"),
        ("qwen3", "", "<think>a</think>b", "a", "b"),
    ],
)
def test_continuing_a_message(style: str, continued: str, text: str, reasoning: str, content: str) -> None:
    parser = MessageParser(OutputPlan(OutputRules(None, style), continued=continued), f"prompt {continued}")
    message = whole_message(parser.feed(text) + parser.close())
    assert (message.reasoning, message.content) == (reasoning, content)


def test_calls_follow_reasoning_and_what_is_only_thought_of_is_no_call() -> None:
    call = f"<tool_call>{A}</tool_call>"
    text = f"<think>{call}?</think>\n\n{call}"
    assert whole(text, "hermes", reasoning="qwen3") == ("", f"{call}?", [("f", '{"a": 1}')])


SPACE = " \n" * 200
EVERYTHING = [
    ("hermes", "qwen3", "", f"{SPACE}<think>a</think>b"),
    ("hermes", "deepseek-r1", "", f"a{SPACE}</think>{SPACE}<tool_call>{A}</tool_call>{SPACE}"),
    ("hermes", None, "", f"a{SPACE}<tool_call>{A}</tool_call>{SPACE}b{SPACE}<tool_call>{B}</tool_call>{SPACE}"),
    ("llama3_json", None, "", f"{A}{SPACE};{SPACE}"),
    ("mistral", None, "", f"a{SPACE}[TOOL_CALLS]{SPACE}f[ARGS]{SPACE}{{}}{SPACE}"),
]
EVERYTHING += [(calls, None, "", text) for calls, text, *_ in CALLS]
EVERYTHING += [(calls, None, "", text) for calls, text in NO_CALLS if calls]
EVERYTHING += [("hermes", style, prompt, text) for style, prompt, text, *_ in REASONING if style]
EVERYTHING += [("hermes", "qwen3", "", f"<think> a\n</think>\nb\n<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{B}\n")]


@given(st.data(), st.sampled_from(EVERYTHING), st.booleans())
def test_how_the_text_was_cut_makes_no_difference(
    data: st.DataObject, case: tuple[str, str | None, str, str], separate: bool
) -> None:
    calls, reasoning, prompt, text = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = pieces([text], calls, reasoning, prompt, separate)
    assert pieces(parts, calls, reasoning, prompt, separate) == expected
    assert pieces(text, calls, reasoning, prompt, separate) == expected


@pytest.mark.parametrize("calls", ["hermes", "llama3_json", "mistral"])
@pytest.mark.parametrize(
    "text", [" " * 30000, f"<think>{chr(10) * 30000}", f"<tool_call>{A}</tool_call>" + " " * 30000]
)
def test_a_model_that_writes_white_space_for_ever_is_not_waited_for(calls: str, text: str) -> None:
    plan = OutputPlan(OutputRules(calls, "qwen3"), OFFERED)
    parser = MessageParser(plan, "")
    began_s = time.process_time()
    sent = sum(
        len(piece.text)
        for at in range(0, len(text), 2)
        for piece in parser.feed(text[at : at + 2])
        if isinstance(piece, Text | Reasoning)
    )
    assert time.process_time() - began_s < 3
    if "<think>" not in text and calls != "llama3_json":  # there, white space before a first call is held back
        assert sent > 29000


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", A, B]
SCRAPS = st.sampled_from([*MARKS, '{"name"', '"arguments"', '"f"', *':{}[],;"\\x世', " ", "\n"])


@given(st.lists(SCRAPS, max_size=14), st.sampled_from(["hermes", "llama3_json", "mistral"]), st.booleans())
def test_hostile_text_is_never_lost_and_never_an_error(scraps: list[str], calls: str, thinks: bool) -> None:
    text = "".join(scraps)
    style = "deepseek-r1" if thinks else None
    at_once = whole_message(pieces([text], calls, style, separate=False))
    assert at_once == whole_message(pieces(text, calls, style, separate=False))
    for call in at_once.calls:
        assert isinstance(json.loads(call.arguments), dict)
    if not at_once.calls:
        assert at_once.reasoning + at_once.content == text


def test_auto_reads_the_chat_template() -> None:
    assert calls_of("{{ '<tool_call>' }}{% if '</think>' in content %}") == "hermes"
    assert calls_of("[TOOL_CALLS] {{ x }}") == "mistral"
    assert calls_of("<|python_tag|>") == "llama3_json"
    assert calls_of("<tool_call>\n<function=name>") is None
    assert (reasoning_of("</think>"), reasoning_of("")) == ("qwen3", None)
    ids = {"<tool_call>": 5, "</tool_call>": 6, "</think>": 7}
    rules = output_rules("auto", "auto", "<tool_call></think>", ids.get, lambda token_id: token_id == 5)
    assert (rules.calls, rules.reasoning, rules.reasoning_end_id) == ("hermes", "qwen3", 7)
    assert rules.shown_ids(True, True) == (5,)
    assert rules.shown_ids(False, True) == ()
    off = output_rules("none", "none", "<tool_call></think>", ids.get, lambda _: True)
    assert (off.calls, off.reasoning) == (None, None)
