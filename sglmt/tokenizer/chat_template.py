"""Chat messages to a prompt: the model's own Jinja template, in a sandbox, with bounds.

Runs in the tokenizer workers; owns one compiled template. A template comes from a model file, so it is untrusted:
it runs in an immutable sandbox (no attribute that reaches Python internals, ranges bounded by the sandbox) and
its output is counted while it is produced. The environment follows the conventions that templates are written for
(block trimming, loop controls, `tojson`, `raise_exception`, `strftime_now`, generation blocks).
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from sglmt.errors import ChatTemplateError

MAX_RENDERED_CHARS = 64 * 1024 * 1024
MAX_RENDER_S = 10.0

Message = dict[str, Any]


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here its content passes through."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class ChatTemplate:
    """One compiled template. `special_tokens` are its variables bos_token, eos_token and the like.

    `max_chars` and `max_seconds` bound a single rendering. Raises ChatTemplateError when it does not compile.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        max_chars: int = MAX_RENDERED_CHARS,
        max_seconds: float = MAX_RENDER_S,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._max_seconds = max_seconds
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`.

        `continue_final_message` ends the prompt inside the last message instead of opening a new one; it excludes
        `add_generation_prompt`. Raises ChatTemplateError with the template's own message, or naming the bound.
        """
        if continue_final_message:
            add_generation_prompt = False
            if not messages:
                raise ChatTemplateError("there is no final message to continue: messages is empty")
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "documents": kwargs.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        prompt = self._run(variables)
        return _cut_after_final_message(prompt, messages[-1]) if continue_final_message else prompt

    def _run(self, variables: dict[str, Any]) -> str:
        try:
            return "".join(self._bounded(self._template.generate(variables)))
        except ChatTemplateError:
            raise
        except jinja2.TemplateError as error:
            raise ChatTemplateError(error.message or type(error).__name__) from error
        except RecursionError as error:
            raise ChatTemplateError("the chat template recurses too deeply") from error
        except Exception as error:  # the template applied an operation to data of the wrong shape
            raise ChatTemplateError(f"the chat template cannot use these messages: {error}") from error

    def _bounded(self, parts: Iterator[str]) -> Iterator[str]:
        total = 0
        deadline = time.monotonic() + self._max_seconds
        for part in parts:
            total += len(part)
            if total > self._max_chars:
                raise ChatTemplateError(f"the chat template's output exceeds {self._max_chars} characters")
            if time.monotonic() > deadline:
                raise ChatTemplateError(f"the chat template took longer than {self._max_seconds:g} seconds")
            yield part


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escaping of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise ChatTemplateError(str(message))


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _cut_after_final_message(prompt: str, message: Message) -> str:
    """The prompt up to the end of the last message's text, which the template may have trimmed."""
    text = _final_text(message)
    for candidate in (text, text.strip()):
        position = prompt.rfind(candidate) if candidate else -1
        if position >= 0:
            return prompt[: position + len(candidate)]
    raise ChatTemplateError(
        "the final message cannot be continued: the chat template does not write its text as given"
    )


def _final_text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        for part in reversed(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                return str(part["text"])
    raise ChatTemplateError("the final message cannot be continued: it has no text")
