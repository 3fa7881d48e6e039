"""What the readers of model formats hand to `resolve`: facts about the model, and the parts of a tokenizer.

Used in the resolver only. Model and tokenizer are separate because `--tokenizer-path` may name another source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts that come from the model itself. Ids are token ids; `context_length` is in tokens."""

    kind: Literal["gguf", "hf"]
    architecture: str
    context_length: int
    vocab_size: int
    eos_ids: list[int]
    is_embedding: bool
    bos_id: int | None = None
    pad_id: int | None = None
    generation_defaults: dict[str, float | int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What to write: a fast tokenizer (JSON text), the chat template, the texts of named special tokens."""

    tokenizer_json: bytes
    chat_template: str | None
    special_tokens: dict[str, str]
