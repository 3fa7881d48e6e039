"""The tokenizer that a process holds: text to ids, ids to text, and what a single id looks like.

Used by tokenizer workers and the detokenizer; reads the files the resolver wrote and nothing else, and never
imports transformers. Long texts are encoded through the batch call, which releases the interpreter lock, so that a
thread can carry them while the event loop serves others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

import tokenizers

from sglmt.errors import ModelError
from sglmt.tokenizer.byte_level import token_to_bytes
from sglmt.tokenizer.chat_template import ChatTemplate
from sglmt.tokenizer.decoder_rules import DecoderRules, compile_rules
from sglmt.tokenizer.detokenize import IncrementalDetokenizer, TokenIdError
from sglmt.tokenizer.fast_backend import Encoder, HuggingFaceEncoder, load_fastokens, prove_fastokens
from sglmt.tokenizer.length_bound import LengthBound, length_bound
from sglmt.tokenizer.model_info import ModelInfo
from sglmt.tokenizer.token_table import TokenTable

_HALF_PAIR = re.compile("[\ud800-\udfff]")

Backend = Literal["auto", "huggingface", "fastokens"]


class Tokenizer:
    """A loaded tokenizer. Immutable; safe to use from several threads."""

    def __init__(self, library: tokenizers.Tokenizer, info: ModelInfo, backend: Backend = "huggingface") -> None:
        self._library = library
        self.info = info
        added = library.get_added_tokens_decoder()
        special_texts = {token.content for token in added.values() if token.special}
        self.special_ids = frozenset(
            index for text in special_texts if (index := library.token_to_id(text)) is not None
        )
        self.vocab_size = max(info.vocab_size, library.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added))
        self.rules: DecoderRules = compile_rules(
            library.decoder.__getstate__() if library.decoder is not None else None
        )
        self._encoder: Encoder = HuggingFaceEncoder(library)
        self.backend: Literal["huggingface", "fastokens"] = "huggingface"
        self.backend_note = ""
        if backend != "huggingface":
            if info.fastokens_note is None:
                fast, self.backend_note = prove_fastokens(info.tokenizer_file, library)
            elif info.fastokens_note == "":
                fast, self.backend_note = load_fastokens(info.tokenizer_file)
            else:
                fast, self.backend_note = None, info.fastokens_note
            if fast is not None:
                self._encoder, self.backend = fast, "fastokens"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text; with `add_special_tokens` also what the tokenizer puts around one (BOS, EOS …).

        Raises ValueError when the text is not Unicode (it holds half of a surrogate pair).
        """
        try:
            return self._encoder.encode(text, add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise _not_unicode([text], error) from error

    def encode_many(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """The ids of each text; releases the interpreter lock. Raises ValueError as `encode` does."""
        try:
            return self._encoder.encode_many(list(texts), add_special_tokens) if texts else []
        except (TypeError, UnicodeEncodeError) as error:
            raise _not_unicode(texts, error) from error

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of all ids at once. Raises ValueError naming an id outside the vocabulary."""
        size = self.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            wrong = next(token_id for token_id in ids if not 0 <= token_id < size)
            raise ValueError(str(TokenIdError(wrong, size)))
        if spaces_between_special_tokens or skip_special_tokens or not self.rules.separates:
            # The batch call releases the interpreter lock.
            return self._library.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        stream = IncrementalDetokenizer(self.table, skip_special_tokens, spaces_between_special_tokens)
        return stream.push(ids) + stream.finish()

    @cached_property
    def length_bound(self) -> LengthBound | None:
        """How few tokens a text has at least, None where its length does not tell."""
        return length_bound(self._library, self.table.tokens) if self.rules.mode == "bytes" else None

    def is_special(self, token_id: int) -> bool:
        """Whether the id is a special token (left out when special tokens are skipped)."""
        return token_id in self.special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds away from the start of a text. Raises ValueError outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(str(TokenIdError(token_id, self.vocab_size)))
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if self.rules.mode == "bytes":
            return token_to_bytes(token)
        piece = self.rules.piece(token, False)
        return piece.encode() if isinstance(piece, str) else bytes((piece,))

    def token_text(self, token_id: int) -> str:
        """`token_bytes` for display: what is not UTF-8 by itself is shown as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it; None for an id without a token."""
        return self._library.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary writes it."""
        return self._library.token_to_id(token)

    @cached_property
    def table(self) -> TokenTable:
        """The token table, built on first use."""
        return TokenTable.from_tokenizer(self)


def load_tokenizer(info: ModelInfo, backend: Backend = "huggingface") -> Tokenizer:
    """Load the tokenizer the resolver wrote. Raises ModelError when the file is missing or damaged."""
    # The library reads this at every batch call. On: threads of its own, a warning after a fork, and a child
    # forked after a batch call hangs at its first one.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if info.tokenizer_file is None:
        raise ModelError(f"model {info.model_path} has no tokenizer; pass --tokenizer-path")
    try:
        library = tokenizers.Tokenizer.from_file(info.tokenizer_file)
    except Exception as error:
        raise ModelError(
            f"cannot load the tokenizer {info.tokenizer_file}: {error}; remove the file and start again"
        ) from error
    library.no_truncation()
    library.no_padding()
    return Tokenizer(library, info, backend)


def _not_unicode(texts: Sequence[str], error: Exception) -> Exception:
    """What to raise when a library refused texts: a ValueError saying where, or its own error."""
    for text in texts:
        if isinstance(text, str) and (half := _HALF_PAIR.search(text)):
            return ValueError(
                f"the text holds half of a surrogate pair at character {half.start()}; send valid Unicode"
            )
    return error


def load_chat_template(info: ModelInfo) -> ChatTemplate | None:
    """The model's chat template, None when it has none. Raises ModelError or ChatTemplateError."""
    if info.chat_template_file is None:
        return None
    try:
        source = Path(info.chat_template_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read the chat template {info.chat_template_file}: {error}") from error
    return ChatTemplate(source, info.special_tokens)
