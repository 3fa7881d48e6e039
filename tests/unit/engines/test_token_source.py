"""The simulator's token source: one state per (seed, ids so far), and consistent made-up numbers."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sglmt.engines.token_source import (
    EMBEDDING_DIMENSIONS,
    embedding_of,
    fold,
    initial_state,
    logprob_of,
    top_logprobs,
)

STATES = st.integers(0, 2**64 - 1)
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=30)


@given(state=STATES, ids=IDS, cut=st.integers(0, 30))
def test_fold_does_not_depend_on_where_the_ids_are_cut(state: int, ids: list[int], cut: int) -> None:
    assert fold(fold(state, ids[:cut]), ids[cut:]) == fold(state, ids)


@given(state=STATES, first=st.integers(0, 2**32 - 1), other=st.integers(0, 2**32 - 1), rest=IDS)
def test_states_of_different_ids_never_meet_again(state: int, first: int, other: int, rest: list[int]) -> None:
    same = fold(state, [first, *rest]) == fold(state, [other, *rest])
    assert same == (first == other)


def test_a_request_seed_changes_the_state_and_none_is_not_zero() -> None:
    states = {initial_state(1, None), initial_state(1, 0), initial_state(1, 1), initial_state(2, 0)}
    assert len(states) == 4


@given(state=STATES, chosen=st.integers(0, 99), count=st.integers(1, 150))
def test_top_logprobs_are_descending_distinct_and_begin_with_the_chosen(state: int, chosen: int, count: int) -> None:
    top = top_logprobs(state, chosen, count, vocab_size=100)
    ids, values = [token_id for token_id, _ in top], [value for _, value in top]
    assert ids[0] == chosen
    assert len(set(ids)) == len(ids) == min(count, 100)
    assert values == sorted(values, reverse=True)
    assert all(logprob_of(state, chosen, token_id, 100) == value for token_id, value in top)
    assert sum(math.exp(value) for value in values) <= 1.0 + 1e-9


def test_embeddings_are_unit_vectors_that_depend_on_the_ids_and_their_order() -> None:
    vector = embedding_of([1, 2, 3])
    assert len(vector) == EMBEDDING_DIMENSIONS
    assert math.isclose(sum(number * number for number in vector), 1.0, rel_tol=1e-9)
    assert vector == embedding_of((1, 2, 3))
    assert vector != embedding_of([3, 2, 1])
