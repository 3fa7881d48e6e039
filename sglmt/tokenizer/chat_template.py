"""Chat messages to a prompt: the model's own Jinja template, with bounds.

Runs in the tokenizer workers; owns one compiled template. The output is the one that the model was trained with:
the conventions of the environment (`template_sandbox`) are those templates are written for.
"""

from __future__ import annotations

from typing import Any

import jinja2

from sglmt.errors import ChatTemplateError
from sglmt.tokenizer.template_sandbox import MAX_CHARS, TICK, Budget, compile_template

MAX_RENDER_S = 10.0

Message = dict[str, Any]

# Marks the end of the message to continue. The space at its end tells whether the template trims messages.
_HERE = "@@sglmt-continue-here@@ "
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One compiled template. `special_tokens` are its variables bos_token, eos_token and the like.

    `max_chars` and `max_seconds` bound a single rendering. Raises ChatTemplateError when it does not compile.
    """

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        max_chars: int = MAX_CHARS,
        max_seconds: float = MAX_RENDER_S,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._max_seconds = max_seconds
        try:
            self._template = compile_template(source)
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
        """The prompt for `messages`; `kwargs` are further variables of the template.

        `continue_final_message` ends the prompt inside the last message instead of opening a new one, whatever
        `add_generation_prompt` says. Raises ChatTemplateError with the template's own message, or naming the bound.
        """
        messages = [_with_reasoning_names(message) for message in messages]
        if continue_final_message:
            messages = _marked(messages)
        variables = {
            "documents": None,
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        prompt = self._run(variables)
        return _cut_at_mark(prompt) if continue_final_message else prompt

    def _run(self, variables: dict[str, Any]) -> str:
        budget = Budget(self._max_chars, self._max_seconds)
        parts: list[str] = []
        try:
            for part in self._template.generate({**variables, TICK: budget.tick}):
                budget.spend(len(part))
                parts.append(part)
        except ChatTemplateError:
            raise
        except jinja2.TemplateError as error:
            raise ChatTemplateError(error.message or type(error).__name__) from error
        except RecursionError as error:
            raise ChatTemplateError("the chat template recurses too deeply") from error
        except Exception as error:  # the template applied an operation to data of the wrong shape
            raise ChatTemplateError(f"the chat template cannot use these messages: {error}") from error
        return "".join(parts)


def _with_reasoning_names(message: Message) -> Message:
    """A message's reasoning under the two names that templates read it by, whichever the client used."""
    found = next((message[name] for name in _REASONING_NAMES if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _marked(messages: list[Message]) -> list[Message]:
    """The messages, the text of the last one ending in a mark."""
    if not messages:
        raise ChatTemplateError("there is no final message to continue: messages is empty")
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _HERE
    elif isinstance(content, list):
        last["content"] = _marked_parts(content)
    else:
        raise ChatTemplateError("the final message cannot be continued: it has no text")
    return [*messages[:-1], last]


def _marked_parts(parts: list[Any]) -> list[Any]:
    for index in range(len(parts) - 1, -1, -1):
        part = parts[index]
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return [*parts[:index], {**part, "text": part["text"] + _HERE}, *parts[index + 1 :]]
    raise ChatTemplateError("the final message cannot be continued: it has no text")


def _cut_at_mark(prompt: str) -> str:
    position = prompt.rfind(_HERE.rstrip(" "))
    if position < 0:
        raise ChatTemplateError(
            "the final message cannot be continued: the chat template does not write its text as given"
        )
    kept = prompt[:position]
    return kept if prompt.startswith(_HERE, position) else kept.rstrip()
