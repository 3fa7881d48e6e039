"""Random instances of every message type, built from its type hints, so that a new field needs no new test.

Contents come from a seeded random source, which hypothesis draws: a few hundred values an instance would be slow to
draw one by one.
"""

from __future__ import annotations

import itertools
from random import Random
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

PLAIN = (None, True, -9, 0, 2**40, "", "é鑫", [1, "x"], {"a": None})
_SIMPLE: dict[object, tuple[Any, ...]] = {
    int: (0, 1, 7, 300, 70_000, 2**32 - 1),
    float: (0.0, -1.5, 1e300, float("-inf")),
    str: ("", "a", "stop", "é鑫🔥", "\n\x00"),
    bool: (False, True),
    bytes: (b"", b"\x00" * 8, b"12345678abcdefgh"),
    object: PLAIN,
    type(None): (None,),
}
_NUMBERS = {"Q": (0, 1, 2**31, 2**64 - 1), "I": (0, 1, 2**31, 2**32 - 1), "f": (0.0, -2.5), "d": (0.0, 1e300)}

SEEDS = st.integers(0, 2**32 - 1)


def is_batch(cls: type) -> bool:
    """Whether `cls` is one of the columnar types."""
    return issubclass(cls, Batch)


def instances(cls: type, rows: int | None = None) -> st.SearchStrategy[Any]:
    """Instances of a message type; batches with `rows` rows (None: few)."""

    def make(seed: int) -> Any:
        rng = Random(seed)
        if is_batch(cls):
            return random_batch(rng, cls, rng.randrange(6) if rows is None else rows)
        return random_value(rng, cls)

    return SEEDS.map(make)


def random_value(rng: Random, hint: Any) -> Any:
    """A value of a type hint as message fields use them; a kind of hint not known here is an error."""
    if hint in _SIMPLE:
        return rng.choice(_SIMPLE[hint])
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return random_value(rng, rng.choice(inner))
    if origin is list:
        return [random_value(rng, inner[0]) for _ in range(rng.randrange(3))]
    if origin is dict:
        return {random_value(rng, inner[0]): random_value(rng, inner[1]) for _ in range(rng.randrange(3))}
    if origin is tuple and inner[-1] is Ellipsis:
        return tuple(random_value(rng, inner[0]) for _ in range(rng.randrange(3)))
    if origin is tuple:
        return tuple(random_value(rng, of) for of in inner)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return hint(**{name: random_value(rng, of) for name, of in get_type_hints(hint).items()})
    raise TypeError(f"no values of {hint} here; add them")


def random_column(rng: Random, kind: ColumnKind, hint: Any, rows: int) -> Any:
    """One column of `rows` rows, of the declared kind and type."""
    if isinstance(kind, PerRow):
        return pack(kind.code, rng.choices(_NUMBERS[kind.code], k=rows))
    if isinstance(kind, Ragged):
        most = rng.choice((1, 4))  # one a row is written down in another way
        return pack_ragged(
            kind.code, [rng.choices(_NUMBERS[kind.code], k=rng.randrange(most) + (most == 1)) for _ in range(rows)]
        )
    if isinstance(kind, Objects):
        return [random_value(rng, _inner(hint, list)) for _ in range(rows)]
    if isinstance(kind, Sparse):
        return {row: random_value(rng, _inner(hint, dict)) for row in range(rows) if rng.randrange(3) == 0}
    if isinstance(kind, DictOfObjects):
        return {name: rng.choices(PLAIN, k=rows) for name in rng.sample("abc", k=rng.randrange(1, 4))}
    if isinstance(kind, Shared):
        return random_value(rng, hint)
    raise TypeError(f"no columns of {kind} here; add them")


def random_batch(rng: Random, cls: type, rows: int) -> Any:
    """A batch of `rows` rows with distinct keys; optional columns are there or not."""
    columns: dict[str, Any] = {"keys": pack("Q", [rng.getrandbits(64) for _ in range(rows)])}
    for name, kind in columns_of(cls):
        if name != "keys" and not (is_optional(cls, name) and rng.randrange(2)):
            columns[name] = random_column(rng, kind, hints_of(cls)[name], rows)
    return cls(**columns)


def _inner(hint: Any, outer: type) -> Any:
    """`T` of `list[T]` or `dict[…, T]`, with or without `| None`."""
    for option in (hint, *get_args(hint)):
        if get_origin(option) is outer:
            return get_args(option)[-1]
    raise TypeError(f"{hint} holds no {outer}")


def hints_of(cls: type) -> dict[str, Any]:
    """Field → type, the column declaration taken off."""
    return get_type_hints(cls)


def is_optional(cls: type, name: str) -> bool:
    """Whether the column may be absent."""
    return type(None) in get_args(hints_of(cls)[name])


def filled(cls: type, rows: int, first_key: int = 0, without: frozenset[str] = frozenset()) -> Any:
    """A batch with every column there and each value recognisable by its row."""
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
        is_ragged = isinstance(value, RaggedColumn) and isinstance(kind, Ragged)
        shown[name] = unpack_ragged(kind.code, value) if is_ragged else value
    return shown
