"""Checks of single values of a request: numbers, token ids, stop strings, request ids, prompts. Pure.

Runs in the tokenizer workers. Types were checked by the decoder; here are the ranges. Each function returns the
value in its final form or raises ApiError (400) naming the field it was given.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from sglmt.http.errors import bad_field, context_too_long, shown
from sglmt.http.limits import ModelLimits

MAX_RID_BYTES = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 4096
MAX_INT64 = 2**63 - 1

_DECIMAL = re.compile(r"-?[0-9]{1,12}", re.ASCII)

_ROW_TYPES = frozenset((str, list))

PromptRow = tuple[str | None, list[int] | None]  # (text, ids): exactly one of them is there


def number(value: float | None, param: str, low: float, high: float, default: float) -> float:
    """A finite number in [low, high], `default` when absent."""
    if value is None:
        return default
    if low <= value <= high:
        return float(value)
    raise bad_field(param, f"must be between {low:g} and {high:g}, got {value:g}")


def integer(value: int | None, param: str, low: int, high: int, default: int) -> int:
    """An integer in [low, high], `default` when absent."""
    if value is None:
        return default
    if low <= value <= high:
        return value
    raise bad_field(param, f"must be between {low} and {high}, got {shown(value)}")


def seed(value: int | None, param: str) -> int | None:
    """A signed 64-bit seed, as a number in [0, 2^63): the sign bit is dropped."""
    if value is None:
        return None
    if -MAX_INT64 - 1 <= value <= MAX_INT64:
        return value & MAX_INT64
    raise bad_field(param, f"must fit in 64 bits, got {shown(value)}")


def choices(n: int | None, prompts: int, limit: int, param: str = "n") -> int:
    """How many answers each prompt gets. Bounds n x prompts by `limit`."""
    if n is None:
        n = 1
    if n < 1:
        raise bad_field(param, f"must be at least 1, got {shown(n)}")
    if n * prompts > limit:
        asked = f"{shown(n)} x {prompts} prompts" if prompts > 1 else shown(n)
        raise bad_field(param, f"at most {limit} answers may be asked for in one request, got {asked}")
    return n


def token_ids(value: list[Any], vocab_size: int, param: str) -> list[int]:
    """A list of token ids, all integers in [0, vocab_size). May be empty."""
    if not value:
        return value
    if set(map(type, value)) == {int} and min(value) >= 0 and max(value) < vocab_size:
        return value
    for index, item in enumerate(value):
        if type(item) is not int:
            raise bad_field(f"{param}[{index}]", f"an integer token id is expected, got {_kind(item)}")
        if not 0 <= item < vocab_size:
            raise bad_field(
                f"{param}[{index}]",
                f"token id {shown(item)} is outside the vocabulary (0 to {vocab_size - 1})",
            )
    return value


def prompt_rows(value: str | list[Any] | None, limits: ModelLimits, param: str) -> tuple[list[PromptRow], bool]:
    """(rows, whether a batch was asked for) of a text, a list of ids, or a list of either.

    Nothing may be empty: not the list, not a text, not a row of ids.
    """
    if value is None:
        raise bad_field(param, "this field is required")
    if isinstance(value, str):
        return [(_text(value, param), None)], False
    if not value:
        raise bad_field(param, "must not be empty")
    if _ROW_TYPES.isdisjoint(map(type, value)):
        return [(None, _ids(value, limits, param))], False
    return [prompt_row(item, limits, f"{param}[{index}]") for index, item in enumerate(value)], True


def prompt_row(item: Any, limits: ModelLimits, param: str) -> PromptRow:
    """One row of a batch: a text or a list of ids, not empty."""
    if isinstance(item, str):
        return _text(item, param), None
    if not isinstance(item, list):
        raise bad_field(param, f"a string or a list of token ids is expected, got {_kind(item)}")
    return None, _ids(item, limits, param)


def _ids(ids: list[Any], limits: ModelLimits, param: str) -> list[int]:
    """A prompt's ids; one that is too long anyway is not looked through."""
    if not ids:
        raise bad_field(param, "must not be empty")
    if len(ids) > limits.context_length:
        raise context_too_long(limits.context_length, f"{param} has {len(ids)} tokens")
    return token_ids(ids, limits.vocab_size, param)


def _text(text: str, param: str) -> str:
    if not text:
        raise bad_field(param, "must not be empty")
    return text


def stop_strings(value: str | list[str] | None, param: str) -> tuple[str, ...]:
    """Stop strings: one or several, none of them empty."""
    if value is None:
        return ()
    stops = (value,) if isinstance(value, str) else tuple(value)
    if len(stops) > MAX_STOPS:
        raise bad_field(param, f"at most {MAX_STOPS} stop strings, got {len(stops)}")
    for stop in stops:
        if not stop:
            raise bad_field(param, "a stop string must not be empty")
        if len(stop) > MAX_STOP_CHARS:
            raise bad_field(param, f"a stop string has at most {MAX_STOP_CHARS} characters, got {len(stop)}")
    return stops


def stop_token_ids(value: list[Any] | None, vocab_size: int, param: str) -> tuple[int, ...]:
    """Token ids that end the output."""
    if not value:
        return ()
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise bad_field(param, f"at most {MAX_STOP_TOKEN_IDS} ids, got {len(value)}")
    return tuple(token_ids(value, vocab_size, param))


def logit_bias(value: dict[str, float] | None, vocab_size: int, param: str) -> dict[int, float] | None:
    """Token id → bias in [-100, 100]; ids come as JSON names."""
    if not value:
        return None
    if len(value) > MAX_LOGIT_BIAS:
        raise bad_field(param, f"at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
    biases = {}
    for name, bias in value.items():
        token_id = int(name) if _DECIMAL.fullmatch(name) else -1
        if not 0 <= token_id < vocab_size:
            raise bad_field(param, f"{shown(name)} is no token id (0 to {vocab_size - 1})")
        biases[token_id] = number(bias, f"{param}.{token_id}", -100.0, 100.0, 0.0)
    return biases


def request_ids(value: str | list[str] | None, prompts: int, n: int, param: str = "rid") -> list[str]:
    """One request id a prompt. One id for several prompts gets `_0`, `_1` …; absent ones are made at random.

    With the suffix that several answers add (see GenerationRequest.choice_rid) an id has at most 128 bytes.
    """
    if value is None:
        return [os.urandom(16).hex() for _ in range(prompts)]
    if not value:
        raise bad_field(param, "must not be empty")
    if isinstance(value, str):
        rids = [value] if prompts == 1 else [f"{value}_{index}" for index in range(prompts)]
    else:
        rids = value
    if len(rids) != prompts:
        raise bad_field(param, f"{prompts} ids are expected, one a prompt, got {len(rids)}")
    suffix_bytes = len(f"_{n - 1}") if n > 1 else 0
    for rid in rids:
        _check_rid(rid, suffix_bytes, param)
    if len(set(rids)) != len(rids):
        raise bad_field(param, "the ids of one request must differ", "duplicate_rid")
    return rids


def _check_rid(rid: str, suffix_bytes: int, param: str) -> None:
    if not rid:
        raise bad_field(param, "must not be empty")
    size = len(rid.encode("utf-8")) + suffix_bytes
    if size > MAX_RID_BYTES:
        raise bad_field(param, f"at most {MAX_RID_BYTES} bytes with the suffix of each answer, got {size}")
    if not rid.isprintable():
        raise bad_field(param, "must not contain control characters")


def same_for_all(values: Sequence[Any], prompts: int, param: str) -> Any:
    """The one value of a per-prompt list, whose entries must all be equal."""
    if len(values) != prompts:
        raise bad_field(param, f"{prompts} entries are expected, one a prompt, got {len(values)}")
    first = values[0]
    if any(value != first for value in values):
        raise bad_field(param, "prompts of one request share their values; send separate requests")
    return first


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return f"the number {shown(value)}"
    return "a string" if isinstance(value, str) else "a list" if isinstance(value, list) else "an object"
