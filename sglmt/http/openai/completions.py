"""`POST /v1/completions`: the body to a checked request. Pure; runs in the tokenizer workers."""

from __future__ import annotations

from typing import Any

from sglmt.http import checks
from sglmt.http.errors import ApiError, bad_field
from sglmt.http.generation import GenerationRequest, PromptItem
from sglmt.http.json_body import BodyDecoder
from sglmt.http.limits import ModelLimits
from sglmt.http.openai.completion_format import CompletionFormatter
from sglmt.http.openai.fields import (
    OpenAIFields,
    check_model,
    check_unsupported,
    openai_sampling,
    priority_of,
    timeout_of,
    top_logprobs_of,
)
from sglmt.http.sampling_fields import new_token_limit
from sglmt.messages.sampling import LogprobSpec

DEFAULT_MAX_TOKENS = 16  # the API's own


class CompletionBody(OpenAIFields, kw_only=True):
    """The fields that count; others are ignored."""

    prompt: str | list[Any] | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


_BODY = BodyDecoder(CompletionBody)


def parse_completion(body: bytes, limits: ModelLimits) -> GenerationRequest:
    """The request of a body. Raises ApiError naming the field that cannot be used."""
    fields = _BODY.decode(body)
    check_model(fields.model, limits)
    check_unsupported(fields)
    if fields.suffix:
        message = "suffix: text can only be continued, not filled in; leave it out"
        raise ApiError(400, message, "suffix", "unsupported_parameter")
    rows, is_batch = checks.prompt_rows(fields.prompt, limits, "prompt")
    n = checks.choices(fields.n, len(rows), limits.max_prompts_per_request)
    rids = checks.request_ids(fields.rid, len(rows), n)
    echo = fields.echo or False
    max_tokens = new_token_limit(fields.max_tokens, "max_tokens", 0)
    if max_tokens == 0 and not echo:
        raise bad_field("max_tokens", "must be at least 1, or 0 with echo")
    sampling, text = openai_sampling(fields, limits, max_tokens)
    options = fields.stream_options
    return GenerationRequest(
        api="completion",
        prompts=[PromptItem(row[0], row[1], rid) for row, rid in zip(rows, rids, strict=True)],
        n=n,
        stream=fields.stream or False,
        sampling=sampling,
        text=text,
        max_new_tokens=max_tokens,
        default_max_new_tokens=DEFAULT_MAX_TOKENS,
        formatter_type=CompletionFormatter,
        logprobs=None if fields.logprobs is None else _logprobs(fields.logprobs, echo, limits),
        echo=echo,
        priority=priority_of(fields.priority),
        timeout_s=timeout_of(fields.timeout_s),
        add_special_tokens=fields.add_special_tokens is not False,
        is_batch=is_batch,
        include_usage=options is not None and options.include_usage is True,
        model=fields.model,
    )


def _logprobs(count: int, echo: bool, limits: ModelLimits) -> LogprobSpec:
    """`logprobs: 0` means the chosen tokens' only; with echo the prompt's too."""
    top = top_logprobs_of(count, "logprobs", limits)
    if echo:
        limits.require("prompt_logprobs", "logprobs with echo")
    return LogprobSpec(top_logprobs_num=top, prompt_from=0 if echo else None)
