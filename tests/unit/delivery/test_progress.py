"""The judgement of rows: any cut of the true stream, repeated and replayed in any way, gives the true stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglmt.delivery.progress import Judgement, Verdict, judge_row

DELIVER, DUPLICATE, GAP, STALE = Verdict.DELIVER, Verdict.DUPLICATE, Verdict.GAP, Verdict.STALE


def judge(
    have: tuple[int, int], row: tuple[int, int, int, int], *, finishes: bool = False, attempt: int = 1
) -> Judgement:
    """`have` is (tokens, chars) received; `row` is (offset, tokens, text offset, chars)."""
    offset, tokens, text_offset, chars = row
    return judge_row(
        attempt=1,
        tokens=have[0],
        chars=have[1],
        row_attempt=attempt,
        row_offset=offset,
        row_tokens=tokens,
        row_text_offset=text_offset,
        row_chars=chars,
        row_finishes=finishes,
    )


@pytest.mark.parametrize(
    ("have", "row", "finishes", "expected"),
    [
        ((0, 0), (0, 0, 0, 0), False, Judgement(DELIVER)),  # "admitted"
        ((0, 0), (0, 1, 0, 2), False, Judgement(DELIVER)),
        ((4, 9), (4, 2, 9, 3), False, Judgement(DELIVER)),
        ((4, 9), (3, 2, 7, 5), False, Judgement(DELIVER, 1, 2)),  # half known
        ((4, 9), (0, 6, 0, 12), False, Judgement(DELIVER, 4, 9)),  # a replay that goes further
        ((4, 9), (0, 4, 0, 9), False, Judgement(DUPLICATE)),
        ((4, 9), (0, 3, 0, 7), False, Judgement(DUPLICATE)),
        ((4, 9), (0, 0, 0, 0), False, Judgement(DUPLICATE)),  # "admitted", late
        ((4, 9), (4, 0, 9, 0), True, Judgement(DELIVER)),  # nothing but the end
        ((4, 9), (0, 4, 0, 9), True, Judgement(DELIVER, 4, 9)),  # everything known but the end
        ((4, 9), (4, 0, 9, 2), True, Judgement(DELIVER)),  # text that was held back
        ((4, 9), (0, 4, 0, 11), True, Judgement(DELIVER, 4, 9)),
        ((4, 9), (0, 3, 0, 7), True, Judgement(DUPLICATE)),  # an end before where the receiver stands
        ((4, 9), (5, 1, 9, 1), False, Judgement(GAP)),
        ((4, 9), (4, 1, 10, 1), False, Judgement(GAP)),
        ((4, 9), (5, 0, 9, 0), True, Judgement(GAP)),
        ((0, 0), (1, 1, 0, 1), False, Judgement(GAP)),
    ],
)
def test_table(have: tuple[int, int], row: tuple[int, int, int, int], finishes: bool, expected: Judgement) -> None:
    assert judge(have, row, finishes=finishes) == expected


@pytest.mark.parametrize("attempt", [0, 2])
def test_rows_of_another_attempt_are_stale_whatever_they_hold(attempt: int) -> None:
    assert judge((4, 9), (4, 1, 9, 1), attempt=attempt, finishes=True) == Judgement(STALE)


class Receiver:
    """What a worker does with the judgement; asks its source for a replay at a gap."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.finished = 0
        self.gaps = 0

    def take(self, row: Row) -> None:
        if self.finished:
            return
        judgement = judge((len(self.ids), len(self.text)), row.numbers, finishes=row.finishes)
        if judgement.verdict is GAP:
            self.gaps += 1
        if judgement.verdict is DELIVER:
            self.ids.extend(row.ids[judgement.skip_tokens :])
            self.text += row.text[judgement.skip_chars :]
            self.finished += row.finishes


class Row:
    """Tokens [start, end) of the stream and their text; the last also ends it."""

    def __init__(self, texts: list[str], tail: str, start: int, end: int, finishes: bool) -> None:
        self.ids = list(range(start, end))
        self.text = "".join(texts[start:end]) + (tail if finishes else "")
        self.finishes = finishes
        self.numbers = (start, end - start, len("".join(texts[:start])), len(self.text))


streams = st.lists(st.sampled_from(["", "a", "bc", "def"]), max_size=8)


@given(texts=streams, tail=st.sampled_from(["", "!", "?!"]), data=st.data())
def test_rows_in_any_order_with_a_replay_at_the_end_give_the_stream(
    texts: list[str], tail: str, data: st.DataObject
) -> None:
    """Rows cut anywhere, reordered, repeated, lost; where something is missing a replay from 0 follows."""
    receiver = Receiver()
    count = len(texts)
    position = st.integers(0, count)
    for first, second, ends in data.draw(st.lists(st.tuples(position, position, st.booleans()), max_size=12)):
        start, end = min(first, second), max(first, second)
        before = receiver.gaps
        receiver.take(Row(texts, tail, start, end, ends and end == count))
        if receiver.gaps > before:
            cuts = sorted({0, count, *data.draw(st.lists(position, max_size=3))})
            for at, until in zip(cuts, cuts[1:] or [count], strict=False):
                receiver.take(Row(texts, tail, at, until, until == count))
        assert receiver.ids == list(range(len(receiver.ids)))
        assert ("".join(texts) + tail).startswith(receiver.text)
    receiver.take(Row(texts, tail, 0, count, True))
    assert receiver.finished == 1
    assert receiver.ids == list(range(count))
    assert receiver.text == "".join(texts) + tail
