"""Small tokenizers of every kind, trained in milliseconds, for property tests that need no network."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from sglmt.tokenizer.loading import Tokenizer as Loaded
from sglmt.tokenizer.model_info import ModelInfo

TEXTS = [
    "The quick brown fox doesn't jump over 13 lazy dogs, does it? It's what we've seen; they're sure.",
    "def f(x):\n    return x + 1  # done\n\n\n",
    "日本語のテキストと漢字。鑫龘 한국어 ไทย हिन्दी",
    "naïve café e\u0301 🔥 👩\u200d👧 🇩🇪 résumé",
    "  two   spaces\tand\ttabs ",
]
SPECIALS = ["<s>", "</s>", "<|end|>"]
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def model_info(**changes: object) -> ModelInfo:
    """A ModelInfo for a tokenizer that has no model."""
    values: dict[str, object] = {
        "model_path": "/nowhere",
        "model_kind": "hf",
        "architecture": "none",
        "context_length": 1,
        "vocab_size": 1,
        "bos_token_id": None,
        "eos_token_ids": [],
        "pad_token_id": None,
        "add_bos": False,
        "add_eos": False,
        "special_token_ids": [],
        "generation_defaults": {},
        "is_embedding": False,
        "tokenizer_file": None,
        "chat_template_file": None,
        "fingerprint": "",
    }
    return ModelInfo(**(values | changes))  # type: ignore[arg-type]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    return _trained(tokenizer, trainer)


def sentencepiece(prefix: bool = True) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    marks = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), marks]) if prefix else marks
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if prefix else stages)
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *SPECIALS, *BYTE_TOKENS], limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    # The trainer makes every listed token special; byte tokens are ordinary ones.
    return _respecial(tokenizer, ["<unk>", *SPECIALS])


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", *SPECIALS], unk_token="<unk>", show_progress=False
    )
    return _trained(tokenizer, trainer)


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", *SPECIALS], show_progress=False)
    return _trained(tokenizer, trainer)


def bare() -> Tokenizer:
    """No decoder at all: tokens are joined by spaces."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>", *SPECIALS], show_progress=False)
    return _trained(tokenizer, trainer)


KINDS = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "sentencepiece without prefix": lambda: sentencepiece(prefix=False),
    "unigram": unigram,
    "wordpiece": wordpiece,
    "bare": bare,
}


@cache
def library(kind: str) -> Tokenizer:
    """The tokenizer of one of `KINDS`, the same in the whole run: training breaks ties at random."""
    return KINDS[kind]()


@cache
def loaded(kind: str) -> Loaded:
    """The same as sglmt holds it."""
    return Loaded(library(kind), model_info())


def _trained(tokenizer: Tokenizer, trainer: object) -> Tokenizer:
    tokenizer.train_from_iterator(TEXTS, trainer)
    # An added token that is not special, with a space and a multi-byte character in it.
    tokenizer.add_tokens([AddedToken("two words é", normalized=False)])
    return tokenizer


def _respecial(tokenizer: Tokenizer, specials: list[str]) -> Tokenizer:
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] in specials]
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.add_tokens([AddedToken("two words é", normalized=False)])
    return tokenizer
