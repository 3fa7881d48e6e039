"""Fields that completions and chat completions share, and the parts of a request made from them. Pure."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

import msgspec

from sglmt.http import checks
from sglmt.http.errors import ApiError, bad_field, unknown_model
from sglmt.http.limits import ModelLimits
from sglmt.http.sampling_fields import (
    MAX_NEW_TOKENS,
    SamplingFields,
    build_sampling,
    schema_text,
    text_spec,
)
from sglmt.messages.sampling import SamplingParams, TextSpec

MAX_TIMEOUT_S = 86400.0
MAX_PRIORITY = 2**31 - 1
MAX_TOP_LOGPROBS = 20

ANY_OBJECT_SCHEMA = '{"type":"object"}'


class StreamOptions(msgspec.Struct, kw_only=True):
    """`stream_options`; the others of its fields are ignored."""

    include_usage: bool | None = None


class OpenAIFields(SamplingFields, kw_only=True):
    """Body fields of both endpoints. What is refused by name is declared, so that it can be seen."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    response_format: dict[str, Any] | None = None
    rid: str | list[str] | None = None
    priority: int | None = None
    timeout_s: float | None = None
    # refused when they are set, for they would change the answer
    best_of: int | None = None
    use_beam_search: Any = None
    length_penalty: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    structural_tag: Any = None
    truncate_prompt_tokens: Any = None
    logits_processors: Any = None
    prompt_logprobs: Any = None
    lora_path: Any = None
    thinking_token_budget: Any = None
    return_hidden_states: Any = None


def check_model(name: str | None, limits: ModelLimits) -> None:
    """Raise ApiError (404) for a model that is not served; an absent name means the one that is."""
    if name is not None and not limits.accepts(name):
        raise unknown_model(name, limits.model_name)


def refuse(body: msgspec.Struct, fields: dict[str, str], prefix: str = "") -> None:
    """Raise ApiError (400) for the first of these fields that is set; the values say what to do instead."""
    for name, advice in fields.items():
        value = getattr(body, name)
        if value is not None and value is not False and value != [] and value != {}:
            message = f"{prefix}{name}: not supported here; {advice}"
            raise ApiError(400, message, prefix + name, "unsupported_parameter")


UNSUPPORTED = {
    "use_beam_search": "leave it out",
    "length_penalty": "leave it out",
    "guided_json": "use response_format",
    "guided_regex": "use regex",
    "guided_choice": "use regex",
    "guided_grammar": "use ebnf",
    "structured_outputs": "use response_format, regex or ebnf",
    "structural_tag": "use response_format, regex or ebnf",
    "truncate_prompt_tokens": "shorten the prompt before sending it",
    "logits_processors": "use logit_bias",
    "prompt_logprobs": "use echo with logprobs on /v1/completions",
    "lora_path": "leave it out",
    "thinking_token_budget": "leave it out",
    "return_hidden_states": "leave it out",
}
_unsupported = attrgetter(*UNSUPPORTED)
_NONE_UNSUPPORTED = (None,) * len(UNSUPPORTED)


def check_unsupported(body: OpenAIFields) -> None:
    """Refuse what would change the answer and is not served."""
    if _unsupported(body) != _NONE_UNSUPPORTED:
        refuse(body, UNSUPPORTED)
    if body.best_of is not None and body.best_of != (body.n or 1):
        advice = "choosing the best of several answers is not supported; leave it out and use n"
        raise ApiError(400, f"best_of: {advice}", "best_of", "unsupported_parameter")


def openai_sampling(
    body: OpenAIFields, limits: ModelLimits, max_new_tokens: int | None
) -> tuple[SamplingParams, TextSpec]:
    """(engine's, detokenizer's) part of either endpoint's body."""
    schema = None if body.response_format is None else response_schema(body.response_format, limits)
    sampling = build_sampling(
        body,
        limits,
        seed=checks.seed(body.seed, "seed"),
        min_new_tokens=checks.integer(body.min_tokens, "min_tokens", 0, MAX_NEW_TOKENS, 0),
        max_new_tokens=max_new_tokens,
        json_schema=schema,
    )
    return sampling, text_spec(body, no_stop_trim=body.include_stop_str_in_output or False)


def response_schema(value: dict[str, Any], limits: ModelLimits) -> str | None:
    """The JSON schema a `response_format` asks for, None for plain text."""
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        limits.require("json_schema", "response_format")
        return ANY_OBJECT_SCHEMA
    if kind != "json_schema":
        raise bad_field("response_format.type", "text, json_object or json_schema is expected")
    limits.require("json_schema", "response_format")
    wrapper = value.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
    if not isinstance(schema, dict):
        raise bad_field("response_format.json_schema.schema", "a JSON schema (an object) is expected")
    return schema_text(schema, "response_format.json_schema.schema")


def timeout_of(value: float | None) -> float | None:
    """`timeout_s`: seconds until the request is aborted, above 0."""
    if value is None:
        return None
    if not (math.isfinite(value) and 0 < value <= MAX_TIMEOUT_S):
        raise bad_field("timeout_s", f"must be above 0 and at most {MAX_TIMEOUT_S:g} seconds, got {value:g}")
    return float(value)


def priority_of(value: int | None) -> int:
    """`priority`, a signed 32-bit number."""
    return checks.integer(value, "priority", -MAX_PRIORITY, MAX_PRIORITY, 0)


def top_logprobs_of(value: int | None, param: str, limits: ModelLimits) -> int:
    """How many alternatives each token gets; checks that the engine gives them."""
    count = checks.integer(value, param, 0, MAX_TOP_LOGPROBS, 0)
    limits.require("top_logprobs" if count else "chosen_logprobs", param)
    return count
