"""The environment that chat templates run in: a sandbox that bounds time and memory, with the usual extras.

Used by `chat_template` in the tokenizer workers; owns nothing. A template comes from a model file, so it is
untrusted: Jinja's immutable sandbox keeps it from Python's internals, and two rewrites of the parsed template keep
it from running away: every loop and macro body first calls `Budget.tick`, and every concatenation becomes an
addition, so that all operators that can blow up a value pass `BoundedSandbox.call_binop`.
"""

from __future__ import annotations

import datetime
import json
import re
import time
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.visitor

from sglmt.errors import ChatTemplateError

TICK = "_sglmt_tick"  # the name under which a template finds `Budget.tick`
MAX_CHARS = 64 * 1024 * 1024
_MAX_INT_BITS = 4096
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\*|\d{5,})")


class Budget:
    """What one rendering may spend: characters of output, and seconds of its thread's processor time."""

    def __init__(self, max_chars: int, max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._max_chars = max_chars
        self._chars = 0
        self._deadline = time.thread_time() + max_seconds

    def tick(self) -> None:
        """Raise ChatTemplateError when the time is spent."""
        if time.thread_time() > self._deadline:
            raise ChatTemplateError(f"the chat template took longer than {self._max_seconds:g} seconds")

    def spend(self, chars: int) -> None:
        """Count output. Raises ChatTemplateError when there is too much of it or the time is spent."""
        self._chars += chars
        if self._chars > self._max_chars:
            raise ChatTemplateError(f"the chat template's output exceeds {self._max_chars} characters")
        self.tick()


class BoundedSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, refusing operators that would make a huge value out of small ones."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if _result_size(operator, left, right) > MAX_CHARS:
            raise ChatTemplateError(f"the chat template's operator {operator} would make too large a value")
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` blocks mark assistant text for training; here their content passes through."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Bounding(jinja2.visitor.NodeTransformer):
    """The two rewrites that make a template countable."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        return self._ticking(node)

    def visit_Macro(self, node: jinja2.nodes.Macro) -> jinja2.nodes.Node:
        return self._ticking(node)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        texts = [_as_text(part, node.lineno) for part in node.nodes]
        result: jinja2.nodes.Expr = texts[0]
        for text in texts[1:]:
            result = jinja2.nodes.Add(result, text, lineno=node.lineno)
        return result

    def _ticking(self, node: Any) -> jinja2.nodes.Node:
        self.generic_visit(node)
        name = jinja2.nodes.Name(TICK, "load", lineno=node.lineno)
        call = jinja2.nodes.Call(name, [], [], None, None, lineno=node.lineno)
        node.body.insert(0, jinja2.nodes.ExprStmt(call, lineno=node.lineno))
        return node  # type: ignore[no-any-return]


def compile_template(source: str) -> jinja2.Template:
    """Parse, bound and compile a template. Raises jinja2.TemplateError."""
    environment = BoundedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    parsed = _Bounding().visit(environment.parse(source))
    parsed.set_environment(environment)
    template = environment.from_string(parsed)
    template.globals = dict(template.globals)  # they are read for every rendering, and never change
    return template


def _as_text(node: jinja2.nodes.Node, line: int) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, "string", [], [], None, None, lineno=line)


def _result_size(operator: str, left: Any, right: Any) -> int:
    """Characters, items or (for numbers, scaled) bits that the operator's result would have at most."""
    if operator == "+":
        return len(left) + len(right) if isinstance(left, str) and isinstance(right, str) else 0
    if operator == "%":
        return MAX_CHARS + 1 if isinstance(left, str) and _WIDE_FORMAT.search(left) else 0
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        return bits * (MAX_CHARS // _MAX_INT_BITS)
    if isinstance(right, int) and isinstance(left, str | list | tuple):
        return len(left) * max(right, 0)
    if isinstance(left, int) and isinstance(right, str | list | tuple):
        return len(right) * max(left, 0)
    return 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escaping of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise ChatTemplateError(str(message))


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
