"""The table from token id to text that incremental detokenization reads: one list lookup for most tokens.

Built once per process (detokenizer, or a worker that shows log-probabilities) from a loaded tokenizer; immutable
afterwards and shared by all requests. Most tokens stand for the same text wherever they appear; the table holds
that text. The others (parts of a character, anything whose text depends on its place) hold None there, and
`detokenize` treats them with the rules kept beside the lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from sglmt.tokenizer.byte_level import token_to_bytes
from sglmt.tokenizer.decoder_rules import DecoderRules


class TableSource(Protocol):
    """What a table needs to know of a tokenizer (`loading.Tokenizer` is one)."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def rules(self) -> DecoderRules: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def id_to_token(self, token_id: int) -> str | None: ...


class TokenTable:
    """Texts of all ids in `range(size)`.

    `keep` and `skip` hold the text of each id away from the start of the text, with special tokens kept or skipped;
    None where only the slow path knows. `raw` holds the bytes of the tokens that are not text of their own.
    `ignored` ids stand for nothing (no token has that id): a decoder never sees them.
    """

    __slots__ = ("blank", "ignored", "keep", "raw", "rules", "size", "skip", "special", "tight", "tokens")

    def __init__(self, tokens: Sequence[str | None], rules: DecoderRules, special: frozenset[int]) -> None:
        self.tokens = tokens
        self.rules = rules
        self.special = special
        self.size = len(tokens)
        self.ignored = frozenset(index for index, token in enumerate(tokens) if token is None)
        self.raw: dict[int, bytes] = {}
        texts = list(self._texts())
        self.keep: list[str | None] = texts
        self.skip: list[str | None] = _override(texts, special, "")
        self.blank: list[str | None] = [None] * self.size
        self.tight: list[str | None] = _override(texts, special, None) if rules.separates else texts

    @classmethod
    def from_tokenizer(cls, tokenizer: TableSource) -> TokenTable:
        """The table of a loaded tokenizer. Raises ModelError when its decoder is of an unsupported kind."""
        tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.vocab_size)]
        return cls(tokens, tokenizer.rules, tokenizer.special_ids)

    def _texts(self) -> Iterator[str | None]:
        in_bytes = self.rules.mode == "bytes"
        for index, token in enumerate(self.tokens):
            if token is None:
                yield ""
            elif in_bytes:
                yield self._text_of_bytes(index, token_to_bytes(token))
            else:
                piece = self.rules.piece(token, False)
                yield piece if isinstance(piece, str) else self._text_of_byte(index, piece)

    def _text_of_bytes(self, index: int, data: bytes) -> str | None:
        try:
            return data.decode()
        except UnicodeDecodeError:
            self.raw[index] = data
            return None

    def _text_of_byte(self, index: int, byte: int) -> str | None:
        self.raw[index] = bytes((byte,))
        return self.rules.finish_piece(chr(byte), False) if byte < 0x80 else None


def _override(texts: list[str | None], ids: frozenset[int], text: str | None) -> list[str | None]:
    copy = texts.copy()
    for index in ids:
        if index < len(copy):
            copy[index] = text
    return copy
