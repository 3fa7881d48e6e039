"""The default model's tokenizer, for measurements inside the benchmark process. Resolved as a launch does it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from sglmt.supervisor.resolve_model import cache_directory
from sglmt.tokenizer.default_model import default_model_path
from sglmt.tokenizer.loading import Tokenizer, load_tokenizer
from sglmt.tokenizer.resolve import resolve_model


def default_tokenizer() -> Tokenizer:
    """The tokenizer of the shipped model, from the cache the servers use. Raises ModelError."""
    info = resolve_model(default_model_path(), None, None, cache_directory(Path(tempfile.gettempdir())))
    return load_tokenizer(info, "huggingface")
