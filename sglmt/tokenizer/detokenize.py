"""Token ids to text, incrementally: what each new token adds, and nothing that a later token could change.

Runs in the detokenizer process, one small object per request (and per choice of a request). Owns the request's
unfinished character. The joined output of all pushes and `finish` is the tokenizer's own decode of all ids,
whatever the grouping; no half character is ever emitted and time is linear in the number of tokens.

One known difference, which no stream can avoid: in vocabularies with byte fallback, the library replaces every byte
of a run of byte tokens that is not valid UTF-8 as a whole. Characters of that run that were complete before the
first invalid byte have been emitted here; from that byte on the run is replaced byte by byte, as there.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from sglmt.errors import SglmtError
from sglmt.tokenizer.token_table import TokenTable

_REPLACEMENT = "\ufffd"


class TokenIdError(SglmtError):
    """A token id outside the vocabulary; `token_id` says which. The state of the request is unchanged."""

    def __init__(self, token_id: int, size: int) -> None:
        super().__init__(f"token id {token_id} is outside the vocabulary (0 to {size - 1})")
        self.token_id = token_id


class IncrementalDetokenizer:
    """The text of one growing sequence of token ids.

    With `skip_special_tokens` special tokens add no text. `spaces_between_special_tokens=False` leaves out the
    space that a WordPiece (or missing) decoder puts between two special tokens that follow each other; other
    decoders put none. `shown_ids` are special tokens that add their text all the same.
    """

    __slots__ = (
        "_clean",
        "_direct",
        "_first",
        "_pending",
        "_poisoned",
        "_shown",
        "_skips",
        "_special_before",
        "_strip",
        "_table",
        "_tight",
    )

    def __init__(
        self,
        table: TokenTable,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        shown_ids: Sequence[int] = (),
    ) -> None:
        self._table = table
        self._skips = skip_special_tokens
        self._shown = frozenset(shown_ids) if skip_special_tokens else frozenset[int]()
        self._tight = not skip_special_tokens and not spaces_between_special_tokens and table.rules.separates
        self._clean = table.skip if skip_special_tokens else table.tight if self._tight else table.keep
        if self._shown:  # looked at one by one
            self._clean = table.blank
        self._pending = b""  # bytes of an unfinished character
        self._poisoned = False  # inside a run of byte tokens known to be invalid
        self._special_before = False
        self._first = table.rules.first_matters
        self._strip = table.rules.strip_start  # leading characters that may still be stripped
        self._direct = table.blank if self._first or self._strip else self._clean

    def push_one(self, token_id: int) -> str:
        """The text that this id makes certain, maybe empty. Raises TokenIdError, leaving the state as it was."""
        try:
            if token_id >= 0:
                text = self._direct[token_id]
                if text is not None:
                    return text
        except IndexError:
            pass
        return self._push_slow(token_id)

    def looks_up(self, texts: list[str | None]) -> bool:
        """Whether the next id adds what `texts` holds for it, unless that is None."""
        return self._direct is texts

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids add. Raises TokenIdError, leaving the state as it was before the call."""
        if len(ids) == 1:
            return self.push_one(ids[0])
        saved = (
            self._direct, self._pending, self._poisoned, self._special_before, self._first, self._strip
        )  # fmt: skip
        texts: list[str] = []
        try:
            for token_id in ids:
                texts.append(self.push_one(token_id))
        except BaseException:
            (
                self._direct, self._pending, self._poisoned, self._special_before, self._first, self._strip
            ) = saved  # fmt: skip
            raise
        return "".join(texts)

    def finish(self) -> str:
        """The text of an unfinished character at the end: U+FFFD, as a full decode writes it."""
        pending, self._pending = self._pending, b""
        if not pending:
            return ""
        if self._table.rules.mode == "bytes":
            return self._emit(utf_8_decode(pending, "replace", True)[0])
        return self._emit(_REPLACEMENT * len(pending))

    def _push_slow(self, token_id: int) -> str:
        table = self._table
        if not 0 <= token_id < table.size:
            raise TokenIdError(token_id, table.size)
        special = token_id in table.special
        if token_id in table.ignored or (special and self._skips and token_id not in self._shown):
            return ""
        in_bytes = table.rules.mode == "bytes"
        return self._emit(self._push_bytes(token_id) if in_bytes else self._push_text(token_id, special))

    def _emit(self, text: str) -> str:
        """Strip the start of the text, then choose what the next id is looked up in."""
        if self._strip and text:
            char = self._table.rules.strip_char
            while self._strip and text[:1] == char:
                text, self._strip = text[1:], self._strip - 1
            if text:
                self._strip = 0
        unsettled = self._pending or self._poisoned or self._first or self._strip or self._special_before
        self._direct = self._table.blank if unsettled else self._clean
        return text

    def _push_bytes(self, token_id: int) -> str:
        table = self._table
        data = table.raw.get(token_id)
        if data is None:
            data = (table.keep[token_id] or "").encode()
        data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def _push_text(self, token_id: int, special: bool) -> str:
        table = self._table
        piece: str | int | None
        if self._first and not self._pending:
            piece = table.rules.piece(table.tokens[token_id] or "", True)
        else:
            piece = table.raw[token_id][0] if token_id in table.raw else table.keep[token_id]
        if isinstance(piece, int):
            return self._push_byte(piece)
        if special and self._special_before:
            piece = table.tokens[token_id]
        self._special_before = special and self._tight
        text = _REPLACEMENT * len(self._pending) + (piece or "")
        self._pending, self._poisoned, self._first = b"", False, False
        return text

    def _push_byte(self, byte: int) -> str:
        rules = self._table.rules
        self._special_before = False
        first, self._first = self._first, False
        if self._poisoned:
            return _REPLACEMENT
        data = self._pending + bytes((byte,))
        try:
            text, used = utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            self._pending, self._poisoned = b"", True
            return _REPLACEMENT * len(data)
        self._pending = data[used:]
        if self._pending:
            self._first = first
        return rules.finish_piece(text, first)
