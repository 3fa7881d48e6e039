"""How byte-level vocabularies split text before merging, by the name a GGUF file gives (`tokenizer.ggml.pre`).

Runs in the resolver only. The patterns are those published with the models. A name is listed only when its pattern
is known exactly: a wrong split gives plausible but wrong ids, which no later check would notice.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_LETTER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"

# One pattern whose matches are the words; {1,3} or single digits is the difference between the first two.
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_LETTER}]*[{_LOWER}]+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_LETTER}]+[{_LOWER}]*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL,
)

_GPT2_NAMES = ("default", "gpt-2", "gpt2", "phi-2")
_SINGLE_DIGIT_NAMES = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe")


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """The split of one family, what goes with it, and whether such files put BOS first unless they say."""

    pre_tokenizer: pre_tokenizers.PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def known_names() -> tuple[str, ...]:
    """All names `pre_tokenization` knows."""
    return (*_GPT2_NAMES[1:], *_SINGLE_DIGIT_NAMES, *_LLAMA3_NAMES, "qwen2", "gpt-4o", "deepseek-v3")


def pre_tokenization(name: str) -> PreTokenization | None:
    """What `tokenizer.ggml.pre` = name stands for; None for an unknown name."""
    if name in _GPT2_NAMES[1:]:
        return PreTokenization(_gpt2())
    if name in _SINGLE_DIGIT_NAMES:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return PreTokenization(pre_tokenizers.Sequence([digits, _gpt2()]))
    if name in _LLAMA3_NAMES:
        return PreTokenization(_words(_LLAMA3), ignore_merges=True, adds_bos=True)
    if name == "qwen2":
        return PreTokenization(_words(_QWEN2), normalizers.NFC())
    if name == "gpt-4o":
        return PreTokenization(_words(_GPT4O))
    if name == "deepseek-v3":
        return PreTokenization(_words(*_DEEPSEEK3))
    return None


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _words(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
