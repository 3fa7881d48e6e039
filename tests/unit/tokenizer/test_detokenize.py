"""Incremental detokenization: the joined pushes are the full decode, and nothing is ever taken back."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from sglmt.errors import ModelError
from sglmt.tokenizer.decoder_rules import byte_value, compile_rules
from sglmt.tokenizer.detokenize import IncrementalDetokenizer, TokenIdError
from sglmt.tokenizer.loading import Tokenizer, load_tokenizer
from sglmt.tokenizer.token_table import TokenTable
from tests.unit.tokenizer import synthetic
from tests.unit.tokenizer.real_tokenizers import PACKAGES, real_tokenizer

FFFD = "\ufffd"
TRICKY = [
    "a",
    "▁",
    "▁▁a",
    "▁a▁",
    "",
    " ",
    "##a",
    "do",
    " do not",
    ".",
    "n't",
    "<0x41>",
    "<0xC3>|<0xA9>",
    "Ġ",
    "é",
    "<0xG1>",
]
TRICKY += ["<0xE6>|<0x97>|<0xA5>|<0x41>", "<0x41", "� "]
properties = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True, spaces: bool = True) -> str:
    """The text of ids pushed one by one."""
    detokenizer = IncrementalDetokenizer(tokenizer.table, skip, spaces)
    return "".join(map(detokenizer.push_one, ids)) + detokenizer.finish()


def library_text(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """What the library decodes, except that a run of byte tokens keeps what was complete before it went wrong."""
    expected = tokenizer.decode(ids, skip)
    if not tokenizer.rules.byte_fallback:
        return expected
    parts: list[int | str] = []
    for token_id in ids:
        token = tokenizer.id_to_token(token_id)
        if token is None or (skip and tokenizer.is_special(token_id)):
            continue
        byte = byte_value(token)
        parts.append(token.replace("▁", " ") if byte is None else byte)
    text, run = "", b""
    for part in [*parts, ""]:
        if isinstance(part, int):
            run += bytes((part,))
            continue
        text += _run_text(run) + part
        run = b""
    stripped = text[1:] if tokenizer.rules.strip_start and text.startswith(" ") else text
    if FFFD not in stripped:
        assert stripped == expected  # a valid document: no difference allowed
    return stripped


def _run_text(run: bytes) -> str:
    try:
        return run.decode()
    except UnicodeDecodeError as error:
        return run[: error.start].decode() + FFFD * (len(run) - error.start)


@st.composite
def id_lists(draw: st.DrawFn, size: int, special: list[int]) -> list[int]:
    element = st.one_of(st.integers(0, size - 1), st.sampled_from(special), st.integers(0, min(size, 300) - 1))
    return draw(st.lists(element, max_size=24))


@properties
@given(data=st.data())
def test_joined_output_is_the_full_decode(any_kind: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(id_lists(any_kind.vocab_size, sorted(any_kind.special_ids)))
    for skip in (True, False):
        assert stream(any_kind, ids, skip) == library_text(any_kind, ids, skip)


@properties
@given(text=st.text(max_size=40))
def test_encoded_text_comes_back_as_the_library_decodes_it(any_kind: Tokenizer, text: str) -> None:
    ids = any_kind.encode(text)
    assert stream(any_kind, ids) == any_kind.decode(ids)


@properties
@given(data=st.data())
def test_grouping_of_pushes_changes_nothing(any_kind: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(id_lists(any_kind.vocab_size, sorted(any_kind.special_ids)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    one, many = IncrementalDetokenizer(any_kind.table), IncrementalDetokenizer(any_kind.table)
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        assert many.push(ids[start:end]) == "".join(map(one.push_one, ids[start:end]))
    assert many.finish() == one.finish()


@properties
@given(data=st.data())
def test_no_replacement_character_before_it_is_certain(any_kind: Tokenizer, data: st.DataObject) -> None:
    """Every prefix of the stream is a prefix of what the same ids followed by anything valid give."""
    text = data.draw(st.text(alphabet="aé日🔥한 ", max_size=12))
    detokenizer = IncrementalDetokenizer(any_kind.table)
    unknown = [name for name in ("<unk>", "[UNK]") if any_kind.token_to_id(name) is not None]
    emitted = "".join(map(detokenizer.push_one, any_kind.encode(text)))
    if not unknown:
        assert FFFD not in emitted


@properties
@given(data=st.data())
def test_a_bad_id_leaves_the_state_as_it_was(any_kind: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(id_lists(any_kind.vocab_size, sorted(any_kind.special_ids)))
    cut = data.draw(st.integers(0, len(ids)))
    bad = data.draw(st.sampled_from([-1, any_kind.vocab_size, 999_999_999, 2**40, 2**70, -(2**70)]))
    detokenizer = IncrementalDetokenizer(any_kind.table)
    text = detokenizer.push(ids[:cut])
    with pytest.raises(TokenIdError, match=str(bad)) as caught:
        detokenizer.push([*ids[cut:], bad])
    assert caught.value.token_id == bad
    with pytest.raises(TokenIdError):
        detokenizer.push_one(bad)
    assert text + detokenizer.push(ids[cut:]) + detokenizer.finish() == stream(any_kind, ids)


@pytest.mark.parametrize(
    "text",
    ["鑫龘", "🔥", "👩\u200d👩\u200d👧\u200d👦", "🇩🇪", "e\u0301", "ภาษาไทย", "\r\n\r\n", "a\x00b"],
)
def test_multi_token_characters_come_whole(smollm: Tokenizer, text: str) -> None:
    """Field case 23."""
    pieces = []
    detokenizer = IncrementalDetokenizer(smollm.table)
    for token_id in smollm.encode(text):
        pieces.append(detokenizer.push_one(token_id))
    assert FFFD not in "".join(pieces)
    assert "".join(pieces) + detokenizer.finish() == text


def test_a_character_cut_at_the_end_is_replaced_once(smollm: Tokenizer) -> None:
    ids = smollm.encode("龘")
    assert len(ids) > 1
    detokenizer = IncrementalDetokenizer(smollm.table)
    assert detokenizer.push(ids[:-1]) == ""
    assert detokenizer.finish() == FFFD == smollm.decode(ids[:-1])
    assert detokenizer.finish() == ""


def test_special_tokens_inside_a_character_do_not_cut_it(smollm: Tokenizer) -> None:
    ids = smollm.encode("龘")
    ids.insert(1, smollm.info.eos_token_ids[0])
    assert stream(smollm, ids) == "龘"
    assert stream(smollm, ids, skip=False) == smollm.decode(ids, False)


def test_spaces_between_special_tokens_can_be_left_out() -> None:
    tokenizer = synthetic.loaded("wordpiece")
    begin, end = (tokenizer.token_to_id(text) for text in ("<s>", "</s>"))
    word = tokenizer.encode("the fox")
    assert begin is not None
    assert end is not None
    ids = [begin, begin, *word, end, end]
    assert stream(tokenizer, ids, skip=False) == tokenizer.decode(ids, False)
    tight = stream(tokenizer, ids, skip=False, spaces=False)
    assert tight == tokenizer.decode(ids, False, False)
    assert tight.startswith("<s><s> ")
    assert tight.endswith(" </s></s>")
    assert stream(tokenizer, ids, spaces=False) == tokenizer.decode(ids)


@properties
@given(data=st.data(), kind=st.sampled_from(sorted(synthetic.KINDS)))
def test_an_id_without_a_token_adds_nothing(data: st.DataObject, kind: str) -> None:
    """Embeddings may have more rows than there are tokens."""
    library = synthetic.library(kind)
    size = library.get_vocab_size()
    padded = Tokenizer(library, synthetic.model_info(vocab_size=size + 3))
    ids = padded.encode(data.draw(st.sampled_from(["龘 fox", "the quick", "日本"])))
    expected = stream(padded, ids)
    for position in sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=3)), reverse=True):
        ids.insert(position, size + data.draw(st.integers(0, 2)))
    assert stream(padded, ids) == expected == padded.decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_time_is_linear_on_output_that_never_becomes_text(kind: str) -> None:
    tokenizer = synthetic.loaded(kind)
    lead = next(index for index in range(tokenizer.vocab_size) if tokenizer.table.raw.get(index) == b"\x80")

    def cost(count: int) -> float:
        detokenizer = IncrementalDetokenizer(tokenizer.table)
        ids = [lead] * count
        begun = time.process_time()
        assert len(detokenizer.push(ids)) + len(detokenizer.finish()) == count
        return time.process_time() - begun

    cost(1000)
    assert cost(80_000) < 40 * max(cost(8_000), 0.002)


@pytest.mark.parametrize(
    "decoder",
    [
        b'{"type":"CTC","pad_token":"<pad>","word_delimiter_token":"|","cleanup":true}',
        b'{"type":"BPEDecoder","suffix":"</w>"}',
        b'{"type":"Strip","content":" ","start":0,"stop":1}',
        b'{"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0},'
        b'{"type":"Replace","pattern":{"String":"_"},"content":" "}]}',
        b'{"type":"Replace","pattern":{"Regex":"a+"},"content":"b"}',
        b'{"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"Strip","content":" ","start":0,"stop":1}]}',
    ],
)
def test_a_decoder_that_cannot_be_exact_is_refused_by_name(decoder: bytes) -> None:
    with pytest.raises(ModelError, match=r"cannot be decoded token by token.*--tokenizer-path"):
        compile_rules(decoder)


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback()]),
        decoders.Sequence(
            [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 2)]
        ),
        decoders.Sequence([decoders.Strip("▁", 1), decoders.Replace("▁a", "b"), decoders.Fuse()]),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.WordPiece(cleanup=False),
        decoders.WordPiece(prefix="▁", cleanup=True),
        decoders.Fuse(),
        decoders.ByteLevel(),
    ],
    ids=str,
)
@properties
@given(tokens=st.lists(st.sampled_from(TRICKY), max_size=8))
def test_decoders_in_any_order(decoder: decoders.Decoder, tokens: list[str]) -> None:
    """Against the library's decoder itself; `TRICKY` holds whole characters as runs of byte tokens."""
    singles = [single for token in tokens for single in token.split("|")]
    table = TokenTable(singles, compile_rules(decoder.__getstate__()), frozenset())
    detokenizer = IncrementalDetokenizer(table)
    text = "".join(map(detokenizer.push_one, range(len(singles)))) + detokenizer.finish()
    assert text == decoder.decode(singles)


def test_an_unfinished_run_of_bytes_counts_as_the_first_token() -> None:
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    table = TokenTable(["<0xC3>", "▁a"], compile_rules(decoder.__getstate__()), frozenset())
    detokenizer = IncrementalDetokenizer(table)
    assert detokenizer.push([0, 1]) == decoder.decode(["<0xC3>", "▁a"]) == FFFD + " a"


@pytest.mark.parametrize("kind", sorted(PACKAGES))
def test_real_tokenizers(kind: str) -> None:
    path = real_tokenizer(kind)
    tokenizer = load_tokenizer(synthetic.model_info(tokenizer_file=str(path)))
    for text in [*synthetic.TEXTS, "မြန်မာ ဘာသာ", " leading", "<s> </s>", "\n", ""]:
        ids = tokenizer.encode(text)
        for skip in (True, False):
            assert stream(tokenizer, ids, skip) == tokenizer.decode(ids, skip)
    every = list(range(tokenizer.vocab_size))
    readable = [index for index in every if byte_value(tokenizer.id_to_token(index) or "") is None]
    for start in range(0, len(readable), 977):
        ids = readable[start : start + 977]
        assert stream(tokenizer, ids, False) == tokenizer.decode(ids, False)


@given(st.lists(st.integers(0, 40), max_size=20), st.booleans())
def test_special_tokens_that_are_shown(ids: list[int], skip: bool) -> None:
    """Those and no others appear among what is skipped; with nothing skipped it makes no difference."""
    tokenizer = synthetic.loaded("byte-level")
    shown, hidden = sorted(tokenizer.special_ids)[:2]
    ids = [*ids, shown, hidden, *ids, shown]
    detokenizer = IncrementalDetokenizer(tokenizer.table, skip, shown_ids=(shown,))
    text = "".join(detokenizer.push_one(token_id) for token_id in ids) + detokenizer.finish()
    kept = ids if not skip else [i for i in ids if i == shown or i not in tokenizer.special_ids]
    assert text == tokenizer.decode(kept, skip_special_tokens=False)
    assert tokenizer.id_to_token(shown) in text
