"""A model given as a Hugging Face directory: facts from its configuration files.

Used in the resolver only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglmt.errors import ModelError
from sglmt.tokenizer.described import ModelFacts
from sglmt.tokenizer.hf_files import as_ids, read_json

_CONTEXT_KEYS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length", "seq_length", "max_seq_len"
)  # fmt: skip
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "repetition_penalty")
_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_ABSURD_LENGTH = 10**9  # tokenizers without a limit write a huge model_max_length


def read_hf_model(directory: Path) -> ModelFacts:
    """Facts about the model in a directory. Raises ModelError naming the file or key that is missing."""
    config = read_json(directory / "config.json")
    if config is None:
        raise ModelError(f"{directory} has no config.json: it is not a Hugging Face model directory")
    text = next((config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict)), config)
    generation = read_json(directory / "generation_config.json") or {}
    architectures = config.get("architectures") or []
    eos = (generation.get("eos_token_id"), text.get("eos_token_id"), config.get("eos_token_id"))
    return ModelFacts(
        kind="hf",
        architecture=str(architectures[0] if architectures else config.get("model_type", "unknown")),
        context_length=_context_length(directory, text),
        vocab_size=_positive(directory, text, "vocab_size"),
        eos_ids=list(dict.fromkeys(index for value in eos for index in as_ids(value))),
        is_embedding=_is_embedding(directory, architectures),
        bos_id=_first_id(text.get("bos_token_id"), config.get("bos_token_id")),
        pad_id=_first_id(text.get("pad_token_id"), config.get("pad_token_id"), generation.get("pad_token_id")),
        generation_defaults={
            key: generation[key]
            for key in _GENERATION_KEYS
            if isinstance(generation.get(key), int | float) and not isinstance(generation[key], bool)
        },
    )


def _context_length(directory: Path, config: dict[str, Any]) -> int:
    lengths: list[int] = [config[key] for key in _CONTEXT_KEYS if isinstance(config.get(key), int) and config[key] > 0]
    if not lengths:
        length = (read_json(directory / "tokenizer_config.json") or {}).get("model_max_length")
        if isinstance(length, int | float) and 0 < length < _ABSURD_LENGTH:
            lengths = [int(length)]
    if not lengths:
        raise ModelError(
            f"{directory / 'config.json'} gives no context length; add max_position_embeddings (tokens) to it"
        )
    sentence = (read_json(directory / "sentence_bert_config.json") or {}).get("max_seq_length")
    if isinstance(sentence, int) and sentence > 0:
        return min(lengths[0], sentence)
    return lengths[0]


def _positive(directory: Path, config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"{directory / 'config.json'}: {key} is {value!r}, expected a positive number")
    return value


def _is_embedding(directory: Path, architectures: list[str]) -> bool:
    if (directory / "modules.json").is_file():
        return True
    return bool(architectures) and not any(name.endswith(suffix) for name in architectures for suffix in _GENERATES)


def _first_id(*values: Any) -> int | None:
    return next((index for value in values for index in as_ids(value)), None)
