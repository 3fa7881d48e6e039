"""What a tokenizer's decoder does to one token, compiled from the decoder section of its `tokenizer.json`.

Runs wherever a token table is built or a single token is displayed; owns nothing. A decoder is a chain of stages
over the list of tokens. Nearly all of them treat tokens one by one, with an exception for the first one; the chain
is folded here into one function of `(token, is it the first?)`. What works across tokens (bytes that form a
character together, spaces stripped from the start of the whole text) is declared as data and carried out by the
incremental detokenizer. A stage that cannot be expressed so is refused by name rather than approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from sglmt.errors import ModelError

Stage = Callable[[str, bool], str]  # (token text, whether it is the first token) -> text

# Replacements of the WordPiece decoder's clean-up, in the order in which they apply to each token.
_WORDPIECE_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """A compiled decoder.

    `mode` is "bytes" when all tokens are pieces of one UTF-8 stream (byte-level vocabularies), "text" otherwise.
    `byte_fallback`: tokens `<0xNN>` stand for single bytes. `first_matters`: a token reads differently at the start
    of the text. `separates`: the decoder puts a space between tokens. Up to `strip_start` leading `strip_char` are
    removed from the whole text.
    """

    mode: Literal["bytes", "text"]
    before: tuple[Stage, ...] = ()
    after: tuple[Stage, ...] = ()
    byte_fallback: bool = False
    first_matters: bool = False
    separates: bool = False
    strip_char: str = " "
    strip_start: int = 0

    def piece(self, token: str, first: bool) -> str | int:
        """The text of a token of a "text" decoder, or the value (0..255) of the byte it stands for."""
        for stage in self.before:
            token = stage(token, first)
        if self.byte_fallback and (byte := byte_value(token)) is not None:
            return byte
        return self.finish_piece(token, first)

    def finish_piece(self, text: str, first: bool) -> str:
        """Apply the stages that follow byte fallback, to a token's text or to a character made of byte tokens."""
        for stage in self.after:
            text = stage(text, first)
        return text


def byte_value(token: str) -> int | None:
    """The byte that `<0xNN>` stands for, None for any other token."""
    if len(token) != 6 or not token.startswith("<0x") or token[5] != ">":
        return None
    digits = token[3:5]
    if digits.isascii() and digits.isalnum():
        try:
            return int(digits, 16)
        except ValueError:
            return None
    return None


def compile_rules(decoder: bytes | None) -> DecoderRules:
    """Compile the JSON of a decoder (None: the tokenizer has none, tokens are joined by spaces).

    Raises ModelError naming a stage this build cannot carry out exactly.
    """
    if decoder is None:
        return DecoderRules("text", before=(_space_before,), first_matters=True, separates=True)
    builder = _Builder()
    for stage in _flatten(msgspec.json.decode(decoder)):
        builder.add(stage)
    return builder.build()


def _flatten(stage: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if stage["type"] == "Sequence":
        for inner in stage["decoders"]:
            yield from _flatten(inner)
    else:
        yield stage


class _Builder:
    """Collects the stages of one decoder in order; knows what may follow what."""

    def __init__(self) -> None:
        self._before: list[Stage] = []
        self._after: list[Stage] = []
        self._mode: Literal["bytes", "text"] = "text"
        self._byte_fallback = self._fused = self._first_matters = self._separates = False
        self._strip: tuple[str, int] = (" ", 0)

    def add(self, stage: dict[str, Any]) -> None:
        kind = stage["type"]
        if kind == "Fuse":
            self._fused = True
        elif kind == "ByteLevel" and not (self._byte_fallback or self._fused or self._before):
            self._mode, self._fused = "bytes", True
        elif kind == "ByteFallback" and not (self._byte_fallback or self._fused):
            self._byte_fallback = True
        elif kind == "Strip" and self._fused and not (stage["stop"] or self._strip[1]):
            self._strip = (stage["content"], stage["start"])
        elif self._fused and not (self._mode == "text" and _replaces_one_char(stage) and not self._strip[1]):
            raise _refusal(stage)
        else:
            self._add_per_token(stage)

    def _add_per_token(self, stage: dict[str, Any]) -> None:
        kind = stage["type"]
        if kind == "Replace" and "String" in stage["pattern"]:
            if self._byte_fallback and not _replaces_one_char(stage):
                raise _refusal(stage)
            self._append(_replace(stage["pattern"]["String"], stage["content"]))
        elif kind == "Metaspace":
            drops_first = stage.get("prepend_scheme", "always") != "never"
            self._first_matters |= drops_first
            self._append(_metaspace(stage["replacement"], drops_first))
        elif kind == "WordPiece" and not self._byte_fallback:
            self._first_matters = self._separates = True
            self._append(_wordpiece(stage["prefix"], stage["cleanup"]))
        elif kind == "Strip" and not self._byte_fallback and not stage["stop"]:
            self._append(_strip(stage["content"], stage["start"]))
        else:
            raise _refusal(stage)

    def _append(self, stage: Stage) -> None:
        (self._after if self._byte_fallback else self._before).append(stage)

    def build(self) -> DecoderRules:
        return DecoderRules(
            self._mode,
            tuple(self._before),
            tuple(self._after),
            self._byte_fallback,
            self._first_matters,
            self._separates,
            *self._strip,
        )


def _replaces_one_char(stage: dict[str, Any]) -> bool:
    """Replacing a single character means the same on the pieces of a text as on the whole."""
    return stage["type"] == "Replace" and len(stage["pattern"].get("String", "")) == 1


def _refusal(stage: dict[str, Any]) -> ModelError:
    shown = msgspec.json.encode(stage).decode()[:120]
    return ModelError(
        f"the tokenizer's decoder has a stage that cannot be decoded token by token: {shown}; "
        "pass --tokenizer-path with a tokenizer whose decoder is byte-level, Metaspace, byte-fallback or "
        "WordPiece"
    )


def _space_before(token: str, first: bool) -> str:
    return token if first else " " + token


def _replace(pattern: str, content: str) -> Stage:
    return lambda token, first: token.replace(pattern, content)


def _metaspace(replacement: str, drops_first: bool) -> Stage:
    return lambda token, first: token.replace(replacement, "" if first and drops_first else " ")


def _wordpiece(prefix: str, cleanup: bool) -> Stage:
    def stage(token: str, first: bool) -> str:
        if not first:
            token = token.removeprefix(prefix) if token.startswith(prefix) else " " + token
        if cleanup:
            for old, new in _WORDPIECE_CLEANUP:
                token = token.replace(old, new)
        return token

    return stage


def _strip(content: str, start: int) -> Stage:
    def stage(token: str, first: bool) -> str:
        kept = 0
        while kept < start and token[kept : kept + 1] == content:
            kept += 1
        return token[kept:]

    return stage
