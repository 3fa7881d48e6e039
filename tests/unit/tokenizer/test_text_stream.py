"""One request's text: emitted text depends on the ids alone, and a stop string cuts it at the right token."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglmt.tokenizer.detokenize import TokenIdError
from sglmt.tokenizer.loading import Tokenizer
from sglmt.tokenizer.text_stream import RequestText
from tests.unit.tokenizer import synthetic

properties = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
stop_lists = st.lists(st.sampled_from(["e", "qu", "own f", "fox", "\n", "日本", "�", "  ", "it's"]), max_size=3)


def draw_ids(data: st.DataObject, tokenizer: Tokenizer) -> list[int]:
    text = data.draw(st.sampled_from(synthetic.TEXTS))
    noise = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6))
    position = data.draw(st.integers(0, 40))
    ids = tokenizer.encode(text)
    return [*ids[:position], *noise, *ids[position:]]


@properties
@given(data=st.data(), stops=stop_lists, keep=st.booleans(), skip=st.booleans())
def test_text_after_k_ids_depends_on_those_ids_alone(
    any_kind: Tokenizer, data: st.DataObject, stops: list[str], keep: bool, skip: bool
) -> None:
    ids = draw_ids(data, any_kind)
    one, many = RequestText(any_kind.table, stops, keep, skip), RequestText(any_kind.table, stops, keep, skip)
    after = [""]
    for token_id in ids:
        after.append(after[-1] + one.push_one(token_id))  # grows only
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    text, used = "", 0
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        text += many.push(ids[start:end])
        used += many.used
        assert text == after[end]
    assert many.matched == one.matched
    assert text + many.finish() == after[-1] + one.finish()
    if many.matched is None:
        assert used == len(ids)


@properties
@given(data=st.data(), stops=stop_lists, keep=st.booleans())
def test_the_text_is_the_full_text_cut_at_the_stop(
    any_kind: Tokenizer, data: st.DataObject, stops: list[str], keep: bool
) -> None:
    ids = draw_ids(data, any_kind)
    plain = RequestText(any_kind.table)
    whole = plain.push(ids) + plain.finish()
    request = RequestText(any_kind.table, stops, keep)
    text = request.push(ids)
    used = request.used
    text += request.finish()
    if request.matched is None:
        assert text == whole
        assert not any(stop in whole for stop in stops)
        return
    end = min(whole.find(stop) + len(stop) for stop in stops if stop in whole)
    assert request.matched in stops
    assert text == (whole[:end] if keep else whole[: end - len(request.matched)])
    until = RequestText(any_kind.table)
    if used < len(ids):  # the text of the ids used contains the stop string, that of one id fewer does not
        assert request.matched in until.push(ids[:used])
        fewer = RequestText(any_kind.table)
        assert len(fewer.push(ids[: used - 1])) < end


def test_later_ids_are_ignored_after_a_match(smollm: Tokenizer) -> None:
    ids = smollm.encode("one two three four")
    request = RequestText(smollm.table, [" three"])
    assert request.push(ids) == "one two"
    assert (request.matched, request.used) == (" three", 3)
    assert request.push(ids) == ""
    assert request.used == 0
    assert request.push_one(ids[0]) == ""
    assert request.finish() == ""


def test_without_trim_the_text_ends_right_after_the_stop(smollm: Tokenizer) -> None:
    ids = smollm.encode("one STOPPING")
    request = RequestText(smollm.table, ["STOP"], no_stop_trim=True)
    assert request.push(ids) + request.finish() == "one STOP"


def test_a_stop_completed_by_the_last_token_of_all(smollm: Tokenizer) -> None:
    ids = [*smollm.encode("go END"), smollm.info.eos_token_ids[0]]
    request = RequestText(smollm.table, ["END"])
    assert request.push(ids) == "go "
    assert request.matched == "END"


@pytest.mark.parametrize("stops", [(), ["x"]])
def test_an_unfinished_character_and_a_begun_stop_come_at_the_end(smollm: Tokenizer, stops: list[str]) -> None:
    request = RequestText(smollm.table, [*stops, "bye!"])
    text = request.push([*smollm.encode("so: bye"), *smollm.encode("龘")[:1]])
    assert text + request.finish() == "so: bye\ufffd"


def test_a_stop_string_may_be_completed_by_the_end(smollm: Tokenizer) -> None:
    request = RequestText(smollm.table, ["\ufffd"])
    assert request.push([*smollm.encode("a"), *smollm.encode("龘")[:1]]) == "a"
    assert request.finish() == ""
    assert request.matched == "\ufffd"


@pytest.mark.parametrize("stops", [(), ("zz",)])
def test_a_bad_id_costs_nothing_but_its_push(smollm: Tokenizer, stops: tuple[str, ...]) -> None:
    """Field case 21."""
    request = RequestText(smollm.table, stops)
    good = smollm.encode("龘 well z")
    with pytest.raises(TokenIdError):
        request.push([good[0], 999_999_999])
    with pytest.raises(TokenIdError):
        request.push([*good, -1])
    with pytest.raises(TokenIdError):
        request.push_one(-1)
    assert request.push([]) == ""
    assert request.push(good) + request.finish() == "龘 well z"
