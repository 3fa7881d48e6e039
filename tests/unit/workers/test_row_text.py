"""Token rows to text rows: the text of a full decode however rows are grouped, cut, repeated or replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglmt.delivery.keys import make_key, make_life
from sglmt.ipc.state_page import Slot, SlotWord, StatePage
from sglmt.messages.columns import columns_of, pack, pack_ragged, unpack, unpack_ragged
from sglmt.messages.frame import Role
from sglmt.messages.sampling import FinishReason, TextSpec, TokenLogprobs
from sglmt.messages.to_detokenizer import BatchTokenIDOutput
from sglmt.messages.to_scheduler import FinishReq
from sglmt.messages.to_worker import BatchStrOutput
from sglmt.workers.outgoing_rows import PASSED_COLUMNS
from sglmt.workers.row_text import RowText
from tests.unit.workers.reference import PIECES, VOCAB, decoded, text_of, token_table

TABLE = token_table()
PLAIN = TextSpec()
LENGTH = FinishReason(kind="length")
A, B, C, AB, BC = (PIECES.index(piece) for piece in (b"a", b"b", b"c", b"ab", b"bc"))
SPACE, NEWLINE, E1, E2 = (PIECES.index(piece) for piece in (b" ", b"\n", b"\xc3", b"\xa9"))
X1, X2 = PIECES.index(b"\xe9"), PIECES.index(b"\x91\xab")


@pytest.fixture(scope="module")
def slot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slot]:
    page = StatePage.create(Path(tmp_path_factory.mktemp("page")) / "page", 1, 1)
    yield page.occupy(0, Role.DETOKENIZER, 0, 1)
    page.close()


@dataclass
class Row:
    """One row of an incoming batch."""

    key: int
    offset: int
    ids: Sequence[int]
    spec: TextSpec | None = None
    finish: FinishReason | None = None
    attempt: int = 1
    logprobs: TokenLogprobs | None = None


def batch(*rows: Row) -> BatchTokenIDOutput:
    made = BatchTokenIDOutput(
        keys=pack("Q", [row.key for row in rows]),
        attempts=pack("I", [row.attempt for row in rows]),
        offsets=pack("I", [row.offset for row in rows]),
        output_ids=pack_ragged("I", [row.ids for row in rows]),
        text_specs={n: row.spec for n, row in enumerate(rows) if row.spec is not None},
        finish_reasons={n: row.finish for n, row in enumerate(rows) if row.finish is not None},
        output_logprobs={n: row.logprobs for n, row in enumerate(rows) if row.logprobs is not None},
    )
    made.check()
    return made


@dataclass
class Got:
    """What a worker that takes everything in order has of one request."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    chosen: list[float | None] = field(default_factory=list)


def turn(texts: RowText, *rows: Row) -> dict[int, Got]:
    """One batch through `texts`; checks that offsets of what comes out fit, and joins it by key."""
    got: dict[int, Got] = {}
    for out in texts.turn(batch(*rows)).values():
        collect(out, got)
    return got


def turned(texts: RowText, rows: BatchTokenIDOutput) -> BatchStrOutput:
    """The text rows of a batch that is all of one life."""
    (out,) = texts.turn(rows).values()
    return out


def collect(out: BatchStrOutput, got: dict[int, Got]) -> None:
    """Join the rows of `out` to what is there; a row that overlaps must agree."""
    out.check()
    columns = zip(
        unpack("Q", out.keys),
        unpack("I", out.offsets),
        unpack("I", out.text_offsets),
        unpack_ragged("I", out.output_ids),
        out.texts,
        strict=True,
    )
    for row, (key, offset, text_offset, ids, text) in enumerate(columns):
        one = got.setdefault(key, Got())
        if offset == 0 and not one.ids:
            one.text, one.ids = one.text[:text_offset], []
        one.ids[offset:] = ids
        one.text = one.text[:text_offset] + text
        one.finish = out.finish_reasons.get(row, one.finish)
        if row in out.output_logprobs:
            logprobs = out.output_logprobs[row]
            assert len(logprobs.chosen) == len(ids)
            one.chosen[offset:] = logprobs.chosen


ids_of_text = st.lists(st.integers(0, VOCAB - 1), max_size=14)
stop_lists = st.sampled_from([(), ("ab",), ("bca", "a\n"), ("é", "cabab"), ("鑫", "b "), ("a", "ab", "\ufffd")])


def cuts(data: st.DataObject, count: int) -> list[int]:
    """Where `count` ids are cut into rows."""
    return [0, *sorted(data.draw(st.lists(st.integers(0, count), max_size=5))), count]


@given(ids=ids_of_text, stops=stop_lists, keep=st.booleans(), data=st.data())
def test_any_grouping_gives_the_text_of_a_full_decode_up_to_the_stop(
    slot: Slot, ids: list[int], stops: tuple[str, ...], keep: bool, data: st.DataObject
) -> None:
    spec = TextSpec(stop=stops, no_stop_trim=keep)
    wanted = text_of(ids, spec, "length", None)
    texts, got = RowText(TABLE, slot), {1: Got()}
    bounds = cuts(data, len(ids))
    for number, (start, end) in enumerate(pairwise(bounds)):
        last = number == len(bounds) - 2
        probabilities = TokenLogprobs(chosen=[float(i) for i in range(start, end)])
        row = Row(1, start, ids[start:end], spec if number == 0 else None, LENGTH if last else None, 1, probabilities)
        for out in texts.turn(batch(row)).values():
            collect(out, got)
        if got[1].finish is not None:
            break
    one = got[1]
    assert (one.ids, one.text) == (wanted.ids, wanted.text)
    assert one.chosen == [float(i) for i in range(len(wanted.ids))]
    assert one.finish is not None
    assert (one.finish.kind, one.finish.matched) == (wanted.kind, wanted.matched)
    assert len(texts) == 0
    assert all(finish.output_tokens == len(wanted.ids) for finish in texts.finished)
    assert not texts.gaps


@given(requests=st.lists(st.tuples(ids_of_text, stop_lists), min_size=2, max_size=5), seed=st.integers(0, 2**32))
def test_requests_of_one_batch_do_not_touch_each_other(
    slot: Slot, requests: list[tuple[list[int], tuple[str, ...]]], seed: int
) -> None:
    rng = Random(seed)
    texts, got = RowText(TABLE, slot), {}
    left: dict[int, list[Row]] = {}
    for key, (ids, stops) in enumerate(requests):
        bounds = [0, *sorted(rng.randint(0, len(ids)) for _ in range(rng.randrange(4))), len(ids)]
        left[key] = [Row(key, start, ids[start:end]) for start, end in pairwise(bounds)]
        left[key][0].spec, left[key][-1].finish = TextSpec(stop=stops), LENGTH
    while left:
        moved = rng.sample(sorted(left), rng.randint(1, len(left)))
        for out in texts.turn(batch(*(left[key].pop(0) for key in moved))).values():
            collect(out, got)
        left = {key: rows for key, rows in left.items() if rows and (key not in got or got[key].finish is None)}
    for key, (ids, stops) in enumerate(requests):
        wanted = text_of(ids, TextSpec(stop=stops), "length", None)
        assert (got[key].ids, got[key].text, got[key].finish.kind) == (wanted.ids, wanted.text, wanted.kind)
    assert len(texts) == 0


def test_a_finish_row_is_cut_at_the_token_that_completed_the_stop(slot: Slot) -> None:
    texts = RowText(TABLE, slot)
    probabilities = TokenLogprobs(chosen=[-1.0, -2.0, -3.0, -4.0], top=[[(1, -1.0)]] * 4, requested=[[(2, -2.0)]] * 4)
    out = turned(
        texts, batch(Row(1, 0, [C, A, BC, A], TextSpec(stop=("ab",)), None, 1, probabilities), Row(2, 0, [A], PLAIN))
    )
    assert unpack_ragged("I", out.output_ids) == [(C, A, BC), (A,)]
    assert out.texts == ["c", "a"]
    assert out.finish_reasons == {0: FinishReason(kind="stop", matched="ab")}
    assert out.output_logprobs == {0: probabilities.slice(0, 3)}
    assert texts.finished == [FinishReq(key=1, attempt=1, output_tokens=3, finish=out.finish_reasons[0])]
    assert len(texts) == 1


def test_a_stop_over_several_rows_holds_back_as_little_as_it_can(slot: Slot) -> None:
    texts = RowText(TABLE, slot)
    spec = TextSpec(stop=("a\nb",))
    assert turn(texts, Row(1, 0, [C, A], spec))[1].text == "c"
    assert turn(texts, Row(1, 2, [NEWLINE]))[1].text == ""
    assert turn(texts, Row(1, 3, [A]))[1].text == "a\n"  # it was text after all
    assert turn(texts, Row(1, 4, [C, A]))[1].text == "ac"
    finished = turn(texts, Row(1, 6, [NEWLINE, BC, C]))[1]
    assert (finished.text, finished.finish) == ("", FinishReason(kind="stop", matched="a\nb"))
    assert finished.ids == [NEWLINE, BC]
    assert len(texts) == 0


def test_a_stop_met_with_the_engines_own_finish_needs_no_word_to_the_scheduler(slot: Slot) -> None:
    texts = RowText(TABLE, slot)
    got = turn(texts, Row(1, 0, [C, AB], TextSpec(stop=("ab",)), LENGTH))[1]
    assert got == Got([C, AB], "c", FinishReason(kind="stop", matched="ab"))
    assert texts.finished == []
    assert texts.held() == []


def test_a_half_character_comes_out_at_the_end_only(slot: Slot) -> None:
    texts = RowText(TABLE, slot)
    assert turn(texts, Row(1, 0, [A, X1], PLAIN))[1].text == "a"
    assert turn(texts, Row(1, 2, [X2, E1]))[1].text == "鑫"
    assert turn(texts, Row(1, 4, [], None, LENGTH))[1].text == "\ufffd"


# what was lost, repeated or replaced


def test_a_gap_is_asked_for_again_and_a_replay_restores_the_text(slot: Slot) -> None:
    texts = RowText(TABLE, slot)
    turn(texts, Row(1, 0, [X1], PLAIN))
    gaps = slot[SlotWord.GAP_ROWS]
    assert turn(texts, Row(1, 2, [A])) == {}
    assert texts.gaps == [(1, 1)]
    assert slot[SlotWord.GAP_ROWS] == gaps + 1
    assert turn(texts, Row(1, 0, [X1, X2, A], PLAIN))[1] == Got([X1, X2, A], "鑫a")
    assert turn(texts, Row(1, 3, [B]))[1].text == "b"


def test_a_row_of_a_request_never_heard_of_is_a_gap(slot: Slot) -> None:
    texts = RowText(TABLE, slot)
    assert turn(texts, Row(9, 4, [A], attempt=2)) == {}
    assert texts.gaps == [(9, 2)]
    assert texts.held() == []


def test_a_start_row_that_was_lost_is_a_gap_even_at_offset_0(slot: Slot) -> None:
    texts = RowText(TABLE, slot)
    assert turn(texts, Row(1, 0, [A])) == {}
    assert texts.gaps == [(1, 1)]


def test_repeated_rows_are_dropped_and_overlapping_ones_cut(slot: Slot) -> None:
    texts = RowText(TABLE, slot)
    turn(texts, Row(1, 0, [A, B], PLAIN))
    assert turn(texts, Row(1, 1, [B])) == {}
    out = turned(texts, batch(Row(1, 1, [B, C])))
    assert (out.texts, unpack("I", out.text_offsets), unpack("I", out.offsets)) == (["c"], (2,), (1,))
    assert unpack_ragged("I", out.output_ids) == [(B, C)]
    assert texts.gaps == []


def test_rows_of_a_replaced_attempt_are_dropped(slot: Slot) -> None:
    texts = RowText(TABLE, slot)
    turn(texts, Row(1, 0, [A], PLAIN))
    assert turn(texts, Row(1, 0, [A, B], PLAIN, attempt=2))[1].text == "ab"
    stale = slot[SlotWord.STALE_ATTEMPT_ROWS]
    assert turn(texts, Row(1, 1, [C], attempt=1)) == {}
    assert turn(texts, Row(1, 0, [C], PLAIN, attempt=1)) == {}
    assert slot[SlotWord.STALE_ATTEMPT_ROWS] == stale + 2
    assert texts.gaps == []
    assert turn(texts, Row(1, 2, [C], attempt=2))[1].text == "c"


@given(ids=ids_of_text, stops=stop_lists, at=st.integers(0, 14), again=st.integers(0, 14))
def test_a_replay_from_the_first_token_gives_the_same_text(
    slot: Slot, ids: list[int], stops: tuple[str, ...], at: int, again: int
) -> None:
    spec = TextSpec(stop=stops)
    texts, got = RowText(TABLE, slot), {1: Got()}
    for end in (min(at, len(ids)), min(again, len(ids))):
        for out in texts.turn(batch(Row(1, 0, ids[:end], spec))).values():
            collect(out, got)
    out = turned(texts, batch(Row(1, 0, ids, spec, LENGTH)))
    collect(out, got)
    wanted = text_of(ids, spec, "length", None)
    assert (got[1].ids, got[1].text) == (wanted.ids, wanted.text)


# ids that stand for nothing


@pytest.mark.parametrize("bad", [VOCAB, 999_999_999, 2**32 - 1])
@pytest.mark.parametrize("together", [True, False])
def test_a_bad_id_costs_its_request_an_error_and_nobody_else_anything(slot: Slot, bad: int, together: bool) -> None:
    """Case 21: one of eight streams; rows of one id each (the fast way) and of several."""
    texts, got = RowText(TABLE, slot), {}
    start = [Row(key, 0, [A], PLAIN) for key in range(8)]
    more = [Row(key, 1, [bad] if key == 3 else [B]) for key in range(8)]
    if together:
        more[3] = Row(3, 1, [B, E1, bad, C])
    for rows in (start, more):
        out = turned(texts, batch(*rows))
        collect(out, got)
    for key in range(8):
        if key != 3:
            assert got[key] == Got([A, B], "ab")
    finish = got[3].finish
    assert finish is not None
    assert (finish.kind, finish.status, finish.code) == ("error", 500, "invalid_token_id")
    assert str(bad) in (finish.message or "")
    assert got[3].ids == ([A, B, E1] if together else [A])
    assert got[3].text == ("ab\ufffd" if together else "a")
    assert texts.finished == [FinishReq(key=3, attempt=1, output_tokens=len(got[3].ids), finish=finish)]
    assert len(texts) == 7


def test_a_stop_before_a_bad_id_ends_the_request_in_honour(slot: Slot) -> None:
    texts = RowText(TABLE, slot)
    got = turn(texts, Row(1, 0, [C, AB, VOCAB], TextSpec(stop=("ab",))))[1]
    assert got == Got([C, AB], "c", FinishReason(kind="stop", matched="ab"))


def test_a_replay_ends_at_the_same_bad_id(slot: Slot) -> None:
    """A worker that lost the error row but has the tokens before it must still hear of the end."""
    texts = RowText(TABLE, slot)
    turn(texts, Row(1, 0, [A], PLAIN))
    turn(texts, Row(1, 1, [B]))
    turn(texts, Row(1, 2, [VOCAB]))
    again = turned(texts, batch(Row(1, 0, [A, B, VOCAB], PLAIN)))
    assert unpack_ragged("I", again.output_ids) == [(A, B)]
    assert again.texts == ["ab"]
    assert again.finish_reasons[0].code == "invalid_token_id"


def test_an_empty_row_is_nothing(slot: Slot) -> None:
    texts = RowText(TABLE, slot)
    assert turn(texts, Row(1, 0, [], PLAIN))[1] == Got()
    assert turn(texts, Row(1, 0, [])) == {}
    assert turn(texts, Row(1, 0, [A]))[1].text == "a"


# what ended here


def test_what_ended_here_is_said_again_while_the_scheduler_goes_on(slot: Slot) -> None:
    texts = RowText(TABLE, slot)
    turn(texts, Row(1, 0, [AB], TextSpec(stop=("ab",))))
    said = list(texts.finished)
    texts.finished.clear()
    assert turn(texts, Row(1, 1, [C])) == {}
    assert texts.finished == said
    assert texts.gaps == []


def test_a_later_attempt_of_what_ended_here_is_asked_for_again(slot: Slot) -> None:
    texts = RowText(TABLE, slot)
    turn(texts, Row(1, 0, [AB], TextSpec(stop=("ab",))))
    texts.finished.clear()
    assert turn(texts, Row(1, 1, [C], attempt=2)) == {}
    assert (texts.finished, texts.gaps) == ([], [(1, 2)])
    assert turn(texts, Row(1, 0, [C, AB], TextSpec(stop=("ab",)), attempt=2))[1].text == "c"


def test_an_earlier_attempt_of_what_ended_here_is_stale(slot: Slot) -> None:
    texts = RowText(TABLE, slot)
    turn(texts, Row(1, 0, [AB], TextSpec(stop=("ab",)), attempt=2))
    texts.finished.clear()
    assert turn(texts, Row(1, 0, [C], PLAIN, attempt=1), Row(1, 1, [C], attempt=1)) == {}
    assert (texts.finished, texts.gaps) == ([], [])
    assert texts.held() == [1]


def test_forgotten_requests_leave_nothing(slot: Slot) -> None:
    texts = RowText(TABLE, slot)
    turn(texts, Row(1, 0, [A], PLAIN), Row(2, 0, [AB], TextSpec(stop=("ab",))), Row(3, 0, [A], PLAIN))
    assert sorted(texts.held()) == [1, 2, 3]
    texts.forget([1, 2, 99])
    assert texts.held() == [3]


def test_the_requests_of_a_dead_life_go_with_it(slot: Slot) -> None:
    texts = RowText(TABLE, slot)
    lives = [make_life(0, 1), make_life(0, 2), make_life(1, 1)]
    keys = [make_key(life, 1) for life in lives]
    turn(texts, *(Row(key, 0, [AB], TextSpec(stop=("ab",) if key == keys[0] else ())) for key in keys))
    texts.forget_lives({lives[0], lives[2]})
    assert texts.held() == [keys[1]]
    texts.forget_lives(set())
    assert texts.held() == [keys[1]]


def test_no_live_request_is_ever_evicted(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 20: however many there are, each goes on; only what has ended is kept in bounds."""
    monkeypatch.setattr("sglmt.workers.row_text.MAX_ENDED", 16)
    texts = RowText(TABLE, slot)
    count = 2000
    turn(texts, *(Row(key, 0, [A], PLAIN) for key in range(count)))
    turn(texts, *(Row(count + key, 0, [AB], TextSpec(stop=("ab",))) for key in range(64)))
    assert len(texts) == count
    assert len(texts.held()) == count + 16
    got = turn(texts, *(Row(key, 1, [B], None, LENGTH) for key in range(count)))
    assert all(got[key].text == "b" and got[key].finish == LENGTH for key in range(count))
    assert len(texts) == 0


# columns


def test_every_shared_column_reaches_the_worker(slot: Slot) -> None:
    """Field by field: what a batch says of a row is there afterwards, also when other rows were dropped."""
    texts = RowText(TABLE, slot)
    full = batch(Row(7, 3, [A]), Row(1, 0, [A], PLAIN), Row(8, 3, [A]), Row(2, 0, [B], PLAIN))
    samples: dict[str, Any] = {
        "rids": ["r7", "r1", "r8", "r2"],
        "output_logprobs": {1: TokenLogprobs(chosen=[-0.5])},
        "input_logprobs": {3: TokenLogprobs(chosen=[None, -1.5])},
        "prompt_tokens": {1: 11, 3: 12},
        "cached_tokens": {1: 5},
        "cached_tokens_details": {3: {"host": 4}},
        "reasoning_tokens": pack("I", [70, 71, 72, 73]),
        "hidden_states": pack_ragged("f", [[7.0], [1.0, 1.5], [], [2.0]]),
        "dp_ranks": pack("I", [0, 1, 2, 3]),
        "retraction_counts": pack("I", [4, 5, 6, 7]),
        "spec_verify_counts": pack("I", [8, 9, 10, 11]),
        "spec_accepted_tokens": pack("I", [12, 13, 14, 15]),
        "time_stats": [{"x": float(n)} for n in range(4)],
        "customized_info": {"info": [7, 1, 8, 2]},
        "weight_version": "v1",
    }
    assert samples.keys() == PASSED_COLUMNS, "a new column: add a sample"
    for name, value in samples.items():
        setattr(full, name, value)
    full.check()
    out = turned(texts, full)
    out.check()
    kept = full.take([1, 3])
    for name in samples:
        assert getattr(out, name) == getattr(kept, name), name
    assert out.texts == ["a", "b"]


def test_what_is_made_here_and_what_is_passed_are_all_columns_of_a_worker_row() -> None:
    made = {"keys", "attempts", "offsets", "text_offsets", "output_ids", "texts", "finish_reasons"}
    assert {name for name, _ in columns_of(BatchStrOutput)} == made | PASSED_COLUMNS
    assert {name for name, _ in columns_of(BatchTokenIDOutput)} > PASSED_COLUMNS
    assert not made & PASSED_COLUMNS


def test_both_sides_declare_the_passed_columns_alike() -> None:
    into, out = dict(columns_of(BatchTokenIDOutput)), dict(columns_of(BatchStrOutput))
    assert all(into[name] == out[name] for name in PASSED_COLUMNS)


def test_decoding_is_linear_in_output_that_never_becomes_text(slot: Slot) -> None:
    """Twenty thousand bytes that begin a character and never complete one: counted work, not time."""
    texts = RowText(TABLE, slot)
    got = {1: Got()}
    turn(texts, Row(1, 0, [], PLAIN))
    for start in range(0, 20_000, 1000):
        out = turned(texts, batch(Row(1, start, [X1] * 1000)))
        state = texts._states[1].text._detokenizer
        assert len(state._pending) <= 3
        collect(out, got)
    assert got[1].text == decoded([X1] * 20_000, False)
