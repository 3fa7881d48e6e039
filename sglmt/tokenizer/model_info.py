"""What every process needs to know about the model: written once by the resolver, read by the others."""

from __future__ import annotations

from typing import Literal

import msgspec


class ModelInfo(msgspec.Struct, frozen=True):
    """Facts about a model and its tokenizer.

    Ids are token ids. `vocab_size` is the size of the id space the engine accepts (rows of the embedding), which
    may exceed the number of tokens. `eos_token_ids` are all ids that end generation, the tokenizer's own first.
    `special_tokens` maps names that chat templates use (bos_token, eos_token …) to their text. Paths are absolute.
    """

    model_path: str
    model_kind: Literal["gguf", "hf"]
    architecture: str
    context_length: int  # tokens
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    pad_token_id: int | None
    add_bos: bool
    add_eos: bool
    special_token_ids: list[int]
    generation_defaults: dict[str, float | int]
    is_embedding: bool
    tokenizer_file: str | None
    chat_template_file: str | None
    fingerprint: str
    special_tokens: dict[str, str] = {}
    separators: dict[str, int] = {}  # special tokens proven to cut a text into independent pieces: text → id
    fastokens_note: str | None = None  # "": gives the same ids; else why it is not used; None: nobody tried
