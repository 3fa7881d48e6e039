"""The sampling fields all generation endpoints share, and their check against ranges and engine. Pure.

Runs in the tokenizer workers. `SamplingFields` is the base of each endpoint's body struct (or of its
`sampling_params`); `build_sampling` makes the engine's `SamplingParams` of it, `text_spec` the detokenizer's part.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import msgspec

from sglmt.http import checks
from sglmt.http.checks import integer, number
from sglmt.http.errors import bad_field, shown
from sglmt.http.json_body import check_depth
from sglmt.http.limits import ModelLimits
from sglmt.messages.sampling import SamplingParams, TextSpec

MAX_PATTERN_CHARS = 1 << 20
LOWEST_TEMPERATURE = 1e-5  # below it, dividing by the temperature overflows: the most likely token is taken
MAX_NEW_TOKENS = 2**31 - 1


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that mean the same in every API; null is absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Any] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    n: int | None = None


def build_sampling(
    fields: SamplingFields,
    limits: ModelLimits,
    *,
    seed: int | None,
    min_new_tokens: int,
    max_new_tokens: int | None,
    prefix: str = "",
    min_param: str = "min_tokens",
    json_schema: str | None = None,
) -> SamplingParams:
    """The engine's parameters. `seed` and `min_new_tokens` (field `min_param`) are checked already.

    `prefix` goes before field names in errors.

    Raises ApiError for a value out of range or a feature the engine refuses.
    """
    defaults = limits.sampling_defaults
    if _asked(fields) == _NOTHING_ASKED and seed is None and json_schema is None and not min_new_tokens:
        temperature, top_p = _without_extremes(defaults.temperature, defaults.top_p)
        return SamplingParams(  # nothing to check: the engine can honour its model's defaults
            max_new_tokens=max_new_tokens or 0,
            temperature=temperature,
            top_p=top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
            ignore_eos=fields.ignore_eos or False,
        )
    temperature, top_p = _without_extremes(
        number(fields.temperature, prefix + "temperature", 0.0, 100.0, defaults.temperature),
        number(fields.top_p, prefix + "top_p", 0.0, 1.0, defaults.top_p),
    )
    schema, regex, ebnf = _constraint(fields, json_schema, prefix)
    if max_new_tokens is not None and min_new_tokens > max_new_tokens:
        problem = f"{min_new_tokens} is more than the {max_new_tokens} that may be generated"
        raise bad_field(prefix + min_param, problem)
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens or 0,
        min_new_tokens=min_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=_top_k(fields.top_k, limits, prefix),
        min_p=number(fields.min_p, prefix + "min_p", 0.0, 1.0, defaults.min_p),
        frequency_penalty=number(fields.frequency_penalty, prefix + "frequency_penalty", -2.0, 2.0, 0.0),
        presence_penalty=number(fields.presence_penalty, prefix + "presence_penalty", -2.0, 2.0, 0.0),
        repetition_penalty=number(
            fields.repetition_penalty, prefix + "repetition_penalty", 0.01, 10.0, defaults.repetition_penalty
        ),
        seed=seed,
        ignore_eos=fields.ignore_eos or False,
        stop_token_ids=checks.stop_token_ids(fields.stop_token_ids, limits.vocab_size, prefix + "stop_token_ids"),
        logit_bias=checks.logit_bias(fields.logit_bias, limits.vocab_size, prefix + "logit_bias"),
        json_schema=schema,
        regex=regex,
        ebnf=ebnf,
    )
    _check_engine(sampling, limits, prefix, min_param)
    return sampling


def text_spec(fields: SamplingFields, prefix: str = "", no_stop_trim: bool = False) -> TextSpec:
    """The detokenizer's part."""
    if (
        fields.stop is None
        and fields.skip_special_tokens is None
        and fields.spaces_between_special_tokens is None
        and not (fields.no_stop_trim or no_stop_trim)
    ):
        return _PLAIN_TEXT
    return TextSpec(
        stop=checks.stop_strings(fields.stop, prefix + "stop"),
        no_stop_trim=fields.no_stop_trim or no_stop_trim,
        skip_special_tokens=fields.skip_special_tokens is not False,
        spaces_between_special_tokens=fields.spaces_between_special_tokens is not False,
    )


def new_token_limit(value: int | None, param: str, lowest: int) -> int | None:
    """A field that bounds the output, None when absent."""
    return None if value is None else integer(value, param, lowest, MAX_NEW_TOKENS, 0)


_PLAIN_TEXT = TextSpec()

_ASKED_BY = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias", "stop_token_ids", "json_schema", "regex", "ebnf",
)  # fmt: skip
_asked = attrgetter(*_ASKED_BY)
_NOTHING_ASKED = (None,) * len(_ASKED_BY)


def _without_extremes(temperature: float, top_p: float) -> tuple[float, float]:
    """The same, or what takes the most likely token: an empty nucleus still holds that one."""
    return (0.0, 1.0) if temperature < LOWEST_TEMPERATURE or top_p == 0.0 else (temperature, top_p)


def _top_k(value: int | None, limits: ModelLimits, prefix: str) -> int:
    """-1 (off) for -1, 0 and whatever covers the vocabulary."""
    if value is None:
        return limits.sampling_defaults.top_k
    if value < -1:
        raise bad_field(prefix + "top_k", f"must be -1 (off) or more, got {shown(value)}")
    return value if 0 < value < limits.vocab_size else -1


def _constraint(
    fields: SamplingFields, json_schema: str | None, prefix: str
) -> tuple[str | None, str | None, str | None]:
    """(json_schema, regex, ebnf): at most one is there."""
    if fields.json_schema is not None:
        if json_schema is not None:
            raise bad_field(prefix + "json_schema", "cannot be combined with response_format")
        json_schema = schema_text(fields.json_schema, prefix + "json_schema")
    given = [
        name
        for name, value in (("json_schema", json_schema), ("regex", fields.regex), ("ebnf", fields.ebnf))
        if value is not None
    ]
    if len(given) > 1:
        raise bad_field(prefix + given[1], f"cannot be combined with {given[0]}")
    for name in ("regex", "ebnf"):
        value = getattr(fields, name)
        if value is not None and not 0 < len(value) <= MAX_PATTERN_CHARS:
            raise bad_field(prefix + name, f"1 to {MAX_PATTERN_CHARS} characters are expected")
    return json_schema, fields.regex, fields.ebnf


def schema_text(schema: str | dict[str, Any], param: str) -> str:
    """A JSON schema as compact JSON text. Raises ApiError when it is no JSON object."""
    value: Any = schema
    if isinstance(schema, str):
        try:
            value = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError):
            raise bad_field(param, "is not valid JSON") from None
    if not isinstance(value, dict):
        raise bad_field(param, "a JSON schema is an object")
    check_depth(value, param)
    return msgspec.json.encode(value).decode("utf-8")


def _check_engine(sampling: SamplingParams, limits: ModelLimits, prefix: str, min_param: str) -> None:
    for feature, param, asked in (
        ("temperature", "temperature", sampling.temperature not in (0.0, 1.0)),
        ("top_p", "top_p", sampling.top_p != 1.0),
        ("top_k", "top_k", sampling.top_k > 0),
        ("min_p", "min_p", sampling.min_p > 0.0),
        ("penalties", "frequency_penalty", sampling.frequency_penalty != 0.0),
        ("penalties", "presence_penalty", sampling.presence_penalty != 0.0),
        ("penalties", "repetition_penalty", sampling.repetition_penalty != 1.0),
        ("seed", "seed", sampling.seed is not None),
        ("min_new_tokens", min_param, sampling.min_new_tokens > 0),
        ("stop_token_ids", "stop_token_ids", bool(sampling.stop_token_ids)),
        ("logit_bias", "logit_bias", sampling.logit_bias is not None),
        ("json_schema", "json_schema", sampling.json_schema is not None),
        ("regex", "regex", sampling.regex is not None),
        ("ebnf", "ebnf", sampling.ebnf is not None),
    ):
        if asked:
            limits.require(feature, prefix + param)
