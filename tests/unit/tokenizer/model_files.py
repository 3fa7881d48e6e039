"""Writes small models: GGUF files and Hugging Face directories around the synthetic tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def gguf_fields(tokenizer: Tokenizer, kind: str, pre: str = "gpt-2") -> dict[str, Any]:
    """The `tokenizer.ggml` fields that describe a BPE tokenizer."""
    described = json.loads(tokenizer.to_str())
    size = max(tokenizer.get_vocab().values()) + 1
    tokens = [tokenizer.id_to_token(index) or f"[PAD{index}]" for index in range(size)]
    types = [NORMAL] * size
    for token in described["added_tokens"]:
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in described["model"]["merges"]]
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
    }
    if kind == "gpt2":
        return fields | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges}
    scores: dict[str, float] = {}
    for rank, merge in enumerate(merges):
        scores.setdefault(merge.replace(" ", ""), -float(rank))
    for index, token in enumerate(tokens):
        if token.startswith("<0x"):
            types[index] = BYTE
        elif token == "<unk>":
            types[index] = UNKNOWN
    return fields | {"tokenizer.ggml.scores": [scores.get(token, 0.0) for token in tokens]}


def write_gguf(path: Path, fields: dict[str, Any], rows: int = 0) -> Path:
    """A GGUF file with these fields and, with `rows`, an embedding of that many rows."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    for key, value in fields.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    if rows:
        writer.add_tensor("token_embd.weight", np.zeros((rows, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_hf(directory: Path, tokenizer: Tokenizer | None, **files: Any) -> Path:
    """A model directory: config.json with sane values, tokenizer.json, and further files (name without .json)."""
    directory.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
    }
    for name, value in {"config": config, **files}.items():
        if name == "config":
            value = {key: item for key, item in {**config, **value}.items() if item is not None}
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory
