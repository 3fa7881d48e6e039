"""Chat templates: the same prompt as transformers makes, the template's own errors, and bounds."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from sglmt.errors import ChatTemplateError
from sglmt.tokenizer.chat_template import ChatTemplate
from sglmt.tokenizer.templates import choose_template
from tests.unit.tokenizer.chat_templates import MACRO_STYLE, MISTRAL_STYLE, QWEN_STYLE, SMOLLM_STYLE, STYLES

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "What's <b>2 & 2</b>? ünï 日本 "}
ANSWER = {"role": "assistant", "content": "<think>\nsum\n</think>\n\nFour."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": "é<", "b": [1, None]}}}],
}
RESULT = {"role": "tool", "content": "4"}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds <a> & 'b'", "parameters": {"z": 1, "a": 2}}}
]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief.\n"}, USER],
    [USER, ANSWER, USER],
    [USER, {"role": "assistant", "content": "4", "reasoning": "sum"}],
    [USER, CALL, RESULT, RESULT, {"role": "assistant", "content": "done"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
    [{"role": "user", "content": ""}],
    [],
]
OPTIONS: list[dict[str, Any]] = [
    {"add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"add_generation_prompt": True, "tools": TOOLS},
    {"add_generation_prompt": True, "tools": []},
    {"add_generation_prompt": True, "enable_thinking": False, "date_string": "26 Jul 2024"},
    {"continue_final_message": True, "add_generation_prompt": False},
]

# Runs transformers in a process of its own: it is slow to import and warns of what does not concern us.
_REFERENCE = """
import json, sys
from transformers.utils.chat_template_utils import render_jinja_template
for case in json.load(sys.stdin):
    try:
        text = render_jinja_template([case["messages"]], chat_template=case["template"], **case["options"])[0][0]
    except Exception as error:
        text = None
    print(json.dumps(text))
"""


@pytest.fixture(scope="module")
def cases() -> list[tuple[str, list[dict[str, Any]], dict[str, Any], str | None]]:
    """(style, messages, options, prompt made by transformers or None for an error)."""
    wanted = [(style, messages, options) for style in STYLES for messages in CONVERSATIONS for options in OPTIONS]
    payload = [
        {"template": STYLES[style], "messages": messages, "options": {**SPECIALS, **options}}
        for style, messages, options in wanted
    ]
    done = subprocess.run(
        [sys.executable, "-c", _REFERENCE], input=msgspec.json.encode(payload), capture_output=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    prompts = [msgspec.json.decode(line) for line in done.stdout.splitlines()]
    return [(*case, prompt) for case, prompt in zip(wanted, prompts, strict=True)]


@pytest.mark.parametrize("style", sorted(STYLES))
def test_the_same_prompt_as_transformers(
    cases: list[tuple[str, list[dict[str, Any]], dict[str, Any], str | None]], style: str
) -> None:
    template = ChatTemplate(STYLES[style], SPECIALS)
    compared = 0
    for case_style, messages, options, expected in cases:
        if case_style != style:
            continue
        if expected is None:
            with pytest.raises(ChatTemplateError):
                template.render(messages, **options)
        else:
            assert template.render(messages, **options) == expected, (messages, options)
            compared += 1
    assert compared >= 10


def test_the_template_speaks_for_itself() -> None:
    template = ChatTemplate(MISTRAL_STYLE, SPECIALS)
    with pytest.raises(ChatTemplateError, match=r"^Conversation roles must alternate"):
        template.render([USER, USER])


def test_a_template_with_a_syntax_error() -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_messages_are_not_changed() -> None:
    messages = [USER, {"role": "assistant", "content": [{"type": "text", "text": "Fo"}], "reasoning": "x"}]
    copy = msgspec.json.decode(msgspec.json.encode(messages))
    ChatTemplate(QWEN_STYLE, SPECIALS).render(messages, continue_final_message=True)
    assert messages == copy


def test_an_unfinished_answer_is_continued() -> None:
    template = ChatTemplate(SMOLLM_STYLE, SPECIALS)
    messages = [USER, {"role": "assistant", "content": "Fo "}]
    assert template.render(messages, continue_final_message=True).endswith("<|im_start|>assistant\nFo ")


@pytest.mark.parametrize(
    "messages", [[], [{"role": "assistant"}], [{"role": "assistant", "content": [{"type": "image"}]}]]
)
def test_nothing_to_continue(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(ChatTemplateError, match="continue"):
        ChatTemplate(MACRO_STYLE, {}).render(messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "longer than"),
        ("{% for a in range(9999) %}{{ 'x' * 100 }}{% endfor %}", "exceeds"),
        ("{% set n = namespace(x='aa') %}{% for a in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "too large"),
        ("{% set n = namespace(x='aa') %}{% for a in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", "too large"),
        ("{{ 'a' * 1000000000 }}", "too large"),
        ("{{ 1000000000 * ['a'] }}", "too large"),
        ("{{ 9 ** 99999999 }}", "too large"),
        ("{{ '%99999999d' % 3 }}", "too large"),
        ("{{ range(999999999) }}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ messages[0].a.b }}", "no attribute"),
        ("{{ messages + 1 }}", "cannot use these messages"),
    ],
)
def test_bounds(source: str, complaint: str) -> None:
    template = ChatTemplate(source, {}, max_chars=100_000, max_seconds=0.2 if complaint == "longer than" else 60)
    with pytest.raises(ChatTemplateError, match=complaint):
        template.render([USER])


def test_named_templates_are_chosen_by_whether_there_are_tools() -> None:
    with_tools, without = "\n  {{ tools[0] }} T\n", "\n{{ messages[0].content }} D \n"
    source = choose_template({"default": without, "tool_use": with_tools, "rag": "?"})
    assert source is not None
    for tools, alone in ((TOOLS, with_tools), ([], without), (None, without)):
        assert ChatTemplate(source, {}).render([USER], tools) == ChatTemplate(alone, {}).render([USER], tools)


def test_one_named_template_is_the_one() -> None:
    assert choose_template({"only": "x"}) == "x"
    assert choose_template({"a": "x", "b": "y"}) is None
    assert choose_template({}) is None
