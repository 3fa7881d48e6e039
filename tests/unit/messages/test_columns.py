"""Batches: whatever is taken apart comes together again, column by column, for every declared type."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sglmt.messages.to_detokenizer
import sglmt.messages.to_scheduler
import sglmt.messages.to_worker  # noqa: F401 - all fill the registry
from sglmt.delivery.keys import life_of
from sglmt.messages.columns import (
    Batch,
    DictOfObjects,
    Objects,
    PerRow,
    Ragged,
    RaggedColumn,
    Shared,
    Sparse,
    batch,
    columns_of,
    concat,
    pack,
    pack_ragged,
    unpack,
    unpack_ragged,
)
from sglmt.messages.registry import MESSAGES
from tests.unit.messages.instances import (
    comparable,
    filled,
    hints_of,
    instances,
    is_batch,
    is_optional,
    split_at_random,
)

BATCH_TYPES = sorted((cls for cls in MESSAGES.types().values() if is_batch(cls)), key=lambda cls: cls.__name__)
any_batch_type = pytest.mark.parametrize("cls", BATCH_TYPES)


def test_all_three_batch_types_are_here() -> None:
    assert [cls.__name__ for cls in BATCH_TYPES] == ["BatchEmbeddingOutput", "BatchStrOutput", "BatchTokenIDOutput"]


@any_batch_type
@given(data=st.data())
@settings(max_examples=40)
def test_rows_taken_one_by_one_make_the_batch_again(cls: type, data: st.DataObject) -> None:
    whole = data.draw(instances(cls, data.draw(st.integers(1, 5))))
    whole.check()
    ones = [whole.take([row]) for row in range(whole.rows())]
    for one in ones:
        one.check()
        assert one.rows() == 1
    assert comparable(concat(ones)) == comparable(whole)


@any_batch_type
@given(data=st.data())
@settings(max_examples=40)
def test_any_cut_into_pieces_comes_together_again(cls: type, data: st.DataObject) -> None:
    whole = data.draw(instances(cls))
    pieces = split_at_random(whole, data.draw(st.lists(st.integers(0, 6), max_size=4)))
    assert comparable(concat(pieces)) == comparable(whole)


@any_batch_type
@given(data=st.data())
@settings(max_examples=40)
def test_split_by_gives_each_group_its_own_rows_in_order(cls: type, data: st.DataObject) -> None:
    whole = data.draw(instances(cls))
    groups = whole.split_by(lambda key: key % 3)
    keys = unpack("Q", whole.keys)
    for group, rows in groups.items():
        rows.check()
        assert unpack("Q", rows.keys) == tuple(key for key in keys if key % 3 == group)
    if groups:
        joined = concat(list(groups.values()))
        order = [unpack("Q", joined.keys).index(key) for key in keys]
        assert comparable(joined.take(order)) == comparable(whole)


@any_batch_type
def test_a_batch_of_one_worker_is_not_copied(cls: type) -> None:
    whole = filled(cls, 3)
    assert whole.split_by(life_of) == {0: whole}
    assert whole.split_by(life_of)[0] is whole


@any_batch_type
def test_an_absent_column_stays_absent(cls: type) -> None:
    optional = frozenset(name for name, _kind in columns_of(cls) if is_optional(cls, name))
    assert optional
    bare = filled(cls, 4, without=optional)
    for made in (bare.take([2, 0]), concat([bare, bare]), *bare.split_by(lambda key: key % 2).values()):
        assert all(getattr(made, name) is None for name in optional)


@any_batch_type
def test_present_are_the_columns_that_are_not_at_their_default(cls: type) -> None:
    full = filled(cls, 6)
    assert [(name, kind) for name, kind, _value in full.check()] == list(columns_of(cls))
    defaults = {field.name for field in msgspec.structs.fields(cls) if not field.required}
    assert defaults
    bare = filled(cls, 6, without=frozenset(defaults))
    assert {name for name, _kind, _value in bare.check()} == {name for name, _ in columns_of(cls)} - defaults


@any_batch_type
def test_a_column_of_some_batches_only_stays_with_its_rows(cls: type) -> None:
    for name, kind in columns_of(cls):
        if not is_optional(cls, name) or isinstance(kind, Shared):
            continue
        having, lacking = filled(cls, 3, 10), filled(cls, 2, 20, without=frozenset([name]))
        joined = concat([lacking, having, lacking])
        joined.check()
        assert comparable(joined.take([2, 3, 4]))[name] == comparable(having)[name], name
        for rows in ([0, 1], [5, 6]):
            part = joined.take(rows)
            part.check()
            assert _is_empty(kind, part, name), name


def _is_empty(kind: object, part: Batch, name: str) -> bool:
    value = getattr(part, name)
    if isinstance(kind, PerRow):
        return unpack(kind.code, value) == (kind.missing,) * part.rows()
    if isinstance(kind, Ragged):
        return unpack_ragged(kind.code, value) == [()] * part.rows()
    if isinstance(kind, Objects):
        return value == [None] * part.rows()
    if isinstance(kind, DictOfObjects):
        return all(column == [None] * part.rows() for column in value.values())
    return value == {}


@any_batch_type
def test_batches_that_differ_in_a_shared_value_do_not_become_one(cls: type) -> None:
    one, other = filled(cls, 1), filled(cls, 1, without=frozenset(["weight_version"]))
    with pytest.raises(ValueError, match="different shared values"):
        concat([one, other])


def test_batches_of_different_types_and_no_batches_do_not_become_one() -> None:
    with pytest.raises(ValueError, match="different types"):
        concat([filled(BATCH_TYPES[0], 1), filled(BATCH_TYPES[1], 1)])
    with pytest.raises(ValueError, match="nothing to concatenate"):
        concat([])


@any_batch_type
def test_ten_thousand_rows(cls: type) -> None:
    whole = filled(cls, 10_000)
    whole.check()
    groups = whole.split_by(lambda key: key % 7)
    assert sum(rows.rows() for rows in groups.values()) == 10_000
    joined = concat(list(groups.values()))
    position = {key: row for row, key in enumerate(unpack("Q", joined.keys))}
    assert comparable(joined.take([position[key] for key in range(10_000)])) == comparable(whole)


@any_batch_type
def test_no_rows(cls: type) -> None:
    empty = filled(cls, 0)
    empty.check()
    assert empty.rows() == 0
    assert empty.split_by(life_of) == {}
    assert comparable(concat([empty, filled(cls, 2)])) == comparable(filled(cls, 2))


@any_batch_type
def test_every_column_that_does_not_fit_is_refused_by_name(cls: type) -> None:
    for name, kind in columns_of(cls):
        if name == "keys" or isinstance(kind, Shared):
            continue
        whole, longer = filled(cls, 3), filled(cls, 4)
        wrong = {7: None} if isinstance(kind, Sparse) else getattr(longer, name)
        with pytest.raises(ValueError, match=f"{cls.__name__}.{name} "):
            msgspec.structs.replace(whole, **{name: wrong}).check()


@any_batch_type
def test_columns_cut_inside_an_item_are_refused(cls: type) -> None:
    for name, kind in columns_of(cls):
        whole = filled(cls, 3)
        value = getattr(whole, name)
        if isinstance(kind, PerRow):
            broken: object = value[:-1]
        elif isinstance(kind, Ragged):
            broken = RaggedColumn(value.lengths, value.values[:-1])
        else:
            continue
        with pytest.raises(ValueError):  # noqa: PT011 - which check notices is not the point
            msgspec.structs.replace(whole, **{name: broken}).check()


def test_ragged_lengths_that_do_not_add_up_are_refused() -> None:
    whole = filled(BATCH_TYPES[2], 3)
    for lengths in ([1, 1, 5], [2**32 - 1] * 3):
        broken = RaggedColumn(pack("I", lengths), pack("I", [1, 2, 3]))
        with pytest.raises(ValueError, match="lengths add up"):
            msgspec.structs.replace(whole, output_ids=broken).check()


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=3), max_size=5))
def test_ragged_columns_are_what_was_packed(rows: list[list[int]]) -> None:
    packed = pack_ragged("I", rows)
    assert unpack_ragged("I", packed) == [tuple(row) for row in rows]
    assert (packed.lengths is None) == all(len(row) == 1 for row in rows)


def test_a_field_without_a_column_kind_fails_where_it_is_declared() -> None:
    with pytest.raises(TypeError, match=r"Undeclared.extra must declare exactly one column kind, it has 0"):

        @batch
        class Undeclared(Batch, kw_only=True):
            keys: Annotated[bytes, PerRow("Q")]
            extra: list[int] = []


def test_a_field_with_two_column_kinds_fails_where_it_is_declared() -> None:
    with pytest.raises(TypeError, match=r"Twice.extra must declare exactly one column kind, it has 2"):

        @batch
        class Twice(Batch, kw_only=True):
            keys: Annotated[bytes, PerRow("Q")]
            extra: Annotated[list[int], Objects(), Shared()] = []


def test_a_batch_without_keys_fails_where_it_is_declared() -> None:
    with pytest.raises(TypeError, match="must declare `keys`"):

        @batch
        class Keyless(Batch, kw_only=True):
            extra: Annotated[list[int], Objects()] = []


def test_an_unknown_packed_code_fails_where_it_is_declared() -> None:
    for kind in (PerRow, Ragged):
        with pytest.raises(TypeError, match="none of"):
            kind("x")


def test_instances_cover_every_column_kind() -> None:
    """The strategies of this folder know all kinds; a new kind must be added there."""
    kinds = {type(kind) for cls in BATCH_TYPES for _name, kind in columns_of(cls)}
    assert kinds == {PerRow, Ragged, Objects, Sparse, DictOfObjects, Shared}
    assert all(hints_of(cls) for cls in BATCH_TYPES)
