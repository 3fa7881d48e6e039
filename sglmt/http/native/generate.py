"""`POST /generate`: the body to a checked request. Pure; runs in the tokenizer workers.

Prompts of one request share their values: a per-prompt list is taken when its entries are all equal.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglmt.http import checks
from sglmt.http.errors import ApiError, bad_field
from sglmt.http.generation import GenerationRequest, PromptItem
from sglmt.http.json_body import BodyDecoder
from sglmt.http.limits import ModelLimits
from sglmt.http.native.generate_format import GenerateFormatter
from sglmt.http.openai.fields import MAX_TOP_LOGPROBS, priority_of, refuse, timeout_of
from sglmt.http.sampling_fields import (
    MAX_NEW_TOKENS,
    SamplingFields,
    build_sampling,
    new_token_limit,
    text_spec,
)
from sglmt.messages.sampling import LogprobSpec

DEFAULT_MAX_NEW_TOKENS = 128  # the API's own
MAX_REQUESTED_IDS = 1024


class NativeSampling(SamplingFields, kw_only=True):
    """`sampling_params`."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    seed: int | None = None
    # refused when set
    stop_regex: Any = None
    structural_tag: Any = None
    custom_params: Any = None
    beam_width: Any = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """The fields that count; others are ignored."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[Any] | None = None
    return_text_in_logprobs: bool | None = None
    incremental_streaming_output: bool | None = None
    priority: int | None = None
    timeout_s: float | None = None
    # refused when set
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None
    input_embeds: Any = None
    lora_path: Any = None
    session_params: Any = None
    return_hidden_states: Any = None
    custom_logit_processor: Any = None
    bootstrap_host: Any = None


_UNSUPPORTED = {
    "image_data": "only text is served",
    "audio_data": "only text is served",
    "video_data": "only text is served",
    "input_embeds": "send text or input_ids",
    "lora_path": "leave it out",
    "session_params": "leave it out",
    "return_hidden_states": "leave it out",
    "custom_logit_processor": "use logit_bias",
    "bootstrap_host": "prefill and decode are not split here",
}
_UNSUPPORTED_SAMPLING = {
    "stop_regex": "use stop",
    "structural_tag": "use json_schema, regex or ebnf",
    "custom_params": "leave it out",
    "beam_width": "leave it out",
}
_PREFIX = "sampling_params."


_BODY = BodyDecoder(GenerateBody)
_NO_PARAMS = NativeSampling()


def parse_generate(body: bytes, limits: ModelLimits) -> GenerationRequest:
    """The request of a body. Raises ApiError naming the field that cannot be used."""
    fields = _BODY.decode(body)
    refuse(fields, _UNSUPPORTED)
    rows, is_batch = _prompts(fields, limits)
    count = len(rows)
    params = _sampling_params(fields.sampling_params, count)
    n = checks.choices(params.n, count, limits.max_prompts_per_request, _PREFIX + "n")
    rids = checks.request_ids(fields.rid, count, n)
    logprobs = _logprobs(fields, count, limits)
    lowest = 0 if logprobs is not None and logprobs.prompt_from is not None else 1
    max_new = new_token_limit(params.max_new_tokens, _PREFIX + "max_new_tokens", lowest)
    sampling = build_sampling(
        params,
        limits,
        seed=_seed(params),
        min_new_tokens=checks.integer(params.min_new_tokens, _PREFIX + "min_new_tokens", 0, MAX_NEW_TOKENS, 0),
        max_new_tokens=max_new,
        prefix=_PREFIX,
        min_param="min_new_tokens",
    )
    return GenerationRequest(
        api="generate",
        prompts=[PromptItem(row[0], row[1], rid) for row, rid in zip(rows, rids, strict=True)],
        n=n,
        stream=fields.stream or False,
        sampling=sampling,
        text=text_spec(params, _PREFIX),
        max_new_tokens=max_new,
        default_max_new_tokens=DEFAULT_MAX_NEW_TOKENS,
        formatter_type=GenerateFormatter,
        logprobs=logprobs,
        priority=priority_of(fields.priority),
        timeout_s=timeout_of(fields.timeout_s),
        is_batch=is_batch,
        incremental=fields.incremental_streaming_output or False,
        text_in_logprobs=fields.return_text_in_logprobs or False,
    )


def _prompts(fields: GenerateBody, limits: ModelLimits) -> tuple[list[checks.PromptRow], bool]:
    if fields.input_ids is None:
        return checks.prompt_rows(fields.text, limits, "text")
    if fields.text is not None:
        raise bad_field("input_ids", "cannot be combined with text; send one of them")
    if any(isinstance(item, str) for item in fields.input_ids):
        raise bad_field("input_ids", "integer token ids are expected, got a string")
    return checks.prompt_rows(fields.input_ids, limits, "input_ids")


def _sampling_params(value: NativeSampling | list[NativeSampling] | None, prompts: int) -> NativeSampling:
    params: NativeSampling | None = _shared(value, prompts, "sampling_params")
    if params is None:
        return _NO_PARAMS
    refuse(params, _UNSUPPORTED_SAMPLING, _PREFIX)
    return params


def _seed(params: NativeSampling) -> int | None:
    """`sampling_seed`, or `seed`."""
    if params.sampling_seed is not None:
        return checks.seed(params.sampling_seed, _PREFIX + "sampling_seed")
    return checks.seed(params.seed, _PREFIX + "seed")


def _logprobs(fields: GenerateBody, prompts: int, limits: ModelLimits) -> LogprobSpec | None:
    wanted = _shared(fields.return_logprob, prompts, "return_logprob")
    if not wanted:
        return None
    limits.require("chosen_logprobs", "return_logprob")
    top = checks.integer(
        _shared(fields.top_logprobs_num, prompts, "top_logprobs_num"), "top_logprobs_num", 0, MAX_TOP_LOGPROBS, 0
    )
    if top:
        limits.require("top_logprobs", "top_logprobs_num")
    ids = _requested_ids(fields.token_ids_logprob, prompts, limits)
    if ids:
        limits.require("token_ids_logprobs", "token_ids_logprob")
    start = checks.integer(
        _shared(fields.logprob_start_len, prompts, "logprob_start_len"),
        "logprob_start_len",
        -1,
        limits.context_length,
        -1,
    )
    if start >= 0:
        limits.require("prompt_logprobs", "logprob_start_len")
    return LogprobSpec(top_logprobs_num=top, token_ids=ids, prompt_from=None if start < 0 else start)


def _requested_ids(value: list[Any] | None, prompts: int, limits: ModelLimits) -> tuple[int, ...]:
    if not value:
        return ()
    if all(isinstance(item, list) for item in value):
        value = checks.same_for_all(value, prompts, "token_ids_logprob")
    if len(value) > MAX_REQUESTED_IDS:
        raise ApiError(400, f"token_ids_logprob: at most {MAX_REQUESTED_IDS} ids", "token_ids_logprob")
    return tuple(checks.token_ids(value, limits.vocab_size, "token_ids_logprob"))


def _shared(value: Any, prompts: int, param: str) -> Any:
    return checks.same_for_all(value, prompts, param) if isinstance(value, list) else value
