"""Stop strings: the first to end wins, and nothing is held back that cannot become one."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglmt.tokenizer.stop_strings import StopAutomaton, StopMatcher

properties = settings(deadline=None, max_examples=300)
small_text = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By definition: (end, stop) of the match that ends first, the longest of those."""
    found = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(len(stop), len(text) + 1)
        if text[:end].endswith(stop)
    ]
    return (min(found)[0], min(found)[2]) if found else None


def held_back(text: str, stops: list[str]) -> int:
    """By definition: the longest end of the text that is a beginning (not all) of a stop string."""
    return max((size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])), default=0)


def feed_all(matcher: StopMatcher, chunks: list[str]) -> str:
    return "".join(map(matcher.feed, chunks))


@properties
@given(text=small_text, stops=stop_lists, size=st.integers(1, 5), keep=st.booleans())
def test_matches_and_holds_back_as_defined(text: str, stops: list[str], size: int, keep: bool) -> None:
    matcher = StopMatcher(stops, keep)
    emitted = ""
    for start in range(0, len(text), size):
        emitted += matcher.feed(text[start : start + size])
        seen = text[: start + size]
        match = first_match(seen, stops)
        if match is None:
            assert matcher.matched is None
            held = 0 if keep else held_back(seen, stops)
            assert emitted == seen[: len(seen) - held]
            assert matcher.held == seen[len(seen) - held :]
        else:
            end, stop = match
            assert matcher.matched == stop
            assert emitted == (seen[:end] if keep else seen[: end - len(stop)])
    if matcher.matched is None:
        assert emitted + matcher.flush() == text
    else:
        assert matcher.flush() == ""
        assert matcher.feed("more") == ""


@pytest.mark.parametrize(
    ("stops", "chunks", "text", "matched"),
    [
        (["Finish"], ["Fin", "ish"], "", "Finish"),
        (["MNOPQR"], ["MN", "O", "PQ", "R"], "", "MNOPQR"),
        (["ab", "bc"], ["abc"], "", "ab"),
        (["bc", "abcd"], ["abc"], "a", "bc"),
        (["b", "ab"], ["ab"], "", "ab"),
        (["STOP"], ["xxSTOPyy"], "xx", "STOP"),
        (["aab"], ["a", "a", "a", "b", "c"], "a", "aab"),
        ([""], ["abc"], "abc", None),
        (["]"], ["a]b"], "a", "]"),
        (["^", "-", "\\"], ["x-"], "x", "-"),
        (["終わり"], ["はい終", "わり。"], "はい", "終わり"),
    ],
)
def test_examples(stops: list[str], chunks: list[str], text: str, matched: str | None) -> None:
    """Field case 25 among them."""
    matcher = StopMatcher(stops)
    assert feed_all(matcher, chunks) == text
    assert matcher.matched == matched


@pytest.mark.parametrize(
    ("chunks", "while_streaming", "text"),
    [(["a", "\n", "b"], "a\nb", "a\nb"), (["a", "\n"], "a", "a\n")],
)
def test_real_text_is_not_swallowed(chunks: list[str], while_streaming: str, text: str) -> None:
    """Field case 26."""
    matcher = StopMatcher(["\n\nEND"])
    assert feed_all(matcher, chunks) == while_streaming
    assert while_streaming + matcher.flush() == text


def test_an_automaton_is_shared_by_matchers() -> None:
    automaton = StopAutomaton(["ab"])
    one, other = StopMatcher(automaton), StopMatcher(automaton)
    assert one.feed("a") == ""
    assert other.feed("b") == "b"
    assert one.feed("b") == ""
    assert (one.matched, other.matched) == ("ab", None)


def test_time_is_linear_in_the_text_whatever_the_stop_string() -> None:
    def cost(count: int) -> float:
        matcher = StopMatcher(["a" * 5000 + "b", "a" * 4999 + "c"])
        begun = time.process_time()
        emitted = feed_all(matcher, ["a"] * count)
        assert emitted + matcher.flush() == "a" * count
        return time.process_time() - begun

    cost(1000)
    assert cost(160_000) < 30 * max(cost(16_000), 0.004)
