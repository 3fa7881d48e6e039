"""A model given as a GGUF file: facts, tokenizer and chat template, all from the file's own metadata.

Runs in the resolver only.
"""

from __future__ import annotations

from pathlib import Path

from sglmt.errors import ModelError
from sglmt.tokenizer.described import ModelFacts, TokenizerParts
from sglmt.tokenizer.gguf_metadata import GgufMetadata, read_gguf
from sglmt.tokenizer.gguf_tokenizer import build_tokenizer
from sglmt.tokenizer.templates import choose_template

# Tokens that end a turn or a document in the families whose files may name only one of them as EOS.
_END_TOKENS = frozenset(
    (
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<end_of_turn>",
        "<|end|>",
        "<EOT>",
    )
)
_CONTROL = 3  # tokenizer.ggml.token_type
_EMBEDDING_ARCHITECTURES = frozenset(("bert", "nomic-bert", "nomic-bert-moe", "jina-bert-v2", "t5encoder"))


def read_gguf_model(path: Path) -> tuple[ModelFacts, GgufMetadata]:
    """Facts about the model; the metadata is returned for its tokenizer. Raises ModelError."""
    metadata = read_gguf(path)
    architecture = str(metadata.require("general.architecture"))
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    rows = metadata.embedding_rows or int(metadata.get(f"{architecture}.vocab_size") or 0) or len(tokens)
    if not rows:
        raise ModelError(f"{path} has neither token embeddings nor a vocabulary: it is not a language model")
    facts = ModelFacts(
        kind="gguf",
        architecture=architecture,
        context_length=int(metadata.require(f"{architecture}.context_length")),
        vocab_size=rows,
        eos_ids=end_ids(metadata),
        is_embedding=architecture in _EMBEDDING_ARCHITECTURES
        or bool(metadata.get(f"{architecture}.pooling_type")),  # 0: no pooling
    )
    return facts, metadata


def gguf_tokenizer_parts(metadata: GgufMetadata) -> TokenizerParts:
    """Tokenizer and chat template of a GGUF file. Raises ModelError when they cannot be rebuilt."""
    tokens: list[str] = metadata.require("tokenizer.ggml.tokens")
    named = {
        f"{name}_token": tokens[index]
        for name, field in _SPECIAL_NAMES
        if (index := metadata.token_id(field)) is not None
    }
    templates = {
        key.removeprefix("tokenizer.chat_template.") or "default": str(metadata.get(key))
        for key in metadata.names()
        if key.startswith("tokenizer.chat_template.")
    }
    if default := metadata.get("tokenizer.chat_template"):
        templates["default"] = str(default)
    return TokenizerParts(
        tokenizer_json=build_tokenizer(metadata).to_str().encode(),
        chat_template=choose_template(templates),
        special_tokens=named,
    )


def end_ids(metadata: GgufMetadata) -> list[int]:
    """Ids that end generation: EOS first, then end of turn, then end tokens known by name."""
    ids = [metadata.token_id(name) for name in ("eos", "eot", "eom")]
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    types = metadata.get("tokenizer.ggml.token_type") or [_CONTROL] * len(tokens)
    ids += [
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL and token in _END_TOKENS
    ]
    return list(dict.fromkeys(index for index in ids if index is not None))


_SPECIAL_NAMES = (
    ("bos", "bos"),
    ("eos", "eos"),
    ("unk", "unknown"),
    ("sep", "seperator"),  # spelled so in the format
    ("pad", "padding"),
    ("cls", "cls"),
    ("mask", "mask"),
)
