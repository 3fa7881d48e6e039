"""Encoders behind one small interface: the tokenizers library, and fastokens once it has proven itself.

Used by `loading`. fastokens is several times faster and optional; it is trusted only after it gave the same ids as
the library on a corpus that covers what tokenizers commonly disagree on. Both encode on the calling thread.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from pathlib import Path
from typing import Any, Protocol

import tokenizers

_BATCH_ABOVE_CHARS = 2048  # longer texts take the call that releases the interpreter lock

_CORPUS = (
    "",
    " ",
    "The quick brown fox jumps over the lazy dog. It's 3.14159, isn't it? They'LL've WE'RE",
    "  two  spaces   three\t\ttabs \n\n newlines \r\n windows\r\n\r\n   \n    indented    ",
    "1234567890 12,345.678 0x1F4A9 2026-11-29T21:29:34Z 1e-9 ١٢٣ 一二三 ½²",
    "def f(x: int) -> str:\n    return f'{x!r:>10}'  # comment\n\n\tif (a&&b) { c[0] += 1; }\n",
    "Übergröße naïve café coöperate Ångström ﬁ ﬀ ǅ e\u0301 a\u0308 K",
    "Съешь же ещё этих мягких французских булок. Πολλά. שלום עולם مرحبا بالعالم",
    "日本語のテキストと漢字、かな。中文句子。한국어 문장 ไทย हिन्दी भाषा ᚠᛇᚻ አማርኛ",
    "😀 👩\u200d👩\u200d👧\u200d👦 🇩🇪 👍🏽 🔥🔥🔥 \U0001f9ff\ufe0f \u200b\u00a0\u3000\u2028\ufeff",
    "\x00\x01\x7f\x80\xff\ufffd\ue000\U0010ffff ▁ Ġ Ċ <0x0A> ##ing [UNK] <unk> </s> <s>",
    '{"key": [1, 2.5, null, true], "url": "https://example.org/a?b=c&d=%20#e"} <|not|> ~~~~ ----- ====',
)


class Encoder(Protocol):
    """Text to ids."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def encode_many(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]: ...


class HuggingFaceEncoder:
    """The tokenizers library. Short texts take the plain call (cheaper, but holds the interpreter lock)."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > _BATCH_ABOVE_CHARS:
            return self.encode_many([text], add_special_tokens)[0]
        return self._library.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_many(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        encodings = self._library.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]


class FastokensEncoder:
    """The fastokens library; its encode releases the interpreter lock."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self._library.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_many(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        return [self.encode(text, add_special_tokens) for text in texts]


def load_fastokens(tokenizer_file: str | None) -> tuple[FastokensEncoder | None, str]:
    """A fastokens encoder that has yet to prove itself, or None and the reason in one line."""
    if tokenizer_file is None:
        return None, "there is no tokenizer file to load"
    try:
        import fastokens  # type: ignore[import-not-found, import-untyped, unused-ignore]

        fast_library = fastokens.Tokenizer.from_file(tokenizer_file)
        fast_library.no_truncation()
        fast_library.no_padding()
    except ImportError:
        return None, "fastokens is not installed"
    except Exception as error:
        return None, _refusal(error)
    return FastokensEncoder(fast_library), ""


def prove_fastokens(tokenizer_file: str | None, library: tokenizers.Tokenizer) -> tuple[FastokensEncoder | None, str]:
    """A fastokens encoder that agrees with the library on the corpus, or None and the reason in one line."""
    encoder, note = load_fastokens(tokenizer_file)
    if encoder is None:
        return None, note
    try:
        return _compare(encoder, HuggingFaceEncoder(library), _corpus(library))
    except Exception as error:
        return None, _refusal(error)


def _refusal(error: Exception) -> str:
    reason = " ".join(str(error).split())[:200]
    return f"fastokens refuses this tokenizer: {reason or type(error).__name__}"


def fastokens_note(tokenizer_file: str) -> str:
    """Whether fastokens gives the same ids for this tokenizer ("") or why it is not used.

    Proven once for a version of fastokens; the answer is kept beside the tokenizer file.
    """
    try:
        version = importlib.metadata.version("fastokens")
    except importlib.metadata.PackageNotFoundError:
        return "fastokens is not installed"
    known = Path(tokenizer_file).parent / f"fastokens-{version}.txt"
    try:
        return known.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        _, note = prove_fastokens(tokenizer_file, tokenizers.Tokenizer.from_file(tokenizer_file))
    with contextlib.suppress(OSError):  # a cache that cannot be written costs the proof again next time
        fresh = known.with_suffix(f".{os.getpid()}")
        fresh.write_text(note, encoding="utf-8")
        fresh.replace(known)
    return note


def _corpus(library: tokenizers.Tokenizer) -> list[str]:
    added = [token.content for token in library.get_added_tokens_decoder().values()][:64]
    around = [f"user {text}hello {text} {text}\n" for text in added]
    return [*_CORPUS, *around, "".join(added), "\n".join(_CORPUS)]


def _compare(
    fast: FastokensEncoder, reference: HuggingFaceEncoder, texts: list[str]
) -> tuple[FastokensEncoder | None, str]:
    for text in texts:
        for add_special_tokens in (False, True):
            if fast.encode(text, add_special_tokens) != reference.encode(text, add_special_tokens):
                return None, f"fastokens gives other ids than the tokenizers library for {text[:40]!r}"
    return fast, ""
