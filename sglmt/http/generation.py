"""A checked generation request, whichever API it came through, and what is decided once its prompt is tokenized.

Runs in the tokenizer workers: made by the parsers, read by the worker that renders, tokenizes and submits it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import msgspec

from sglmt.errors import ChatTemplateError
from sglmt.http.checks import MAX_INT64
from sglmt.http.errors import ApiName, bad_request, context_too_long
from sglmt.http.formatting import FormatContext, Formatter
from sglmt.http.limits import ModelLimits
from sglmt.http.output.message import OutputPlan
from sglmt.messages.sampling import LogprobSpec, SamplingParams, TextSpec

CHARS_PER_PART = 100  # what a message or tool costs beside its text

RequestKind = Literal["completion", "chat", "generate"]


class Template(Protocol):
    """What renders messages: `sglmt.tokenizer.chat_template.ChatTemplate`."""

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt text; raises ChatTemplateError."""
        ...


class PromptItem(msgspec.Struct):
    """One prompt: its text or its token ids (a chat has neither before it is rendered), and the client's id."""

    text: str | None
    input_ids: list[int] | None
    rid: str


class ChatRender(msgspec.Struct):
    """What the chat template needs. `messages` contents are texts; `kwargs` are the template's extra variables."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    kwargs: dict[str, Any] = {}

    @property
    def size(self) -> int:
        """About how many characters there are to render, a few for each message and tool included."""
        contents = sum(len(message.get("content") or "") for message in self.messages)
        return contents + CHARS_PER_PART * (len(self.messages) + len(self.tools or ()))

    def render(self, template: Template) -> str:
        """The prompt. Raises ApiError (400) when the template refuses the messages."""
        try:
            return template.render(
                self.messages,
                self.tools,
                self.add_generation_prompt,
                self.continue_final_message,
                **self.kwargs,
            )
        except ChatTemplateError as error:
            # Only the template's own words and our bounds are for clients; what Python says is not.
            own_words = error.__cause__ is None
            detail = str(error) if own_words else "the chat template cannot use these messages"
            raise bad_request(f"messages: {detail}", "messages") from None


class GenerationRequest(msgspec.Struct, gc=False):
    """Everything but the prompt length is checked.

    `max_new_tokens` is what the request asked for (None: nothing); `sampling.max_new_tokens` is a placeholder until
    `sampling_for` knows the prompt length. Choice numbers are prompt-major: `prompt_index * n + k`.
    """

    api: RequestKind
    prompts: list[PromptItem]
    n: int
    stream: bool
    sampling: SamplingParams
    text: TextSpec
    max_new_tokens: int | None
    default_max_new_tokens: int | None  # None: the rest of the context
    formatter_type: Callable[[GenerationRequest, FormatContext], Formatter]
    logprobs: LogprobSpec | None = None
    echo: bool = False
    priority: int = 0
    timeout_s: float | None = None
    add_special_tokens: bool = True
    chat: ChatRender | None = None
    is_batch: bool = False  # the prompts came as a list: /generate answers with a list
    include_usage: bool = False  # stream_options.include_usage
    incremental: bool = True  # /generate streams only what is new
    text_in_logprobs: bool = True  # /generate return_text_in_logprobs
    model: str | None = None  # as the client wrote it
    output: OutputPlan | None = None  # how the answers of a chat are taken apart, None: they are text

    @property
    def error_api(self) -> ApiName:
        """In which shape errors of this request are written."""
        return "native" if self.api == "generate" else "openai"

    @property
    def num_choices(self) -> int:
        """How many answers the request gets."""
        return len(self.prompts) * self.n

    @property
    def needs_engine(self) -> bool:
        """False when no token is asked for and no log-probability of the prompt: the answer is the prompt."""
        return self.max_new_tokens != 0 or self.logprobs is not None

    def choice_rid(self, choice: int) -> str:
        """The id of one answer: the prompt's, with `_k` when each prompt has several."""
        prompt_index, k = divmod(choice, self.n)
        rid = self.prompts[prompt_index].rid
        return rid if self.n == 1 else f"{rid}_{k}"

    def sampling_for(self, prompt_tokens: int, limits: ModelLimits, k: int = 0) -> SamplingParams:
        """Final parameters of the k-th answer to a prompt of this many tokens; each has a seed of its own.

        Raises ApiError `context_length_exceeded` as `resolve_max_new_tokens` does.
        """
        max_new = resolve_max_new_tokens(self.max_new_tokens, prompt_tokens, limits, self.default_max_new_tokens)
        seed = self.sampling.seed
        if seed is None and max_new == self.sampling.max_new_tokens:
            return self.sampling
        return msgspec.structs.replace(
            self.sampling,
            max_new_tokens=max_new,
            min_new_tokens=min(self.sampling.min_new_tokens, max_new),
            seed=None if seed is None else (seed + k) & MAX_INT64,
        )

    def make_formatter(self, context: FormatContext) -> Formatter:
        """What writes this request's answer."""
        return self.formatter_type(self, context)


def resolve_max_new_tokens(
    requested: int | None, prompt_tokens: int, limits: ModelLimits, default: int | None = None
) -> int:
    """How many tokens may be generated after a prompt of `prompt_tokens`.

    A number the request asked for must fit; `default` (None: all there is room for) is cut to what fits. Raises
    ApiError (400, `context_length_exceeded`) with both numbers.
    """
    context_length = limits.context_length
    room = context_length - prompt_tokens
    if room < 1 and not (requested == 0 and room == 0):
        raise context_too_long(
            context_length, f"the prompt has {prompt_tokens} tokens, which leaves no room for an answer"
        )
    if requested is None:
        return room if default is None else min(default, room)
    if requested > room:
        total = prompt_tokens + requested
        raise context_too_long(
            context_length,
            f"{total} tokens are asked for ({prompt_tokens} in the prompt and {requested} in the answer)",
        )
    return requested
