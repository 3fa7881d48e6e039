"""Bytes of a request body to a typed object, with errors that name the field. Pure.

Runs in the tokenizer workers. A body is decoded once, by `msgspec`, into the struct of its endpoint; only when that
fails is it looked at again, by a tolerant parser, to find which field held what JSON cannot say (NaN, 1e999, half a
surrogate pair). Unknown fields are skipped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from sglmt.http.errors import ApiError, bad_field, bad_request, encodable

T = TypeVar("T")

MAX_RESCAN_BYTES = 1 << 20  # above this the second look would hold up others; the error stays general
MAX_DEPTH = 100  # of values that are kept as they come: messages, tools, schemas
MAX_PATH_CHARS = 120

_BOM = b"\xef\xbb\xbf"
_AT = re.compile(r"^(?P<problem>.*?)(?: - at `(?P<key>key in )?\$?(?P<path>.*)`)?$", re.DOTALL)
_MISMATCH = re.compile(r"^Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`")
_NAMES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_GOT_NAMES = {**_NAMES, "bool": "a boolean"}


class BodyDecoder(Generic[T]):
    """Decodes bodies of one endpoint into its struct type."""

    def __init__(self, body_type: type[T]) -> None:
        self._decode = msgspec.json.Decoder(body_type).decode

    def decode(self, body: bytes) -> T:
        """The body as a struct. Raises ApiError (400) naming the field where there is one."""
        try:
            if not body.isascii():
                body.decode("utf-8")
            return self._decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if body.startswith(_BOM):
                return self.decode(body[len(_BOM) :])
            raise explain(body, error) from None


def explain(body: bytes, error: Exception) -> ApiError:
    """The 400 for a body that could not be decoded."""
    if isinstance(error, RecursionError):
        return bad_request("the request body is nested too deeply", code="invalid_json")
    if isinstance(error, UnicodeDecodeError):
        return bad_request(f"the request body is not valid UTF-8 (byte {error.start})", code="invalid_json")
    if isinstance(error, msgspec.ValidationError):
        return _mismatch(str(error))
    return _malformed(body)


def check_depth(value: Any, param: str, limit: int = MAX_DEPTH) -> None:
    """Raise ApiError (400) when lists and objects are nested deeper than `limit`."""
    level = [value]
    for _ in range(limit):
        nested: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                nested.extend(child for child in item.values() if isinstance(child, dict | list))
            elif isinstance(item, list):
                nested.extend(child for child in item if isinstance(child, dict | list))
        if not nested:
            return
        level = nested
    raise bad_field(param, f"nested deeper than {limit} levels")


def _mismatch(message: str) -> ApiError:
    match = _AT.match(message)
    problem, path = (match["problem"], match["path"]) if match else (message, None)
    field = _field_name(path) if path else None
    if field is None:
        return bad_request("the request body must be a JSON object", code="invalid_json")
    mismatch = _MISMATCH.match(problem)
    if mismatch:
        return bad_field(field, _expected(mismatch["expected"], mismatch["got"]))
    if "out of range" in problem:
        return bad_field(field, "the number is out of range; a finite number is expected")
    return bad_field(field, "the value cannot be used")


def _expected(expected: str, got: str) -> str:
    names = [_NAMES.get(name, name) for name in expected.split(" | ")]
    names = [name for name in names if name != "null"] or names
    return f"{' or '.join(names)} is expected, got {_GOT_NAMES.get(got, got)}"


def _field_name(path: str) -> str | None:
    """`.messages[0].role` → `messages[0].role`; `[...]` (some item) → `[]`."""
    return path.replace("[...]", "[]").lstrip(".")[:MAX_PATH_CHARS] or None


def _malformed(body: bytes) -> ApiError:
    if len(body) > MAX_RESCAN_BYTES:
        return bad_request("the request body is not valid JSON", code="invalid_json")
    try:
        found = next(_unusable(json.loads(body, parse_constant=float), ""), None)
    except json.JSONDecodeError as error:
        return bad_request(f"the request body is not valid JSON (character {error.pos})", code="invalid_json")
    except (ValueError, RecursionError):
        return bad_request("the request body is not valid JSON", code="invalid_json")
    if found is None:
        return bad_request("the request body is not valid JSON", code="invalid_json")
    field = encodable(found[0]).lstrip(".")[:MAX_PATH_CHARS]
    return bad_field(field, found[1]) if field else bad_request("the request body must be a JSON object")


def _unusable(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """(path, problem) of each number that is not finite and each string UTF-8 cannot hold, in document order."""
    if isinstance(value, float) and not math.isfinite(value):
        name = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        yield path, f"a finite number is expected, got {name}"
    elif isinstance(value, str) and _has_surrogate(value):
        yield path, "the text has an unpaired surrogate, which is not a character"
    elif isinstance(value, dict):
        for key, child in value.items():
            if _has_surrogate(key):
                yield f"{path}.{key}", "the name has an unpaired surrogate, which is not a character"
            yield from _unusable(child, f"{path}.{key}")
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _unusable(child, f"{path}[{index}]")


def _has_surrogate(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
