"""Reading the JSON files of a Hugging Face model directory, with errors that name file and key.

Used in the resolver only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from sglmt.errors import ModelError


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None when there is no such file. Raises ModelError when it is not an object."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object; download it again")
    return value


def as_ids(value: Any) -> list[int]:
    """Token ids written as one number, a list, or null."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0]


def token_content(value: Any) -> str | None:
    """The text of a special token written as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
