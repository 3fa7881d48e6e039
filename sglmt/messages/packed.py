"""Arithmetic on packed columns as a whole, in a few calls whatever the number of items. Pure.

Packed columns of u32 are added as one large number each: no item carries into the next as long as every sum stays
below 2³², which token and character offsets do.
"""

from __future__ import annotations

ONE_U32 = b"\x01\x00\x00\x00"


def ones_u32(count: int) -> int:
    """A column of `count` ones, as one number."""
    return int.from_bytes(ONE_U32 * count, "little")


def add_u32(column: bytearray, amounts: int) -> None:
    """Add a packed u32 column (as one number) to another."""
    column[:] = (int.from_bytes(column, "little") + amounts).to_bytes(len(column), "little")


def item_u32(column: bytes | bytearray, row: int) -> int:
    """One item of a packed u32 column."""
    return int.from_bytes(column[4 * row : 4 * row + 4], "little")


def common_items(one: bytes | bytearray, other: bytes | bytearray, size: int) -> int:
    """How many items of `size` bytes two packed columns have in common from the beginning on."""
    count = min(len(one), len(other)) // size
    differing = int.from_bytes(one[: count * size], "little") ^ int.from_bytes(other[: count * size], "little")
    return ((differing & -differing).bit_length() - 1) // (8 * size) if differing else count


def find_item(column: bytes | bytearray, item: bytes) -> int:
    """The row of a packed column that holds `item`, -1 when none does."""
    at = column.find(item)
    while at % len(item) and at >= 0:
        at = column.find(item, at + 1)
    return at // len(item)
