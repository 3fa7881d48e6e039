"""The metadata of a GGUF file: what it says about the model and its tokenizer. No tensor is read.

Runs in the resolver only (reading a large vocabulary takes a second or two). Field names are those of the
GGUF specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglmt.errors import ModelError


class GgufMetadata:
    """Key-value fields of one file, and the number of rows of its embedding (0: it has none)."""

    def __init__(self, path: str, fields: Mapping[str, Any], embedding_rows: int = 0) -> None:
        self.path = path
        self.embedding_rows = embedding_rows
        self._fields = fields

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a field, decoded; `default` when the file has none."""
        return self._fields.get(key, default)

    def require(self, key: str) -> Any:
        """The value of a field the file must have. Raises ModelError naming it."""
        value = self._fields.get(key)
        if value is None:
            raise ModelError(f"{self.path} has no field {key}; convert the model again with a current converter")
        return value

    def token_id(self, name: str) -> int | None:
        """The id stored as `tokenizer.ggml.<name>_token_id`, None when absent or outside the vocabulary."""
        value = self._fields.get(f"tokenizer.ggml.{name}_token_id")
        count = len(self._fields.get("tokenizer.ggml.tokens", ()))
        return int(value) if value is not None and 0 <= int(value) < count else None

    def names(self) -> list[str]:
        """Names of all fields."""
        return list(self._fields)


def read_gguf(path: Path) -> GgufMetadata:
    """Read the metadata of a file. Raises ModelError when it is not a readable GGUF file."""
    import gguf

    try:
        reader = gguf.GGUFReader(str(path))
        fields = {name: field.contents() for name, field in reader.fields.items()}
        rows = [int(tensor.shape[-1]) for tensor in reader.tensors if tensor.name == "token_embd.weight"]
    except OSError as error:
        raise ModelError(f"cannot read the model {path}: {error.strerror or error}") from error
    except Exception as error:  # the reader fails in many ways on damaged files
        raise ModelError(
            f"{path} is not a complete GGUF file ({type(error).__name__}: {error}); download it again"
        ) from error
    return GgufMetadata(str(path), fields, rows[0] if rows else 0)
