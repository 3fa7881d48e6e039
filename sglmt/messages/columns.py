"""Columnar batches: every field says where it is declared how it follows a row. Pure; used by every process.

A batch type is a `msgspec.Struct` under `@batch`, each field `Annotated` with one of

    PerRow(code)      packed numbers, one a row (`bytes`; code "Q" u64, "I" u32, "d" f64)
    Ragged(code)      packed numbers, any count a row (`RaggedColumn`)
    Objects()         a list, one entry a row
    Sparse()          dict row → value, for what few rows have
    DictOfObjects()   dict name → list, one entry a row
    Shared()          one value for the batch

`take`, `split_by` and `concat` are derived from these declarations once, at import, and a field without one
fails there. An optional column (`… | None`) that is absent stays absent.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar, get_type_hints

import msgspec
from msgspec import NODEFAULT

_PACKED_CODES = {"Q": 8, "I": 4, "f": 4, "d": 8}

B = TypeVar("B", bound="Batch")


class RaggedColumn(msgspec.Struct, array_like=True, frozen=True):
    """Numbers of any count a row. `lengths` is packed u32, one a row, or None when every row has exactly one;
    `values` is the packed concatenation."""

    lengths: bytes | None
    values: bytes


def pack(code: str, values: Sequence[int] | Sequence[float]) -> bytes:
    """Packed little-endian bytes of `values`. Raises struct.error when one does not fit."""
    return struct.pack(f"<{len(values)}{code}", *values)


def unpack(code: str, column: bytes) -> tuple[Any, ...]:
    """The numbers of a packed column. Raises ValueError when its size is not a whole number of items."""
    size = _PACKED_CODES[code]
    count, rest = divmod(len(column), size)
    if rest:
        raise ValueError(f"{len(column)} bytes are not whole items of {size}")
    return struct.unpack(f"<{count}{code}", column)


def pack_ragged(code: str, rows: Sequence[Sequence[int]] | Sequence[Sequence[float]]) -> RaggedColumn:
    """A ragged column of `rows`."""
    lengths = [len(row) for row in rows]
    values = pack(code, [value for row in rows for value in row])
    if all(length == 1 for length in lengths):
        return RaggedColumn(None, values)
    return RaggedColumn(pack("I", lengths), values)


def ragged_bounds(column: RaggedColumn, code: str) -> list[int]:
    """Item offsets of the rows, one more than rows: row i is items [bounds[i], bounds[i+1]).

    Raises ValueError when lengths and values disagree.
    """
    items = len(column.values) // _PACKED_CODES[code]
    if column.lengths is None:
        return list(range(items + 1))
    bounds = [0, *accumulate(unpack("I", column.lengths))]
    if bounds[-1] != items:
        raise ValueError(f"ragged column: lengths add up to {bounds[-1]}, there are {items} values")
    return bounds


def unpack_ragged(code: str, column: RaggedColumn) -> list[tuple[Any, ...]]:
    """The rows of a ragged column."""
    values = unpack(code, column.values)
    bounds = ragged_bounds(column, code)
    return [values[start:end] for start, end in pairwise(bounds)]


class ColumnKind:
    """How one field follows the rows: the three operations every batch needs of it."""

    def rows(self, value: Any) -> int | None:
        """How many rows this value speaks for, None when it does not say."""
        return None

    def take(self, value: Any, indices: Sequence[int]) -> Any:
        """The value for the rows `indices`, in that order."""
        raise NotImplementedError

    def concat(self, values: list[Any], counts: list[int]) -> Any:
        """One value for batches of `counts` rows; None entries are batches without this column."""
        raise NotImplementedError


@dataclass(frozen=True)
class PerRow(ColumnKind):
    """Packed numbers, one a row. `missing` fills the rows of a batch without the column, in `concat`."""

    code: str
    missing: int = 0

    def __post_init__(self) -> None:
        if self.code not in _PACKED_CODES:
            raise TypeError(f"packed column code {self.code!r} is none of {sorted(_PACKED_CODES)}")

    def rows(self, value: bytes) -> int:
        count, rest = divmod(len(value), _PACKED_CODES[self.code])
        if rest:
            raise ValueError("packed column is cut inside an item")
        return count

    def take(self, value: bytes, indices: Sequence[int]) -> bytes:
        items = memoryview(value).cast(self.code)  # type: ignore[call-overload]
        return array(self.code, [items[i] for i in indices]).tobytes()

    def concat(self, values: list[bytes | None], counts: list[int]) -> bytes:
        return b"".join(
            pack(self.code, [self.missing] * count) if value is None else value
            for value, count in zip(values, counts, strict=True)
        )


@dataclass(frozen=True)
class Ragged(ColumnKind):
    """Packed numbers, any count a row."""

    code: str

    def __post_init__(self) -> None:
        if self.code not in _PACKED_CODES:
            raise TypeError(f"packed column code {self.code!r} is none of {sorted(_PACKED_CODES)}")

    def rows(self, value: RaggedColumn) -> int:
        items = len(value.values) // _PACKED_CODES[self.code]
        if value.lengths is None:
            return items
        lengths = unpack("I", value.lengths)
        if sum(lengths) != items:
            raise ValueError(f"ragged column: lengths add up to {sum(lengths)}, there are {items} values")
        return len(lengths)

    def take(self, value: RaggedColumn, indices: Sequence[int]) -> RaggedColumn:
        items = memoryview(value.values).cast(self.code)  # type: ignore[call-overload]
        if value.lengths is None:
            return RaggedColumn(None, array(self.code, [items[i] for i in indices]).tobytes())
        bounds = ragged_bounds(value, self.code)
        lengths = pack("I", [bounds[i + 1] - bounds[i] for i in indices])
        return RaggedColumn(lengths, b"".join([items[bounds[i] : bounds[i + 1]].tobytes() for i in indices]))

    def concat(self, values: list[RaggedColumn | None], counts: list[int]) -> RaggedColumn:
        data = b"".join(value.values for value in values if value is not None)
        if all(value is not None and value.lengths is None for value in values):
            return RaggedColumn(None, data)
        lengths = []
        for value, count in zip(values, counts, strict=True):
            if value is None:
                lengths.append(pack("I", [0] * count))
            elif value.lengths is None:
                lengths.append(pack("I", [1] * count))
            else:
                lengths.append(value.lengths)
        return RaggedColumn(b"".join(lengths), data)


@dataclass(frozen=True)
class Objects(ColumnKind):
    """A list with one entry a row; a row without a value has None."""

    def rows(self, value: list[Any]) -> int:
        return len(value)

    def take(self, value: list[Any], indices: Sequence[int]) -> list[Any]:
        return [value[i] for i in indices]

    def concat(self, values: list[list[Any] | None], counts: list[int]) -> list[Any]:
        joined: list[Any] = []
        for value, count in zip(values, counts, strict=True):
            joined.extend([None] * count if value is None else value)
        return joined


@dataclass(frozen=True)
class Sparse(ColumnKind):
    """Row number → value, for what few rows have: most steps it is empty and costs nothing."""

    def take(self, value: dict[int, Any], indices: Sequence[int]) -> dict[int, Any]:
        if not value:
            return {}
        return {new: value[old] for new, old in enumerate(indices) if old in value}

    def concat(self, values: list[dict[int, Any] | None], counts: list[int]) -> dict[int, Any]:
        joined: dict[int, Any] = {}
        first_row = 0
        for value, count in zip(values, counts, strict=True):
            for row, entry in (value or {}).items():
                joined[first_row + row] = entry
            first_row += count
        return joined


@dataclass(frozen=True)
class DictOfObjects(ColumnKind):
    """Name → list with one entry a row (`customized_info`). Names may differ between batches."""

    def rows(self, value: dict[str, list[Any]]) -> int | None:
        counts = {len(column) for column in value.values()}
        if len(counts) > 1:
            raise ValueError(f"columns of one dictionary have different lengths: {sorted(counts)}")
        return counts.pop() if counts else None

    def take(self, value: dict[str, list[Any]], indices: Sequence[int]) -> dict[str, list[Any]]:
        return {name: [column[i] for i in indices] for name, column in value.items()}

    def concat(self, values: list[dict[str, list[Any]] | None], counts: list[int]) -> dict[str, list[Any]]:
        names = dict.fromkeys(name for value in values if value for name in value)
        objects = Objects()
        return {name: objects.concat([(value or {}).get(name) for value in values], counts) for name in names}


@dataclass(frozen=True)
class Shared(ColumnKind):
    """One value for the whole batch. Batches that differ in one are not concatenated."""

    def take(self, value: Any, indices: Sequence[int]) -> Any:
        return value

    def concat(self, values: list[Any], counts: list[int]) -> Any:
        if any(value != values[0] for value in values):
            raise ValueError("batches with different shared values cannot become one")
        return values[0]


Column = tuple[str, ColumnKind, Any]
"""(name, kind, value) of a column of a batch."""


class Batch(msgspec.Struct, kw_only=True):
    """Base of the columnar batches. Subclasses have a `keys` column and are declared under `@batch`."""

    def rows(self) -> int:
        """How many requests have a row."""
        keys: bytes = getattr(self, "keys")  # noqa: B009 - declared by every subclass, checked by @batch
        return len(keys) // 8

    def present(self) -> list[Column]:
        """The columns that are not at their default. There are many columns, and few are used at a time."""
        plan = plan_of(type(self))
        values = zip(plan.names, plan.kinds, msgspec.structs.astuple(self), plan.defaults, strict=True)
        return [(name, kind, value) for name, kind, value, default in values if value != default]

    def check(self) -> list[Column]:
        """Raise ValueError unless every column speaks for the same number of rows. Returns those that are present."""
        expected = self.rows()
        present = self.present()
        for name, kind, value in present:
            rows = kind.rows(value)
            if rows is not None and rows != expected:
                raise ValueError(f"{type(self).__name__}.{name} has {rows} rows, the batch has {expected}")
            if type(kind) is Sparse and not all(0 <= row < expected for row in value):
                raise ValueError(f"{type(self).__name__}.{name} names a row outside the batch")
        return present

    def take(self: B, indices: Sequence[int]) -> B:
        """The rows `indices`, in that order, as a batch of the same type."""
        return type(self)(**{name: kind.take(value, indices) for name, kind, value in self.present()})

    def split_by(self: B, group_of_key: Callable[[int], int]) -> dict[int, B]:
        """Group → its rows, rows in their order. One pass; a batch of one group is not copied."""
        keys: tuple[int, ...] = unpack("Q", getattr(self, "keys"))  # noqa: B009
        groups: dict[int, list[int]] = {}
        for row, key in enumerate(keys):
            group = group_of_key(key)
            rows = groups.get(group)
            if rows is None:
                groups[group] = [row]
            else:
                rows.append(row)
        if len(groups) == 1:
            return {next(iter(groups)): self}
        return {group: self.take(rows) for group, rows in groups.items()}


def concat(batches: Sequence[B]) -> B:
    """One batch of all rows, in order. A column absent everywhere stays absent.

    Raises ValueError for no batches, different types, or different shared values.
    """
    if not batches:
        raise ValueError("nothing to concatenate")
    cls = type(batches[0])
    if any(type(one) is not cls for one in batches):
        raise ValueError("batches of different types cannot become one")
    counts = [one.rows() for one in batches]
    plan = plan_of(cls)
    columns = {}
    for name, kind, *values in zip(plan.names, plan.kinds, *map(msgspec.structs.astuple, batches), strict=True):
        columns[name] = None if all(value is None for value in values) else kind.concat(values, counts)
    return cls(**columns)


class Plan(NamedTuple):
    """The columns of a batch type, in order."""

    names: tuple[str, ...]
    kinds: tuple[ColumnKind, ...]
    defaults: tuple[Any, ...]


_PLAN_ATTRIBUTE = "__batch_plan__"


def plan_of(cls: type) -> Plan:
    """The declared columns of a batch type, in order."""
    plan: Plan = getattr(cls, _PLAN_ATTRIBUTE)
    return plan


def columns_of(cls: type) -> tuple[tuple[str, ColumnKind], ...]:
    """(name, kind) of the declared columns of a batch type, in order."""
    plan = plan_of(cls)
    return tuple(zip(plan.names, plan.kinds, strict=True))


def batch(cls: type[B]) -> type[B]:
    """Class decorator: derive the column plan. Raises TypeError for a field without exactly one declaration."""
    hints = get_type_hints(cls, include_extras=True)
    fields = msgspec.structs.fields(cls)
    columns: dict[str, ColumnKind] = {}
    for field in fields:
        kinds = [extra for extra in _metadata(hints[field.name]) if isinstance(extra, ColumnKind)]
        if len(kinds) != 1:
            raise TypeError(f"{cls.__name__}.{field.name} must declare exactly one column kind, it has {len(kinds)}")
        columns[field.name] = kinds[0]
    if columns.get("keys") != PerRow("Q"):
        raise TypeError(f"{cls.__name__} must declare `keys` as PerRow('Q')")
    defaults = tuple(
        field.default if field.default_factory is NODEFAULT else field.default_factory() for field in fields
    )
    setattr(cls, _PLAN_ATTRIBUTE, Plan(tuple(columns), tuple(columns.values()), defaults))
    return cls


def _metadata(hint: Any) -> Iterable[Any]:
    return getattr(hint, "__metadata__", ())
