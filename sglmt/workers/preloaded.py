"""What a process was forked with: tokenizer, token table and chat template, loaded once by the zygote.

A child that was spawned afresh has nothing preloaded and loads for itself; roles do not see the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglmt.tokenizer.chat_template import ChatTemplate
from sglmt.tokenizer.loading import Backend, Tokenizer, load_chat_template, load_tokenizer
from sglmt.tokenizer.model_info import ModelInfo


@dataclass(frozen=True)
class Preloaded:
    """Read-only after the fork."""

    info: ModelInfo
    backend: Backend
    tokenizer: Tokenizer
    template: ChatTemplate | None


def preload(info: ModelInfo, backend: Backend) -> Preloaded:
    """Load everything. Starts no thread: an unproven fast backend is proven by the child that uses it.

    Raises ModelError or ChatTemplateError.
    """
    proven = backend if info.fastokens_note is not None else "huggingface"
    tokenizer = load_tokenizer(info, proven)
    _ = tokenizer.length_bound, tokenizer.table
    return Preloaded(info, proven, tokenizer, load_chat_template(info))


def take_or_load(preloaded: Preloaded | None, info: ModelInfo, backend: Backend) -> Preloaded:
    """What this process was forked with, if it is that model and backend; else load it now."""
    if preloaded is not None and preloaded.info == info and preloaded.backend == backend:
        return preloaded
    return Preloaded(info, backend, load_tokenizer(info, backend), load_chat_template(info))
