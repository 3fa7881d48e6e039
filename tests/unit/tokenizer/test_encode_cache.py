"""Cached tokenization gives the ids of uncached tokenization, stays in its bounds, and encodes only what is new."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from sglmt.tokenizer.default_model import default_model_path
from sglmt.tokenizer.encode_cache import MIN_SEGMENTED_CHARS, BoundedCache, EncodeCache
from sglmt.tokenizer.loading import Tokenizer, load_tokenizer
from sglmt.tokenizer.resolve import resolve_model
from sglmt.tokenizer.segments import proven_separators


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    cache_dir: Path = tmp_path_factory.mktemp("cache")
    return load_tokenizer(resolve_model(default_model_path(), None, None, cache_dir), "huggingface")


@pytest.fixture(scope="module")
def separators(tokenizer: Tokenizer) -> dict[str, int]:
    assert tokenizer.info.tokenizer_file is not None
    return proven_separators(tokenizers.Tokenizer.from_file(tokenizer.info.tokenizer_file))


class Counting:
    """An encode that tells how much it was asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.chars = 0

    def __call__(self, text: str, add_special_tokens: bool) -> list[int]:
        self.chars += len(text)
        return self._tokenizer.encode(text, add_special_tokens)


def chat(turns: list[str]) -> str:
    return "".join(f"<|im_start|>user\n{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"


def test_the_models_chat_tokens_separate(separators: dict[str, int]) -> None:
    assert separators["<|im_start|>"] == 1
    assert separators["<|im_end|>"] == 2


def test_a_token_that_strips_what_is_around_it_does_not_separate() -> None:
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    library.add_special_tokens(
        [tokenizers.AddedToken("<keeps>", special=True), tokenizers.AddedToken("<eats>", special=True, lstrip=True)]
    )
    assert set(proven_separators(library)) == {"<keeps>"}


@given(
    turns=st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200), min_size=1, max_size=6),
    add_special_tokens=st.booleans(),
)
def test_ids_are_those_of_the_whole_text(
    tokenizer: Tokenizer, separators: dict[str, int], turns: list[str], add_special_tokens: bool
) -> None:
    cache = EncodeCache(tokenizer.encode, separators, 1 << 20)
    padding = "padding " * (MIN_SEGMENTED_CHARS // 8)
    for count in range(1, len(turns) + 1):
        text = chat([padding, *turns[:count]])
        for _ in range(2):
            ids = cache.plan(text, add_special_tokens).encode()
            assert list(ids) == tokenizer.encode(text, add_special_tokens)


def test_a_later_turn_costs_only_itself(tokenizer: Tokenizer, separators: dict[str, int]) -> None:
    counting = Counting(tokenizer)
    cache = EncodeCache(counting, separators, 1 << 24)
    turns = [f"turn {number}: " + "some words of this turn " * 50 for number in range(20)]
    for count in range(1, 20):
        cache.plan(chat(turns[:count]), False).encode()
    before = counting.chars
    plan = cache.plan(chat(turns), False)
    assert plan.missing_chars < 2 * len(turns[-1])
    plan.encode()
    assert counting.chars - before < 2 * len(turns[-1])
    assert cache.plan(chat(turns), False).missing_chars == 0
    assert cache.hits == 1


def test_without_separators_whole_prompts_are_cached(tokenizer: Tokenizer) -> None:
    counting = Counting(tokenizer)
    cache = EncodeCache(counting, {}, 1 << 20)
    text = chat(["hello " * 200])
    first = cache.plan(text, False).encode()
    asked = counting.chars
    assert cache.plan(text, False).encode() == first
    assert counting.chars == asked
    assert list(cache.plan(text, True).encode()) == tokenizer.encode(text, True)


def test_the_cache_is_bounded_and_forgets_the_oldest() -> None:
    cache = BoundedCache(10_000)
    for number in range(1000):
        cache.put((f"text {number}", False), array("I", [number]))
        assert cache.used_bytes <= 10_000
    assert cache.get(("text 0", False)) is None
    assert cache.get(("text 999", False)) == array("I", [999])
    cache.put(("huge" * 5000, False), array("I", [1]))
    assert cache.get(("huge" * 5000, False)) is None
    cache.put(("text 999", False), array("I", [1]))
    cache.put(("text 999", False), array("I", [2]))
    assert cache.get(("text 999", False)) == array("I", [2])
