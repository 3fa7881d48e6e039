"""The scheduler's records: what a worker's list brings to light, who holds a rid, and what a dead life leaves."""

from __future__ import annotations

from array import array

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglmt.delivery.keys import counter_of, life_of, make_key, make_life
from sglmt.delivery.ledger import BEHIND_AFTER_S, Ledger, Reconciliation, Record, Stage

LIFE = make_life(1, 1)
NOTHING = Reconciliation([], [], [])


def key(counter: int, life: int = LIFE) -> int:
    return make_key(life, counter)


def record(counter: int, attempt: int = 1, rid: str = "r", group: int | None = None, life: int = LIFE) -> Record:
    made = key(counter, life)
    return Record(made, attempt, rid, made if group is None else group, None, array("I"))


def ledger_of(*records: Record) -> Ledger:
    ledger = Ledger()
    for one in records:
        ledger.add(one)
    return ledger


def sent(one: Record, tokens: int, finish: bool = False) -> Record:
    one.output_ids = array("I", range(tokens))
    one.sent, one.start_sent, one.finish_sent = tokens, True, finish
    return one


def test_a_request_nobody_here_knows_is_named() -> None:
    ledger = ledger_of(record(1))
    result = ledger.reconcile(LIFE, 1, 2, [(key(1), 1, 0), (key(2), 3, 5)], 0.0)
    assert result == Reconciliation([], [], [(key(2), 3)])


def test_a_request_known_under_an_older_attempt_only_is_named() -> None:
    result = ledger_of(record(1, attempt=1)).reconcile(LIFE, 1, 1, [(key(1), 2, 0)], 0.0)
    assert result == Reconciliation([], [], [(key(1), 2)])


def test_a_list_from_before_a_resubmission_changes_nothing() -> None:
    ledger = ledger_of(sent(record(1, attempt=2), 5))
    assert ledger.reconcile(LIFE, 1, 1, [(key(1), 1, 0)], 0.0) == NOTHING
    assert ledger.get(key(1), 2) is not None


def test_what_is_absent_is_forgotten_up_to_the_counter_the_list_speaks_for() -> None:
    first, second, newer = record(1, rid="a"), record(2, rid="b"), record(3, rid="c")
    ledger = ledger_of(first, second, newer)
    assert ledger.reconcile(LIFE, 1, 2, [(key(2), 1, 0)], 0.0).forget == [first]
    assert list(ledger.records.values()) == [second, newer]
    assert not ledger.rid_is_taken("a", 0)
    assert ledger.rid_is_taken("b", 0)


def test_another_life_is_untouched() -> None:
    other = record(1, life=make_life(2, 1), rid="other")
    ledger = ledger_of(record(1), other)
    ledger.reconcile(LIFE, 1, 9, [], 0.0)
    assert list(ledger.records.values()) == [other]


def test_an_older_list_or_the_same_again_is_ignored() -> None:
    ledger = ledger_of(record(1))
    assert ledger.reconcile(LIFE, 5, 0, [], 0.0) == NOTHING
    for number in (4, 5):
        assert ledger.reconcile(LIFE, number, 9, [(key(8), 1, 0)], 0.0) == NOTHING
    assert len(ledger.records) == 1
    assert ledger.reconcile(LIFE, 6, 9, [], 0.0).forget


def test_rows_under_way_are_not_behind_and_lost_ones_are() -> None:
    one = sent(record(1), 5)
    ledger = ledger_of(one)
    late_s = BEHIND_AFTER_S
    assert not ledger.reconcile(LIFE, 1, 1, [(key(1), 1, 2)], 0.0).resume
    assert not ledger.reconcile(LIFE, 2, 1, [(key(1), 1, 2)], late_s / 2).resume
    assert ledger.reconcile(LIFE, 3, 1, [(key(1), 1, 2)], late_s).resume == [one]


def test_progress_starts_the_wait_anew() -> None:
    one = sent(record(1), 5)
    ledger = ledger_of(one)
    for number in range(1, 5):
        assert not ledger.reconcile(LIFE, number, 1, [(key(1), 1, number)], number * BEHIND_AFTER_S).resume


def test_nothing_sent_is_nothing_lost() -> None:
    ledger = ledger_of(record(1))
    for number in range(1, 5):
        assert not ledger.reconcile(LIFE, number, 1, [(key(1), 1, 0)], float(number)).resume


def test_all_tokens_here_and_the_finish_lost_is_behind() -> None:
    one = sent(record(1), 5, finish=True)
    ledger = ledger_of(one)
    assert not ledger.reconcile(LIFE, 1, 1, [(key(1), 1, 5)], 0.0).resume
    assert ledger.reconcile(LIFE, 2, 1, [(key(1), 1, 5)], 1.0).resume == [one]


def test_a_finish_without_any_token_lost_is_behind() -> None:
    one = sent(record(1), 0, finish=True)
    ledger = ledger_of(one)
    assert not ledger.reconcile(LIFE, 1, 1, [(key(1), 1, 0)], 0.0).resume
    assert ledger.reconcile(LIFE, 2, 1, [(key(1), 1, 0)], 1.0).resume == [one]


def test_after_a_replay_the_wait_starts_anew() -> None:
    one = sent(record(1), 5)
    ledger = ledger_of(one)
    ledger.reconcile(LIFE, 1, 1, [(key(1), 1, 2)], 0.0)
    assert ledger.reconcile(LIFE, 2, 1, [(key(1), 1, 2)], 1.0).resume
    one.rewind()
    assert (one.sent, one.start_sent, one.finish_sent) == (0, False, False)
    sent(one, 5)
    assert not ledger.reconcile(LIFE, 3, 1, [(key(1), 1, 2)], 1.1).resume
    assert ledger.reconcile(LIFE, 4, 1, [(key(1), 1, 2)], 2.0).resume


def test_news_is_what_was_never_seen_or_a_higher_attempt() -> None:
    ledger = ledger_of(record(1, attempt=2))
    assert [ledger.is_news(key(1), attempt) for attempt in (1, 2, 3)] == [False, False, True]
    assert ledger.is_news(key(2), 1)
    assert ledger.get(key(1), 1) is None
    assert ledger.get(key(1), 2) is not None


def test_a_higher_attempt_replaces_and_keeps_the_rid() -> None:
    first, second = record(1, attempt=1), record(1, attempt=2)
    ledger = ledger_of(first)
    assert ledger.add(second) is first
    assert ledger.keys_of_rid("r") == [key(1)]
    ledger.release_rid(second)
    assert not ledger.rid_is_taken("r", 0)


def test_a_rid_belongs_to_one_group_until_its_last_member_ends() -> None:
    first, second = record(1, group=key(1)), record(2, group=key(1))
    ledger = ledger_of(first, second)
    assert not ledger.rid_is_taken("r", key(1))
    assert ledger.rid_is_taken("r", key(3))
    assert ledger.keys_of_rid("r") == [key(1), key(2)]
    ledger.release_rid(first)
    first.stage = Stage.FINISHED
    assert ledger.rid_is_taken("r", key(3))
    assert ledger.keys_of_rid("r") == [key(2)]
    ledger.release_rid(second)
    assert not ledger.rid_is_taken("r", key(3))


def test_a_refused_duplicate_neither_holds_nor_frees_the_rid() -> None:
    owner, duplicate = record(1), record(2)
    ledger = ledger_of(owner, duplicate)
    ledger.release_rid(duplicate)
    ledger.remove(duplicate.key)
    assert ledger.rid_is_taken("r", duplicate.group)
    assert ledger.keys_of_rid("r") == [key(1)]


def test_rids_are_exact() -> None:
    ledger = ledger_of(record(1, rid="r-1"), record(2, rid="r-10"), record(3, rid=""))
    assert ledger.keys_of_rid("r-1") == [key(1)]
    assert ledger.keys_of_rid("r-") == []
    assert ledger.keys_of_rid("") == [key(3)]


def test_a_dead_life_leaves_nothing() -> None:
    ledger = ledger_of(record(1, rid="a"), record(2, rid="b"))
    ledger.reconcile(LIFE, 3, 0, [], 0.0)
    assert [one.key for one in ledger.forget_life(LIFE)] == [key(1), key(2)]
    assert ledger.records == {}
    assert ledger.lives() == []
    assert not ledger.rid_is_taken("a", 0)


def test_a_dead_life_that_only_sent_lists_leaves_nothing_either() -> None:
    ledger = Ledger()
    ledger.reconcile(LIFE, 3, 0, [], 0.0)
    assert ledger.lives() == [LIFE]
    assert ledger.forget_life(LIFE) == []
    assert ledger.lives() == []


class LedgerBooks(RuleBasedStateMachine):
    """Whatever is added, replaced, ended and forgotten: the indexes say what the records say."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.number = 0

    @rule(life=st.integers(1, 2), counter=st.integers(1, 4), attempt=st.integers(1, 3), rid=st.sampled_from("ab"))
    def add(self, life: int, counter: int, attempt: int, rid: str) -> None:
        made = key(counter, life)
        if self.ledger.is_news(made, attempt):
            self.ledger.add(record(counter, attempt, rid, key(counter // 2 * 2, life), life))

    @rule(life=st.integers(1, 2), counter=st.integers(1, 4))
    def end(self, life: int, counter: int) -> None:
        one = self.ledger.records.get(key(counter, life))
        if one is not None:
            one.stage = Stage.FINISHED
            self.ledger.release_rid(one)

    @rule(life=st.integers(1, 2), counter=st.integers(1, 4))
    def remove(self, life: int, counter: int) -> None:
        self.ledger.remove(key(counter, life))

    @rule(life=st.integers(1, 2), up_to=st.integers(0, 5), named=st.sets(st.integers(1, 4)))
    def reconcile(self, life: int, up_to: int, named: set[int]) -> None:
        self.number += 1
        known = {one.key for one in self.ledger.of_life(life)}
        listed = [(key(counter, life), 1, 0) for counter in named]
        result = self.ledger.reconcile(life, self.number, up_to, listed, 0.0)
        absent = known - {key(counter, life) for counter in named}
        assert {one.key for one in result.forget} == {one for one in absent if counter_of(one) <= up_to}
        assert {one for one, _attempt in result.unknown} == {one for one, _a, _o in listed} - known

    @rule(life=st.integers(1, 2))
    def die(self, life: int) -> None:
        self.ledger.forget_life(life)

    @invariant()
    def books_agree(self) -> None:
        ledger = self.ledger
        by_life: dict[int, dict[int, Record]] = {}
        held: dict[str, int] = {}
        for one in ledger.records.values():
            by_life.setdefault(life_of(one.key), {})[one.key] = one
            held[one.rid] = held.get(one.rid, 0) + one.holds_rid
        assert ledger._by_life == by_life
        counts = {rid: count for rid, (_group, count) in ledger._group_of_rid.items()}
        assert counts == {rid: count for rid, count in held.items() if count}


TestLedgerBooks = LedgerBooks.TestCase
TestLedgerBooks.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


# what continues


def test_requests_named_as_unknown_are_awaited_until_they_come_or_are_named_no_more() -> None:
    ledger = Ledger()
    ledger.reconcile(LIFE, 1, 9, [(key(1), 1, 4), (key(2), 1, 0), (key(3), 1, 0)], 0.0)
    assert (ledger.unsubmitted(), ledger.has_listed(LIFE), ledger.has_listed(LIFE + 1)) == (3, True, False)
    ledger.add(record(1, attempt=2, rid="a"))
    assert ledger.unsubmitted() == 2
    ledger.reconcile(LIFE, 1, 9, [], 0.0)  # an old list says nothing
    assert ledger.unsubmitted() == 2
    ledger.reconcile(LIFE, 2, 9, [(key(1), 2, 4), (key(3), 1, 0)], 0.0)
    assert ledger.unsubmitted() == 1
    ledger.forget_life(LIFE)
    assert ledger.unsubmitted() == 0


def continued(prefix: int, stage: Stage, attempt: int = 2) -> Record:
    one = Record(key(1), attempt, "r", key(1), None, list(range(prefix)))
    one.stage = stage
    return one


def test_a_request_continues_from_when_its_worker_has_something_new() -> None:
    for stage in (Stage.QUEUED, Stage.RUNNING, Stage.FINISHED):
        one = continued(4, stage)
        ledger = ledger_of(one)
        assert one.continues
        ledger.reconcile(LIFE, 1, 1, [(key(1), 2, 4)], 0.0)
        assert one.continues
        ledger.reconcile(LIFE, 2, 1, [(key(1), 2, 5)], 0.0)
        assert not one.continues
        one.rewind()  # a replay takes nothing from the worker
        assert not one.continues


def test_what_is_new_or_only_waits_as_before_does_not_continue() -> None:
    assert not continued(0, Stage.RUNNING, attempt=1).continues
    assert not continued(0, Stage.QUEUED).continues
    assert continued(0, Stage.RUNNING).continues
