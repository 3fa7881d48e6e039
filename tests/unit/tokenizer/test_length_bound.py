"""What a text's length says of its tokens is never more than there are; and it says something where it can."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from sglmt.tokenizer.length_bound import length_bound
from sglmt.tokenizer.loading import Tokenizer
from tests.unit.tokenizer import synthetic

TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60) | st.sampled_from(
    [" " * 500, "a" * 300, "\n" * 99, "\x04\x06" * 50, "e\u0301" * 40, "\u212b\u1100\u1161\u11a8" * 30, "😀" * 30]
)


@given(TEXTS, st.integers(1, 20))
def test_the_bound_holds(text: str, times: int) -> None:
    tokenizer = synthetic.loaded("byte-level")
    bound = tokenizer.length_bound
    assert bound is not None
    assert bound.fewest_tokens(text * times) <= len(tokenizer.encode(text * times, add_special_tokens=False))


@pytest.mark.parametrize(
    "text", [" " * 5000, "word " * 999, "\x04" * 5000, "日本語" * 999, "<|im_end|>" * 300, "0" * 999]
)
def test_the_bound_holds_for_the_shipped_model(smollm: Tokenizer, text: str) -> None:
    bound = smollm.length_bound
    assert bound is not None
    assert bound.fewest_tokens(text) <= len(smollm.encode(text, add_special_tokens=False))


def test_two_megabytes_are_too_long_for_the_shipped_model(smollm: Tokenizer) -> None:
    assert smollm.length_bound is not None
    assert smollm.length_bound.fewest_tokens("a" * (2 << 20)) > 8192


@given(TEXTS)
def test_composition_is_allowed_for(text: str) -> None:
    library = tokenizers.Tokenizer.from_str(synthetic.library("byte-level").to_str())
    library.normalizer = normalizers.NFC()
    bound = length_bound(library, library.get_vocab())
    if bound is not None:  # not with bytes that no token has
        assert bound.fewest_tokens(text) <= len(library.encode(text, add_special_tokens=False).ids)


def test_where_text_may_vanish_nothing_is_said(any_kind: Tokenizer) -> None:
    if any_kind.rules.mode != "bytes":
        assert any_kind.length_bound is None
    plain = synthetic.library("byte-level")
    for change in ("normalizer", "splitter", "added token"):
        library = tokenizers.Tokenizer.from_str(plain.to_str())
        if change == "normalizer":
            library.normalizer = normalizers.Strip()
        elif change == "splitter":
            library.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        else:
            library.add_tokens([AddedToken("<eats spaces>", lstrip=True)])
        assert length_bound(library, library.get_vocab()) is None, change
