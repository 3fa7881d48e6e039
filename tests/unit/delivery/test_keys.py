"""Keys and lives: reversible, and refused when a part does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglmt.delivery import keys
from sglmt.server_args import MAX_WORKERS

indices = st.integers(0, keys.MAX_WORKERS - 1)
generations = st.integers(0, keys.MAX_GENERATION)
counters = st.integers(0, keys.MAX_COUNTER)


@given(indices, generations, counters)
def test_a_key_holds_its_parts(index: int, generation: int, counter: int) -> None:
    life = keys.make_life(index, generation)
    key = keys.make_key(life, counter)
    assert keys.split_life(life) == (index, generation)
    assert keys.life_of(key) == life
    assert keys.counter_of(key) == counter
    assert 0 <= key < 2**64


@given(st.tuples(indices, generations, counters), st.tuples(indices, generations, counters))
def test_different_requests_have_different_keys(one: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    made = [keys.make_key(keys.make_life(index, generation), counter) for index, generation, counter in (one, other)]
    assert (made[0] == made[1]) == (one == other)


@pytest.mark.parametrize(("index", "generation"), [(-1, 1), (1 << 12, 1), (0, -1), (0, 1 << 20)])
def test_lives_that_do_not_fit_are_refused(index: int, generation: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        keys.make_life(index, generation)


@pytest.mark.parametrize("counter", [-1, 1 << 32])
def test_counters_that_do_not_fit_are_refused(counter: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        keys.make_key(1, counter)


def test_every_worker_that_may_be_asked_for_has_a_life() -> None:
    assert keys.make_life(MAX_WORKERS - 1, keys.MAX_GENERATION) < 2**32
