"""A fast tokenizer built from the fields of a GGUF file.

Runs in the resolver only. Two kinds of vocabulary can be rebuilt exactly: byte-level BPE ("gpt2") and SentencePiece
BPE with scores ("llama"). Any other is refused with the way out: `--tokenizer-path`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from sglmt.errors import ModelError
from sglmt.tokenizer.gguf_metadata import GgufMetadata
from sglmt.tokenizer.pre_tokenizers import known_names, pre_tokenization

# Values of tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

_WAY_OUT = "pass --tokenizer-path with the tokenizer of the original model (a directory or tokenizer.json)"
_SPACE = "\u2581"


def build_tokenizer(metadata: GgufMetadata) -> Tokenizer:
    """The tokenizer of a GGUF file. Raises ModelError naming the field that cannot be honoured."""
    kind = metadata.require("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level(metadata)
    if kind == "llama":
        return _sentencepiece(metadata)
    raise ModelError(
        f"{metadata.path}: a tokenizer of kind {kind!r} (tokenizer.ggml.model) cannot be rebuilt from GGUF "
        f"fields; {_WAY_OUT}"
    )


def _byte_level(metadata: GgufMetadata) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "")
    split = pre_tokenization(name)
    if split is None:
        raise ModelError(
            f"{metadata.path}: unknown pre-tokenizer {name!r} (tokenizer.ggml.pre; known: "
            f"{', '.join(known_names())}); {_WAY_OUT}"
        )
    vocabulary = _vocabulary(metadata)
    merges = [_pair(merge) for merge in metadata.require("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(_bpe(metadata, vocabulary, merges, ignore_merges=split.ignore_merges))
    if split.normalizer is not None:
        tokenizer.normalizer = split.normalizer
    tokenizer.pre_tokenizer = split.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    _add_added_tokens(tokenizer, metadata)
    _add_bos_and_eos(tokenizer, metadata, split.adds_bos)
    return tokenizer


def _sentencepiece(metadata: GgufMetadata) -> Tokenizer:
    for key in ("tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.remove_extra_whitespaces"):
        if metadata.get(key):
            raise ModelError(f"{metadata.path}: normalization by {key} cannot be rebuilt exactly; {_WAY_OUT}")
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens")
    types = _types(metadata, len(tokens))
    for token, kind in zip(tokens, types, strict=True):
        if kind == _USER_DEFINED and _SPACE in token:
            raise ModelError(
                f"{metadata.path}: user-defined token {token!r} contains a space mark and cannot be rebuilt "
                f"exactly; {_WAY_OUT}"
            )
    vocabulary = _vocabulary(metadata)
    scores: list[float] = metadata.require("tokenizer.ggml.scores")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    merges = _merges_by_score(tokens, types, scores)
    tokenizer = Tokenizer(_bpe(metadata, vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    to_marks = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), to_marks]) if prefix else to_marks
    stages = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if prefix else stages)
    _add_added_tokens(tokenizer, metadata)
    _add_bos_and_eos(tokenizer, metadata, adds_bos=True)
    return tokenizer


def _bpe(
    metadata: GgufMetadata,
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    unk_token: str | None = None,
    fuse_unk: bool = False,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> models.BPE:
    try:
        return models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=unk_token,
            fuse_unk=fuse_unk,
            byte_fallback=byte_fallback,
            ignore_merges=ignore_merges,
        )
    except Exception as error:
        raise ModelError(f"{metadata.path}: its vocabulary and merges do not fit: {error}; {_WAY_OUT}") from error


def _vocabulary(metadata: GgufMetadata) -> dict[str, int]:
    """Token to id. Of tokens written alike the first counts; ids of the others have no token."""
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(metadata.require("tokenizer.ggml.tokens")):
        vocabulary.setdefault(token, index)
    return vocabulary


def _types(metadata: GgufMetadata, count: int) -> Sequence[int]:
    types: Sequence[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * count
    if len(types) != count:
        raise ModelError(f"{metadata.path}: {count} tokens but {len(types)} token types; the file is damaged")
    return types


def _pair(merge: str) -> tuple[str, str]:
    """A merge is written "left right"; the left token may itself begin with a space."""
    middle = merge.find(" ", 1)
    return merge[:middle], merge[middle + 1 :]


def _merges_by_score(tokens: list[str], types: Sequence[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to join two normal pieces into a third, best score of the result first."""
    ids = {token: index for index, token in enumerate(tokens) if types[index] == _NORMAL}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in ids.items():
        for middle in range(1, len(token)):
            left, right = token[:middle], token[middle:]
            if left in ids and right in ids:
                ranked.append((-scores[index], ids[left], ids[right], left, right))
    ranked.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in ranked]


def _add_added_tokens(tokenizer: Tokenizer, metadata: GgufMetadata) -> None:
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens")
    types = _types(metadata, len(tokens))
    added = [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
    ]
    tokenizer.add_tokens(added)


def _add_bos_and_eos(tokenizer: Tokenizer, metadata: GgufMetadata, adds_bos: bool) -> None:
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens")
    bos, eos = metadata.token_id("bos"), metadata.token_id("eos")
    first = [bos] if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else []
    last = [eos] if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    if not first and not last:
        return
    before, after = [tokens[index] for index in first], [tokens[index] for index in last]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=[(tokens[index], index) for index in {*first, *last}],
    )
