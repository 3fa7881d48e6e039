"""The simulator's columns: whoever comes, ends or is taken out, every request gets the ids it would get alone."""

from __future__ import annotations

import os
from zlib import crc32

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglmt.engines.simulator_runs import PlainRuns
from sglmt.engines.token_source import number

PREFIXED = range(3, 40)  # special ids first: no table
GAPPED = [0, 1, 2, 5, 6, 30, 31]


def ids_alone(allowed: list[int], state: int, tokens: int) -> list[int]:
    """What a request gets, by the definition of the token source."""
    ids = []
    for _ in range(tokens):
        token_id = allowed[(number(state) >> 32) % len(allowed)]
        state = crc32(token_id.to_bytes(4, "little"), state)
        ids.append(token_id)
    return ids


class Histories(RuleBasedStateMachine):
    """Requests are added, taken out, added again under the same key, and advance."""

    @initialize(gapped=st.booleans())
    def make(self, gapped: bool) -> None:
        self.allowed = GAPPED if gapped else list(PREFIXED)
        self.runs = PlainRuns(self.allowed)
        self.left: dict[int, list[int]] = {}  # key → ids that are still to come

    @rule(key=st.integers(0, 8), state=st.integers(0, 2**32 - 1), tokens=st.integers(1, 5))
    def add(self, key: int, state: int, tokens: int) -> None:
        if key in self.left:
            self.runs.discard(key)
        self.runs.add(key, state, tokens)
        self.left[key] = ids_alone(self.allowed, state, tokens)

    @rule(key=st.integers(0, 8))
    def discard(self, key: int) -> None:
        self.runs.discard(key)
        self.left.pop(key, None)

    @precondition(lambda self: self.left)
    @rule()
    def advance(self) -> None:
        step = self.runs.advance()
        got = dict(zip(step.keys, step.token_ids, strict=True))
        assert len(got) == len(step.keys)
        for output in step.outputs:
            assert output.finish_kind == "length"
            assert output.key not in got
            (got[output.key],) = output.token_ids
            assert len(self.left[output.key]) == 1
        assert got == {key: ids.pop(0) for key, ids in self.left.items()}
        assert {output.key for output in step.outputs} == {key for key, ids in self.left.items() if not ids}
        self.left = {key: ids for key, ids in self.left.items() if ids}

    @rule()
    def clear(self) -> None:
        self.runs.clear()
        self.left.clear()

    @invariant()
    def the_same_requests_are_known(self) -> None:
        if hasattr(self, "runs"):
            assert sorted(self.runs.keys) == sorted(self.left)
            assert all(key in self.runs for key in self.left)


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=200, stateful_step_count=30, deadline=None, derandomize="CI" in os.environ
)


@pytest.mark.parametrize("allowed", [list(PREFIXED), GAPPED])
def test_nothing_stays_of_requests_that_have_ended(allowed: list[int]) -> None:
    runs = PlainRuns(allowed)
    for key in range(50):
        runs.add(key, key, 1 + key % 7)
    runs.discard(3)
    for _ in range(7):
        runs.advance()
    assert (runs.keys, list(runs._states), runs._last_ticks, runs._rows, runs._ending) == ([], [], [], {}, {})


def test_nothing_is_kept_of_a_request_that_was_taken_out() -> None:
    runs = PlainRuns(GAPPED)
    for key in range(100):
        runs.add(key, key, 1000 + key % 3)
    for key in range(100):
        runs.discard(key)
    assert not runs._ending
    assert not runs.keys
