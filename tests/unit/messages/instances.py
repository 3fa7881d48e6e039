"""Random instances of every message type, built from its type hints, so that a new field needs no new test."""

from __future__ import annotations

import itertools
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

from sglmt.messages.columns import (
    Batch,
    ColumnKind,
    DictOfObjects,
    Objects,
    PerRow,
    Ragged,
    RaggedColumn,
    Shared,
    Sparse,
    columns_of,
    pack,
    pack_ragged,
    unpack_ragged,
)

PLAIN: st.SearchStrategy[object] = st.sampled_from([None, True, -9, 0, 2**40, "", "é鑫", [1, "x"], {"a": None}])
_SIMPLE: dict[object, st.SearchStrategy[Any]] = {
    int: st.sampled_from([0, 1, 7, 300, 70_000, 2**32 - 1]),
    float: st.sampled_from([0.0, -1.5, 1e300, float("-inf")]),
    str: st.sampled_from(["", "a", "stop", "é鑫🔥", "\n\x00"]),
    bool: st.booleans(),
    bytes: st.sampled_from([b"", b"\x00" * 8, b"12345678abcdefgh"]),
    object: PLAIN,
    type(None): st.none(),
}


def is_batch(cls: type) -> bool:
    """Whether `cls` is one of the columnar types."""
    return issubclass(cls, Batch)


def messages(cls: type) -> st.SearchStrategy[Any]:
    """Instances of a message type that is no batch."""
    return values(cls)


@cache
def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type hint as message fields use them; a kind of hint not known here is an error."""
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return st.one_of([values(option) for option in inner])
    if origin is list:
        return st.lists(values(inner[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(values(inner[0]), values(inner[1]), max_size=2)
    if origin is tuple and inner[-1] is Ellipsis:
        return st.lists(values(inner[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, inner))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return st.fixed_dictionaries({name: values(of) for name, of in get_type_hints(hint).items()}).map(
            lambda fields: hint(**fields)
        )
    raise TypeError(f"no values of {hint} here; add them")


def numbers(code: str) -> st.SearchStrategy[Any]:
    """What a packed column of `code` may hold."""
    if code in "fd":
        return st.sampled_from([0.0, 1.0, -2.5, float("inf")])
    return st.sampled_from([0, 1, 2**31, 2**64 - 1 if code == "Q" else 2**32 - 1])


@st.composite
def column(draw: st.DrawFn, kind: ColumnKind, hint: Any, rows: int) -> Any:
    """One column of `rows` rows, of the declared kind and type."""
    some = {"min_size": rows, "max_size": rows}
    if isinstance(kind, PerRow):
        return pack(kind.code, draw(st.lists(numbers(kind.code), **some)))
    if isinstance(kind, Ragged):
        return pack_ragged(kind.code, draw(st.lists(st.lists(numbers(kind.code), max_size=3), **some)))
    if isinstance(kind, Objects):
        return draw(st.lists(values(_inner(hint, list)), **some))
    if isinstance(kind, Sparse):
        named = draw(st.sets(st.integers(0, rows - 1))) if rows else set()
        return {row: draw(values(_inner(hint, dict))) for row in sorted(named)}
    if isinstance(kind, DictOfObjects):
        names = draw(st.sets(st.sampled_from("abc"), min_size=1))
        return {name: draw(st.lists(PLAIN, **some)) for name in sorted(names)}
    assert isinstance(kind, Shared)
    return draw(values(_without_none(hint)))


def _without_none(hint: Any) -> Any:
    options = [option for option in getattr(hint, "__args__", (hint,)) if option is not type(None)]
    return options[0] if len(options) == 1 else hint


def _inner(hint: Any, outer: type) -> Any:
    """`T` of `list[T]` or `dict[…, T]`, with or without `| None`."""
    for option in (hint, *getattr(hint, "__args__", ())):
        if getattr(option, "__origin__", None) is outer:
            return option.__args__[-1]
    raise TypeError(f"{hint} holds no {outer}")


def hints_of(cls: type) -> dict[str, Any]:
    """Field → type, the column declaration taken off."""
    return get_type_hints(cls)


def is_optional(cls: type, name: str) -> bool:
    """Whether the column may be absent."""
    return type(None) in getattr(hints_of(cls)[name], "__args__", ())


@st.composite
def batches(draw: st.DrawFn, cls: type, rows: int, absent: frozenset[str] | None = None) -> Any:
    """A batch of `rows` rows; optional columns are there or not, or as `absent` says. Keys are distinct."""
    columns: dict[str, Any] = {}
    for name, kind in columns_of(cls):
        if name == "keys":
            keys = draw(st.lists(st.integers(0, 2**64 - 1), min_size=rows, max_size=rows, unique=True))
            columns[name] = pack("Q", keys)
            continue
        left_out = is_optional(cls, name) and (draw(st.booleans()) if absent is None else name in absent)
        if not left_out:
            columns[name] = draw(column(kind, hints_of(cls)[name], rows))
    return cls(**columns)


def filled(cls: type, rows: int, first_key: int = 0, without: frozenset[str] = frozenset()) -> Any:
    """A batch with every column there and each value recognisable, built fast."""
    columns: dict[str, Any] = {}
    for name, kind in columns_of(cls):
        if name not in without:
            columns[name] = _plain_column(kind, hints_of(cls)[name], rows, first_key)
    return cls(**columns)


def _plain_column(kind: ColumnKind, hint: Any, rows: int, first: int) -> Any:
    values = range(first, first + rows)
    if isinstance(kind, PerRow):
        return pack(kind.code, values)
    if isinstance(kind, Ragged):
        return pack_ragged(kind.code, [[value] * (value % 3) for value in values])
    if isinstance(kind, Objects):
        text = _inner(hint, list) is str
        return [str(value) if text else (None if value % 2 else {"x": float(value)}) for value in values]
    if isinstance(kind, Sparse):
        return {row: value for row, value in enumerate(values) if value % 5 == 0}
    if isinstance(kind, DictOfObjects):
        return {"info": [str(value) for value in values]}
    return "shared"


def split_at_random(batch: Any, cuts: list[int]) -> list[Any]:
    """The batch in consecutive pieces."""
    rows = batch.rows()
    bounds = [0, *sorted(cut % (rows + 1) for cut in cuts), rows]
    return [batch.take(range(start, end)) for start, end in itertools.pairwise(bounds)]


def comparable(batch: Any) -> dict[str, Any]:
    """Columns in a form that does not depend on how a ragged column is written down."""
    shown: dict[str, Any] = {}
    for name, kind in columns_of(type(batch)):
        value = getattr(batch, name)
        if isinstance(value, RaggedColumn) and isinstance(kind, Ragged):
            shown[name] = _rows_of(kind, value)
        else:
            shown[name] = value
    return shown


def _rows_of(kind: Ragged, value: RaggedColumn) -> list[tuple[Any, ...]]:
    return unpack_ragged(kind.code, value)
