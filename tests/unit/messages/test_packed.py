"""Packed columns as one number: the same as item by item."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from sglmt.messages.packed import add_u32, common_items, find_item, item_u32, ones_u32

u32 = st.integers(0, 2**30)


@given(st.lists(st.tuples(u32, u32)))
def test_columns_are_added_item_by_item(pairs: list[tuple[int, int]]) -> None:
    column = bytearray(array("I", [one for one, _ in pairs]))
    add_u32(column, int.from_bytes(array("I", [other for _, other in pairs]), "little"))
    assert array("I", column).tolist() == [one + other for one, other in pairs]
    add_u32(column, ones_u32(len(pairs)))
    assert [item_u32(column, row) for row in range(len(pairs))] == [one + other + 1 for one, other in pairs]


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_common_items(one: list[int], other: list[int]) -> None:
    expected = 0
    while expected < min(len(one), len(other)) and one[expected] == other[expected]:
        expected += 1
    assert common_items(array("Q", one).tobytes(), array("Q", other).tobytes(), 8) == expected


@given(st.lists(st.integers(0, 300)), st.integers(0, 300), st.integers(0, 32))
def test_items_are_found_where_items_are(values: list[int], wanted: int, shift: int) -> None:
    values = [value << shift for value in values]
    expected = values.index(wanted << shift) if wanted << shift in values else -1
    assert find_item(array("Q", values).tobytes(), (wanted << shift).to_bytes(8, "little")) == expected
