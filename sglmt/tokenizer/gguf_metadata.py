"""The metadata of a GGUF file: what it says about the model and its tokenizer. No tensor data is read.

Runs in the resolver only. The layout is that of the GGUF specification, versions 2 and 3, little-endian: a header,
key-value fields, then descriptions of the tensors. The file is mapped, so that only these parts are touched, and
every length is checked against the file before it is believed. (The format's own Python package builds several
objects per vocabulary entry: eight seconds for a vocabulary of 128,000, where this takes a quarter of one.)
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglmt.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
# struct codes of the scalar types, by the number the format gives them
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 8


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
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(str(path), data)
    except OSError as error:
        raise ModelError(f"cannot read the model {path}: {error.strerror or error}") from error
    except (ValueError, struct.error) as error:  # mmap refuses an empty file with ValueError
        raise ModelError(f"{path} is not a complete GGUF file ({error}); download it again") from error


def _parse(path: str, data: mmap.mmap) -> GgufMetadata:
    cursor = _Cursor(data)
    if cursor.take(4) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version} of the format is not one of {_VERSIONS}")
    tensor_count, field_count = cursor.scalar("Q"), cursor.scalar("Q")
    fields: dict[str, Any] = {}
    for _ in range(field_count):
        name = cursor.string()
        fields[name] = cursor.value(cursor.scalar("I"))
    return GgufMetadata(path, fields, _embedding_rows(cursor, tensor_count))


def _embedding_rows(cursor: _Cursor, tensor_count: int) -> int:
    """The outer dimension of the tensor token_embd.weight; the innermost is written first."""
    for _ in range(tensor_count):
        name = cursor.string()
        dimensions = cursor.scalar("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = cursor.scalars("Q", dimensions)
        cursor.take(12)  # type and offset
        if name == "token_embd.weight" and shape:
            return int(shape[-1])
    return 0


class _Cursor:
    """Reads values one after another. Raises ValueError or struct.error at the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0

    def take(self, count: int) -> bytes:
        begin, end = self._at, self._at + count
        if end > self._size:
            raise ValueError(f"it ends at byte {self._size}, inside its metadata")
        self._at = end
        return self._data[begin:end]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{code}", self.take(struct.calcsize(f"<{code}") * count))

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def string(self) -> str:
        """Text; what is not UTF-8 in it is shown as U+FFFD."""
        return self.take(self.scalar("Q")).decode("utf-8", "replace")

    def strings(self, count: int) -> list[str]:
        texts: list[str] = []
        data, at, size = self._data, self._at, self._size
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            begin = at + 8
            at = begin + length_at(data, at)[0]
            if at > size:
                raise ValueError(f"it ends at byte {size}, inside its metadata")
            texts.append(data[begin:at].decode("utf-8", "replace"))
        self._at = at
        return texts

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.scalar(self._code(kind))

    def _array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > self._size:
            raise ValueError(f"an array claims {count} entries")
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            raise ValueError("it holds arrays of arrays")
        return list(self.scalars(self._code(kind), count))

    @staticmethod
    def _code(kind: int) -> str:
        code = _SCALARS.get(kind)
        if code is None:
            raise ValueError(f"a field has the unknown type {kind}")
        return code
