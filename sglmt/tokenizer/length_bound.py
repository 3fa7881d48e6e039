"""How few tokens a text can have, told from its length alone: a prompt that is far too long need not be tokenized.

Used by `loading`. Only byte-level vocabularies have a bound: there every byte of the text
is part of exactly one token, or dropped because no token has it.
Whatever could drop or shrink text (a normalizer, a splitter that removes, an added token that eats the white space
around it) means no bound, but for the canonical compositions, which shrink a text to a third at most.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tokenizers

from sglmt.tokenizer.byte_level import CHAR_OF_BYTE, token_to_bytes

_COMPOSED_SHRINK = 4  # bytes before NFC for one after it; the most there is, is 3
_PLAIN_SPLITTERS = frozenset(("ByteLevel", "Digits"))


@dataclass(frozen=True)
class LengthBound:
    """One token stands for at most `most_bytes` of text; `dropped` bytes are in no token and vanish."""

    most_bytes: int
    dropped: bytes

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least."""
        kept = text.encode("utf-8", "replace").translate(None, self.dropped)
        return -(-len(kept) // self.most_bytes)


def length_bound(library: tokenizers.Tokenizer, tokens: Iterable[str | None]) -> LengthBound | None:
    """The bound of a vocabulary, None when there is none."""
    shrink = _shrink(library)
    splitters = _parts(library.pre_tokenizer, "pretokenizers")
    added = library.get_added_tokens_decoder().values()
    dropped = bytes(byte for byte, char in CHAR_OF_BYTE.items() if library.token_to_id(char) is None)
    if (
        shrink is None
        or not any(part.get("type") == "ByteLevel" for part in splitters)
        or not all(_keeps_all(part) for part in splitters)
        or any(token.lstrip or token.rstrip for token in added)
        or (dropped and shrink > 1)
    ):
        return None
    longest = max((len(token_to_bytes(token)) for token in tokens if token is not None), default=0)
    longest = max(longest, *(len(token.content.encode()) for token in added), 1)
    return LengthBound(longest * shrink, dropped)


def _shrink(library: tokenizers.Tokenizer) -> int | None:
    kinds = {part.get("type") for part in _parts(library.normalizer, "normalizers")}
    return 1 if not kinds else _COMPOSED_SHRINK if kinds == {"NFC"} else None


def _keeps_all(part: dict[str, Any]) -> bool:
    return part.get("type") in _PLAIN_SPLITTERS or (part.get("type") == "Split" and part.get("behavior") != "Removed")


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer as the tokenizer file describes them."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return list(state[name]) if state.get("type") == "Sequence" else [state]
