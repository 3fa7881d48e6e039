"""`POST /v1/chat/completions`: the body to a checked request. Pure; runs in the tokenizer workers.

The prompt is not made here: `request.chat` holds what the worker's chat template renders.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglmt.http import checks
from sglmt.http.errors import bad_field
from sglmt.http.generation import ChatRender, GenerationRequest, PromptItem
from sglmt.http.json_body import BodyDecoder, check_depth
from sglmt.http.limits import ModelLimits
from sglmt.http.openai.chat_format import ChatFormatter
from sglmt.http.openai.fields import (
    OpenAIFields,
    check_model,
    check_unsupported,
    openai_sampling,
    priority_of,
    refuse,
    timeout_of,
    top_logprobs_of,
)
from sglmt.http.openai.messages import check_messages, offered_tools, tool_names
from sglmt.http.openai.parsed_chat_format import ParsedChatFormatter
from sglmt.http.output.message import OutputPlan
from sglmt.http.sampling_fields import new_token_limit
from sglmt.messages.sampling import LogprobSpec

RESERVED_TEMPLATE_NAMES = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})


class ChatBody(OpenAIFields, kw_only=True):
    """The fields that count; others are ignored."""

    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    modalities: list[str] | None = None
    # refused when set
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    echo: bool | None = None


_BODY = BodyDecoder(ChatBody)
_UNSUPPORTED_IN_CHAT = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "only text is served",
    "web_search_options": "leave it out",
    "chat_template": "the server's own template is used; leave it out",
    "echo": "leave it out",
}


def parse_chat(body: bytes, limits: ModelLimits) -> GenerationRequest:
    """The request of a body. Raises ApiError naming the field that cannot be used."""
    fields = _BODY.decode(body)
    check_model(fields.model, limits)
    check_unsupported(fields)
    refuse(fields, _UNSUPPORTED_IN_CHAT)
    if fields.modalities is not None and fields.modalities != ["text"]:
        raise bad_field("modalities", "only text is served", "unsupported_parameter")
    chat = _chat_render(fields, limits)
    n = checks.choices(fields.n, 1, limits.max_prompts_per_request)
    rids = checks.request_ids(fields.rid, 1, n)
    max_tokens = _max_tokens(fields)
    sampling, text = openai_sampling(fields, limits, max_tokens)
    output = _output_plan(fields, chat, limits)
    if output is not None:
        shown = limits.output.shown_ids(output.tools is not None, limits.output.reasoning is not None)
        text = msgspec.structs.replace(text, shown_ids=shown)
    options = fields.stream_options
    return GenerationRequest(
        api="chat",
        prompts=[PromptItem(None, None, rids[0])],
        n=n,
        stream=fields.stream or False,
        sampling=sampling,
        text=text,
        max_new_tokens=max_tokens,
        default_max_new_tokens=None,
        formatter_type=ChatFormatter if output is None else ParsedChatFormatter,
        logprobs=_logprobs(fields, limits),
        priority=priority_of(fields.priority),
        timeout_s=timeout_of(fields.timeout_s),
        add_special_tokens=fields.add_special_tokens or False,
        chat=chat,
        include_usage=options is not None and options.include_usage is True,
        model=fields.model,
        output=output,
    )


def _output_plan(fields: ChatBody, chat: ChatRender, limits: ModelLimits) -> OutputPlan | None:
    """How the answer is taken apart; None when all of it is text."""
    names = None if chat.tools is None or limits.output.calls is None else tool_names(chat.tools)
    if names is None and limits.output.reasoning is None:
        return None
    return OutputPlan(
        rules=limits.output,
        tools=names,
        max_calls=1 if fields.parallel_tool_calls is False else None,
        separate_reasoning=fields.separate_reasoning is not False,
        continued=chat.messages[-1]["content"] if chat.continue_final_message else None,
    )


def _max_tokens(fields: ChatBody) -> int | None:
    """`max_completion_tokens` is the newer name and wins over `max_tokens`; both are checked."""
    newer = new_token_limit(fields.max_completion_tokens, "max_completion_tokens", 1)
    older = new_token_limit(fields.max_tokens, "max_tokens", 1)
    return older if newer is None else newer


def _logprobs(fields: ChatBody, limits: ModelLimits) -> LogprobSpec | None:
    if not fields.logprobs:
        if fields.top_logprobs:
            raise bad_field("top_logprobs", "needs logprobs to be true")
        return None
    if fields.top_logprobs:
        return LogprobSpec(top_logprobs_num=top_logprobs_of(fields.top_logprobs, "top_logprobs", limits))
    limits.require("chosen_logprobs", "logprobs")
    return LogprobSpec()


def _chat_render(fields: ChatBody, limits: ModelLimits) -> ChatRender:
    messages = check_messages(fields.messages)
    continued = fields.continue_final_message or False
    if continued and fields.add_generation_prompt:
        raise bad_field("continue_final_message", "cannot be combined with add_generation_prompt")
    kwargs = template_kwargs(fields.chat_template_kwargs)
    if fields.documents is not None:
        check_depth(fields.documents, "documents")
        kwargs["documents"] = fields.documents
    if fields.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", fields.reasoning_effort)
    return ChatRender(
        messages=messages,
        tools=offered_tools(fields.tools, fields.tool_choice, limits),
        add_generation_prompt=not continued and fields.add_generation_prompt is not False,
        continue_final_message=continued,
        kwargs=kwargs,
    )


def template_kwargs(value: dict[str, Any] | None) -> dict[str, Any]:
    """Extra variables of the chat template; those it gets from the request cannot be replaced."""
    if not value:
        return {}
    for name in value:
        if name in RESERVED_TEMPLATE_NAMES:
            raise bad_field(f"chat_template_kwargs.{name}", "is set by the request itself; leave it out")
    check_depth(value, "chat_template_kwargs")
    return dict(value)
