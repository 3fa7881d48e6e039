"""Rows answered in columns and rows judged one by one give the same, whatever has happened before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from sglmt.delivery.keys import make_key, make_life
from sglmt.ipc.state_page import Slot, SlotWord, StatePage
from sglmt.messages.columns import pack, pack_ragged, unpack, unpack_ragged
from sglmt.messages.frame import Role
from sglmt.messages.sampling import FinishReason, TextSpec, TokenLogprobs
from sglmt.messages.to_detokenizer import BatchTokenIDOutput
from sglmt.messages.to_worker import BatchStrOutput
from sglmt.workers.row_text import RowText
from sglmt.workers.steady_rows import LENT, SteadyRows, TextState
from tests.unit.messages.instances import SEEDS, comparable
from tests.unit.workers.reference import PIECES, VOCAB, token_table

TABLE = token_table()
A = PIECES.index(b"a")
PLAIN = TextSpec()
SPECS = (
    PLAIN,
    PLAIN,
    PLAIN,
    TextSpec(stop=("abca", "\n\n")),
    TextSpec(stop=("b ",), no_stop_trim=True),
    TextSpec(skip_special_tokens=False),
    TextSpec(shown_ids=(0,)),
)
COUNTED = (SlotWord.ROWS_IN, SlotWord.GAP_ROWS, SlotWord.DUPLICATE_ROWS, SlotWord.STALE_ATTEMPT_ROWS)
LENGTH = FinishReason(kind="length")

Rows = list[tuple[int, int, int, list[int], TextSpec | None, FinishReason | None]]
"""(key, attempt, offset, ids, text spec, finish)."""


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Slot]]:
    page = StatePage.create(Path(tmp_path_factory.mktemp("page")) / "page", 1, 2)
    yield [page.occupy(number, Role.DETOKENIZER, number, 1) for number in range(2)]
    page.close()


class NothingSteady(SteadyRows):
    """No row is ever expected: each is judged by itself."""

    def append(self, state: TextState) -> None:
        """Not here."""


def row_by_row(slot: Slot) -> RowText:
    texts = RowText(TABLE, slot)
    texts._steady = NothingSteady(TABLE.skip)
    return texts


class Request:
    """One request as its engine has it."""

    def __init__(self, key: int, spec: TextSpec) -> None:
        self.key, self.spec = key, spec
        self.attempt = 1
        self.ids: list[int] = []
        self.sent = 0
        self.started = False


class Engine:
    """Batches of requests that run side by side. `wild`: how much of what comes is not the next id in its order."""

    def __init__(self, rng: Random, wild: float) -> None:
        self.rng, self.wild = rng, wild
        self.requests: list[Request] = []
        self.counter = 0

    def happens(self, chance: float) -> bool:
        return self.rng.random() < chance * self.wild

    def next_rows(self) -> Rows:
        rng = self.rng
        rows, ended, joined = [], [], []
        if self.happens(0.1):
            rng.shuffle(self.requests)
        for request in self.requests:
            if self.happens(0.05):
                continue  # paused
            row = self.row_of(request)
            if row[5] is not None and rng.random() < 0.5:
                ended.append(row)  # behind those that go on
            else:
                rows.append(row)
        self.requests = [one for one in self.requests if not any(one.key == row[0] and row[5] for row in rows + ended)]
        for _ in range(rng.choice((0, 0, 0, 1, 2)) if self.requests else 4):
            self.counter += 1
            key = make_key(make_life(self.counter % 3, 1), self.counter)
            self.requests.append(Request(key, rng.choice(SPECS)))
            joined.append(self.row_of(self.requests[-1]))
        if rows and self.happens(0.05):  # one more row of a request that has one, or of one that ended
            again = Request(rng.choice([*rows, *ended, *joined])[0], PLAIN)
            again.attempt = rng.randrange(1, 3)
            rows.insert(rng.randrange(len(rows) + 1), self.row_of(again))
        return joined + rows + ended if rng.random() < 0.2 else rows + ended + joined

    def row_of(self, request: Request) -> tuple[int, int, int, list[int], TextSpec | None, FinishReason | None]:
        rng = self.rng
        if not request.started and rng.random() < 0.3:
            request.started = True
            return (request.key, 1, 0, [], request.spec, None)  # admitted
        new = rng.randrange(4) if self.happens(0.1) else 1
        request.ids += [rng.randrange(VOCAB) for _ in range(new)]
        if self.happens(0.02):
            request.ids.append(VOCAB + rng.randrange(3))
        if self.happens(0.02):
            request.attempt += 1
            request.started = False
        offset = request.sent
        if not request.started or self.happens(0.03):
            offset = 0
        elif self.happens(0.03):
            offset = rng.randrange(len(request.ids) + 1)
        elif self.happens(0.03):
            request.sent = len(request.ids)  # lost on the way
        attempt = max(1, request.attempt - self.happens(0.03))
        spec = None if offset or (request.started and request.sent == 0) else request.spec
        request.started, request.sent = True, len(request.ids)
        finish = LENGTH if rng.random() < 0.04 else None
        return (request.key, attempt, offset, request.ids[offset:], spec, finish)

    def forgotten(self) -> list[int]:
        """Keys of requests that end without a row."""
        gone = [one for one in self.requests if self.happens(0.03)]
        self.requests = [one for one in self.requests if one not in gone]
        return [one.key for one in gone]


def batch_of(rng: Random, rows: Rows) -> BatchTokenIDOutput:
    made = BatchTokenIDOutput(
        keys=pack("Q", [row[0] for row in rows]),
        attempts=pack("I", [row[1] for row in rows]),
        offsets=pack("I", [row[2] for row in rows]),
        output_ids=pack_ragged("I", [row[3] for row in rows]),
        text_specs={number: row[4] for number, row in enumerate(rows) if row[4] is not None},
        finish_reasons={number: row[5] for number, row in enumerate(rows) if row[5] is not None},
    )
    if rng.random() < 0.2:
        made.output_logprobs = {
            number: TokenLogprobs(chosen=[float(value) for value in row[3]])
            for number, row in enumerate(rows)
            if rng.random() < 0.5
        }
        made.rids = [str(row[0]) for row in rows]
        made.weight_version = ""
    return made


def by_key(out: dict[int, BatchStrOutput]) -> dict[int, dict[str, Any]]:
    """What each life gets, rows in the order of their keys: those of one request keep theirs."""
    shown = {}
    for life, rows in out.items():
        rows.check()
        keys = unpack("Q", rows.keys)
        shown[life] = comparable(rows.take(sorted(range(len(keys)), key=keys.__getitem__)))
    return shown


def check_same(fast: RowText, slow: RowText, before: list[list[int]], slots: list[Slot]) -> None:
    """Everything that can be seen of both, but for the order of what is told of different requests."""
    for name in ("finished", "gaps"):
        assert sorted(getattr(fast, name), key=repr) == sorted(getattr(slow, name), key=repr)
        getattr(fast, name).clear()
        getattr(slow, name).clear()
    assert sorted(fast.held()) == sorted(slow.held())
    changes = [
        [slot[word] - was for word, was in zip(COUNTED, old, strict=True)]
        for slot, old in zip(slots, before, strict=True)
    ]
    assert changes[0] == changes[1]
    expected = {state.key: state for state in fast._steady.states}
    assert expected == {key: state for key, state in fast._states.items() if state.next_offset == LENT}


@given(seed=SEEDS, wild=st.sampled_from([0.0, 0.2, 1.0, 3.0]))
@settings(max_examples=150, deadline=None)
def test_any_history_gives_the_same_rows_either_way(slots: list[Slot], seed: int, wild: float) -> None:
    rng = Random(seed)
    engine = Engine(rng, wild)
    fast, slow = RowText(TABLE, slots[0]), row_by_row(slots[1])
    steady = 0
    for _ in range(30):
        before = [[slot[word] for word in COUNTED] for slot in slots]
        if engine.happens(0.05):
            engine.next_rows()  # lost as a whole
        batch = batch_of(rng, engine.next_rows())
        was_steady = len(fast._steady)
        for _ in range(1 + engine.happens(0.05)):
            assert by_key(fast.turn(batch)) == by_key(slow.turn(batch))
        check_same(fast, slow, before, slots)
        steady += bool(was_steady and len(fast._steady))
        gone = engine.forgotten()
        fast.forget(gone)
        slow.forget(gone)
    fast._steady.give_back()
    for key, state in slow._states.items():
        other = fast._states[key]
        assert (other.attempt, other.next_offset, other.chars) == (state.attempt, state.next_offset, state.chars)
    event(f"steady in {steady // 10}x of 30 batches")


def steps(texts: RowText, batches: list[Rows]) -> list[dict[int, BatchStrOutput]]:
    return [texts.turn(batch_of(Random(7), rows)) for rows in batches]


def running(count: int, offset: int, without: tuple[int, ...] = ()) -> Rows:
    """One id of each request."""
    return [(key, 1, offset, [A], None if offset else PLAIN, None) for key in range(count) if key not in without]


def test_rows_are_steady_from_their_first_id_to_their_last(slots: list[Slot]) -> None:
    texts = RowText(TABLE, slots[0])
    steps(texts, [running(8, 0), running(8, 1)])
    assert len(texts._steady) == 8
    ending = [(3, 1, 2, [A], None, LENGTH)]
    joining = [(9, 1, 0, [A], PLAIN, None)]
    (out,) = steps(texts, [running(8, 2, without=(3,)) + ending + joining])
    assert sorted(unpack("Q", out[0].keys)) == [*range(8), 9]
    assert out[0].finish_reasons == {unpack("Q", out[0].keys).index(3): LENGTH}
    assert [state.key for state in texts._steady.states] == [0, 1, 2, 4, 5, 6, 7, 9]


def test_a_request_that_pauses_does_not_disturb_the_others(slots: list[Slot]) -> None:
    texts = RowText(TABLE, slots[0])
    steps(texts, [running(8, 0), running(8, 1), running(8, 2, without=(5,))])
    assert [state.key for state in texts._steady.states] == [0, 1, 2, 3, 4, 6, 7]
    (out,) = steps(texts, [[*running(8, 3, without=(5,)), (5, 1, 2, [A], None, None)]])
    assert out[0].texts == ["a"] * 8
    assert len(texts._steady) == 8


def test_a_batch_of_new_requests_only_leaves_the_others_steady(slots: list[Slot]) -> None:
    texts = RowText(TABLE, slots[0])
    steps(texts, [running(4, 0), running(4, 1), [(9, 1, 0, [A], PLAIN, None)]])
    assert [state.key for state in texts._steady.states] == [0, 1, 2, 3, 9]


def test_of_two_rows_of_one_request_the_first_is_judged_first(slots: list[Slot]) -> None:
    """A restart before the rows that were expected: the old attempt's row behind it is stale."""
    texts = RowText(TABLE, slots[0])
    steps(texts, [running(4, 0), running(4, 1)])
    restart = (0, 2, 0, [A, A], PLAIN, None)
    (out,) = steps(texts, [[restart, *running(4, 2)]])
    assert unpack("Q", out[0].keys) == (0, 1, 2, 3)
    assert unpack("I", out[0].attempts) == (2, 1, 1, 1)
    assert out[0].texts == ["aa", "a", "a", "a"]


def test_a_batch_that_was_lost_is_a_gap_of_each_request(slots: list[Slot]) -> None:
    texts = RowText(TABLE, slots[0])
    steps(texts, [running(4, 0), running(4, 1)])
    (out,) = steps(texts, [[*running(4, 3), (9, 1, 0, [A], PLAIN, None)]])
    assert unpack("Q", out[0].keys) == (9,)
    assert texts.gaps == [(key, 1) for key in range(4)]


def test_an_engine_without_an_order_of_its_own_makes_nothing_steady(slots: list[Slot]) -> None:
    texts = RowText(TABLE, slots[0])
    steps(texts, [running(8, 0), running(8, 1)[::-1]])
    assert len(texts._steady) == 0
    steps(texts, [running(8, 2), running(8, 3)[::-1]])
    assert len(texts._steady) == 0
    steps(texts, [running(8, 4)[::-1]])
    assert len(texts._steady) == 8  # the same order twice


def test_every_column_but_the_lengths_of_one_id_each_is_compared(slots: list[Slot]) -> None:
    """A batch that has more than was expected, in whatever column, is not taken for the expected one."""
    texts = RowText(TABLE, slots[0])
    steps(texts, [running(2, 0), running(2, 1)])
    assert texts._steady.is_all_of(batch_of(Random(7), running(2, 2)))
    for name, value in (("weight_version", "v"), ("prompt_tokens", {0: 1}), ("dp_ranks", pack("I", [0, 1]))):
        batch = batch_of(Random(7), running(2, 2))
        setattr(batch, name, value)
        assert not texts._steady.is_all_of(batch)
    for ids in ([[A], [A, A]], [[A], []], [[A]]):
        batch = batch_of(Random(7), running(2, 2))
        batch.output_ids = pack_ragged("I", ids)
        assert not texts._steady.is_all_of(batch)


@pytest.mark.parametrize("name", ["attempts", "offsets", "output_ids"])
def test_a_column_of_the_wrong_size_is_refused_and_costs_nothing(slots: list[Slot], name: str) -> None:
    texts = RowText(TABLE, slots[0])
    steps(texts, [running(4, 0), running(4, 1)])
    good, longer = batch_of(Random(7), running(4, 2)), batch_of(Random(7), running(5, 2))
    batch = batch_of(Random(7), running(4, 2))
    setattr(batch, name, getattr(longer, name))
    with pytest.raises(ValueError, match=name):
        texts.turn(batch)
    assert texts.turn(good)[0].texts == ["a"] * 4


def test_unpacked_ids_are_those_that_came(slots: list[Slot]) -> None:
    texts = RowText(TABLE, slots[0])
    rows: Rows = [(key, 1, 2, [key % VOCAB], None, None) for key in range(6)]
    out = steps(texts, [running(6, 0), running(6, 1), rows])[-1]
    assert unpack_ragged("I", out[0].output_ids) == [(key,) for key in range(6)]
