"""The numbers and sentences of the restart policy: backoff, budget, words for an exit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglmt.supervisor.restart_policy import (
    RestartPolicy,
    backoff_delay_s,
    budget_spent,
    deaths_within,
    describe_exit,
    exit_name,
    tree_exit_code,
)

PLAIN = RestartPolicy(jitter=0.0)


@pytest.mark.parametrize(
    ("failures", "delay_s"), [(0, 0.0), (1, 0.5), (2, 1.0), (3, 2.0), (6, 16.0), (7, 30.0), (10_000, 30.0)]
)
def test_backoff_grows_to_its_cap_and_never_overflows(failures: int, delay_s: float) -> None:
    assert backoff_delay_s(PLAIN, failures, lambda: 0.5) == delay_s


@given(st.integers(1, 5000), st.floats(0, 1, exclude_max=True))
def test_jitter_only_shortens_and_by_no_more_than_its_share(failures: int, draw: float) -> None:
    plain_s = backoff_delay_s(PLAIN, failures, lambda: 0.0)
    delay_s = backoff_delay_s(RestartPolicy(jitter=0.1), failures, lambda: draw)
    assert plain_s * 0.9 <= delay_s <= plain_s


def test_jitter_spreads_also_at_the_cap() -> None:
    policy = RestartPolicy(jitter=0.1)
    assert backoff_delay_s(policy, 50, lambda: 0.0) != backoff_delay_s(policy, 50, lambda: 0.9)


def test_a_death_leaves_the_window() -> None:
    assert deaths_within(PLAIN, (0.0, 30.0, 60.0), 60.0) == (30.0, 60.0)


@pytest.mark.parametrize(("deaths", "in_a_row", "spent"), [(5, 5, False), (6, 6, True), (1, 100, False)])
def test_budget_is_a_number_of_deaths_in_the_window(deaths: int, in_a_row: int, spent: bool) -> None:
    assert budget_spent(PLAIN, deaths, in_a_row) is spent


def test_slow_failures_can_be_limited_too() -> None:
    policy = RestartPolicy(max_failed_starts=3)
    assert not budget_spent(policy, 1, 3)
    assert budget_spent(policy, 1, 4)


@pytest.mark.parametrize(
    ("code", "sig", "text"),
    [
        (0, None, "exit code 0"),
        (3, None, "exit code 3"),
        (None, 15, "signal SIGTERM (15)"),
        (-15, None, "signal SIGTERM (15)"),
        (None, 7, "signal SIGBUS (7), shared memory full"),
        (None, 9, "signal SIGKILL (9), perhaps out of memory"),
        (-9, None, "signal SIGKILL (9), perhaps out of memory"),
        (None, 11, "signal SIGSEGV (11), a crash in native code"),
        (None, 99, "signal 99"),
        (None, None, "exit status unknown"),
    ],
)
def test_an_exit_in_words(code: int | None, sig: int | None, text: str) -> None:
    assert describe_exit(code, sig).startswith(text)
    assert text.startswith(exit_name(code, sig))  # the name alone guesses no cause


@pytest.mark.parametrize(("code", "expected"), [(66, 66), (0, 70), (None, 70), (-9, 70), (256, 70)])
def test_a_tree_never_ends_with_zero_for_a_dead_child(code: int | None, expected: int) -> None:
    assert tree_exit_code(code) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"stop_grace_s": math.inf},
        {"backoff_cap_s": -1.0},
        {"jitter": 1.5},
        {"backoff_factor": 0.5},
        {"max_restarts": -1},
        {"max_failed_starts": -1},
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_by_field(wrong: dict[str, float]) -> None:
    (field,) = wrong
    with pytest.raises(ValueError, match=field):
        RestartPolicy(**wrong)  # type: ignore[arg-type]
