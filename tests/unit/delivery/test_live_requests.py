"""When a worker names its live requests, and how often it submits one again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglmt.delivery.live_requests import (
    IDLE_LIST_INTERVAL_S,
    LIST_INTERVAL_S,
    MIN_LIST_GAP_S,
    RECOVERY_LIST_INTERVAL_S,
    ListClock,
    PeerGenerations,
    ResubmitBudget,
    columns_of_list,
)

PEERS = PeerGenerations(1, 1, (1, 1))
SOON_S = MIN_LIST_GAP_S * 1.01


def settled(now_s: float = 0.0, live: int = 1) -> ListClock:
    """A clock that has just seen a list go out."""
    clock = ListClock()
    clock.is_due(now_s, PEERS, live)
    clock.sent(now_s, live)
    return clock


def test_the_first_list_is_due_at_once() -> None:
    assert ListClock().is_due(0.0, PEERS, 1)


def test_lists_are_regular_while_something_is_live() -> None:
    clock = settled()
    assert not clock.is_due(LIST_INTERVAL_S * 0.99, PEERS, 1)
    assert clock.is_due(LIST_INTERVAL_S, PEERS, 1)


def test_each_change_of_any_peer_asks_for_a_list_soon() -> None:
    for peers in (
        PEERS._replace(scheduler=2),
        PEERS._replace(router=2),
        PEERS._replace(detokenizers=(1, 2)),
        PEERS._replace(scheduler=0),
    ):
        clock = settled()
        assert not clock.is_due(SOON_S, PEERS, 1)
        assert clock.is_due(SOON_S, peers, 1)
        clock.sent(SOON_S, 1)
        assert not clock.is_due(2 * SOON_S, peers, 1)


def test_a_change_seen_too_early_is_not_forgotten() -> None:
    clock = settled()
    changed = PEERS._replace(scheduler=2)
    assert not clock.is_due(MIN_LIST_GAP_S / 2, changed, 1)
    assert clock.is_due(SOON_S, changed, 1)


def test_urgency_asks_for_a_list_soon_but_not_at_once() -> None:
    clock = settled()
    clock.mark_urgent()
    assert not clock.is_due(MIN_LIST_GAP_S / 2, PEERS, 1)
    assert clock.is_due(SOON_S, PEERS, 1)


def test_after_the_last_request_one_more_list_then_only_now_and_then() -> None:
    clock = settled(live=1)
    assert clock.is_due(LIST_INTERVAL_S, PEERS, 0)
    clock.sent(LIST_INTERVAL_S, 0)
    assert not clock.is_due(LIST_INTERVAL_S + IDLE_LIST_INTERVAL_S * 0.99, PEERS, 0)
    assert clock.is_due(LIST_INTERVAL_S + IDLE_LIST_INTERVAL_S, PEERS, 0)


def test_an_idle_worker_does_not_mind_changes_of_peers() -> None:
    clock = settled(live=0)
    assert not clock.is_due(SOON_S, PEERS._replace(scheduler=2), 0)


def test_a_scheduler_that_asks_hears_often_from_idle_workers_too() -> None:
    for live in (0, 1):
        clock = settled(live=live)
        assert not clock.is_due(RECOVERY_LIST_INTERVAL_S * 0.99, PEERS, live, asked=True)
        assert clock.is_due(RECOVERY_LIST_INTERVAL_S, PEERS, live, asked=True)
        clock.sent(RECOVERY_LIST_INTERVAL_S, live)
        assert not clock.is_due(RECOVERY_LIST_INTERVAL_S * 1.99, PEERS, live, asked=True)


def test_a_late_row_asks_an_idle_worker_for_a_list() -> None:
    clock = settled(live=0)
    assert not clock.is_due(LIST_INTERVAL_S, PEERS, 0)
    clock.mark_late_row()
    assert clock.is_due(LIST_INTERVAL_S, PEERS, 0)
    clock.sent(LIST_INTERVAL_S, 0)
    assert not clock.is_due(2 * LIST_INTERVAL_S, PEERS, 0)


def test_list_numbers_rise() -> None:
    clock = ListClock()
    numbers = [clock.next_number() for _ in range(5)]
    assert numbers == sorted(set(numbers))


def test_a_budget_counts_resubmissions_without_a_new_token() -> None:
    budget = ResubmitBudget(2)
    assert [budget.spend(0) for _ in range(4)] == [True, True, False, False]


def test_every_new_token_refills_the_budget() -> None:
    budget = ResubmitBudget(1)
    assert all(budget.spend(tokens) for tokens in (0, 1, 2, 3))
    assert not budget.spend(3)


def test_no_budget_no_resubmission() -> None:
    assert not ResubmitBudget(0).spend(0)
    assert not ResubmitBudget(0).spend(7)


@given(st.integers(0, 4), st.lists(st.integers(0, 1), max_size=20))
def test_a_budget_ends_exactly_after_the_limit_in_a_row(limit: int, steps: list[int]) -> None:
    budget, tokens, in_a_row = ResubmitBudget(limit), 0, 0
    for new in steps:
        tokens += new
        in_a_row = 1 if new else in_a_row + 1
        assert budget.spend(tokens) == (in_a_row <= limit)
        assert budget.resubmits == in_a_row


@given(st.lists(st.tuples(st.integers(), st.integers(), st.integers())))
def test_columns_of_a_list_are_its_rows_on_their_side(rows: list[tuple[int, int, int]]) -> None:
    assert list(zip(*columns_of_list(rows), strict=True)) == rows


def test_a_request_that_no_list_has_named_is_told_to_be_over() -> None:
    """It was submitted and over between two ticks: the scheduler hears of it with the next ordinary list."""
    clock = ListClock()
    clock.is_due(0.0, PEERS, 0)
    clock.sent(0.0, 0)
    assert not clock.is_due(LIST_INTERVAL_S, PEERS, 0)
    clock.mark_submitted()
    assert not clock.is_due(LIST_INTERVAL_S * 0.99, PEERS, 0)
    assert clock.is_due(LIST_INTERVAL_S, PEERS, 0)
    clock.sent(LIST_INTERVAL_S, 0)
    assert not clock.is_due(2 * LIST_INTERVAL_S, PEERS, 0)
