"""Aborts by rid: repeated until answered or given up, carried out once, whatever is lost, repeated or reordered."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from sglmt.delivery.aborts import REPEAT_AFTER_S, AskedAborts, SeenAborts

LIFE = 7
FOREVER_S = 1e9


def asked_by(asked: AskedAborts, deadline_s: float = FOREVER_S) -> list[bool]:
    """Ask for one; the list fills with what is answered."""
    answers: list[bool] = []
    asked.ask("r", False, deadline_s, answers.append)
    return answers


def test_an_abort_is_sent_at_once_and_again_until_it_is_answered() -> None:
    asked = AskedAborts()
    answers = asked_by(asked)
    assert [abort.number for abort in asked.due(0.0)] == [1]
    assert asked.due(REPEAT_AFTER_S * 0.99) == []
    assert [abort.number for abort in asked.due(REPEAT_AFTER_S)] == [1]
    assert answers == []
    asked.answer(1)
    asked.answer(1)
    assert answers == [True]
    assert asked.due(9 * REPEAT_AFTER_S) == []


def test_an_abort_nobody_answers_is_given_up_once_and_not_sent_any_more() -> None:
    asked = AskedAborts()
    answers = asked_by(asked, deadline_s=3.0)
    asked.due(0.0)
    assert asked.due(3.0) == []
    assert asked.due(4.0) == []
    asked.answer(1)  # too late
    assert answers == [False]


def test_what_is_settled_follows_the_oldest_that_is_open() -> None:
    asked = AskedAborts()
    assert asked.settled == 0
    for _ in range(3):
        asked_by(asked)
    assert asked.settled == 0
    asked.answer(2)
    assert asked.settled == 0
    asked.answer(1)
    assert asked.settled == 2
    asked.answer(3)
    assert asked.settled == 3


def test_a_copy_is_no_news_nor_is_one_that_was_given_up() -> None:
    seen = SeenAborts()
    assert seen.is_news(LIFE, 2, 0)
    assert not seen.is_news(LIFE, 2, 0)
    assert seen.is_news(LIFE, 1, 0)  # overtaken on its way
    assert seen.is_news(LIFE, 5, 4)
    assert not seen.is_news(LIFE, 3, 0)  # an old copy of one that is not open any more
    assert seen.is_news(LIFE + 1, 2, 0)


def test_a_life_that_is_gone_leaves_nothing() -> None:
    seen = SeenAborts()
    seen.is_news(LIFE, 1, 0)
    assert seen.lives() == [LIFE]
    seen.forget_life(LIFE)
    assert (seen.lives(), seen._seen, seen._settled) == ([], {}, {})


@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_each_is_carried_out_once_and_answered_whatever_the_network_does(seed: int, aborts: int) -> None:
    """Frames of both directions are lost, repeated and reordered; nobody dies."""
    rng, asked, seen = Random(seed), AskedAborts(), SeenAborts()
    carried_out: list[int] = []
    answers: list[list[bool]] = []
    under_way: list[tuple[int, int]] = []
    back: list[int] = []
    now_s = 0.0
    while len(answers) < aborts or not all(answers):
        now_s += REPEAT_AFTER_S / 2
        if len(answers) < aborts:
            answers.append(asked_by(asked))
        under_way += [(abort.number, asked.settled) for abort in asked.due(now_s)]
        rng.shuffle(under_way)
        for _ in range(rng.randrange(len(under_way) + 1)):
            number, settled = under_way.pop() if rng.random() < 0.8 else rng.choice(under_way)
            if rng.random() < 0.3:
                continue
            if seen.is_news(LIFE, number, settled):
                carried_out.append(number)
            back.append(number)
        rng.shuffle(back)
        while back and rng.random() < 0.8:
            number = back.pop()
            if rng.random() >= 0.3:
                asked.answer(number)
    assert sorted(carried_out) == list(range(1, aborts + 1))
    assert answers == [[True]] * aborts
    for number, settled in under_way:
        assert not seen.is_news(LIFE, number, settled)
    assert seen.is_news(LIFE, aborts + 1, asked.settled)
    assert seen._seen[LIFE] == {aborts + 1}
