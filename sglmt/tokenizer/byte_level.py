"""The reversible mapping between bytes and printable characters that byte-level vocabularies are written in.

Runs in the resolver (to build a tokenizer from a GGUF) and wherever a token table is built. Owns nothing: it is the
mapping published with GPT-2. Printable Latin-1 characters stand for themselves; the other 68 byte values are given
the characters from U+0100 on, in byte order.
"""

from __future__ import annotations

from types import MappingProxyType


def _build() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in table)
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHAR = MappingProxyType(_build())
CHAR_OF_BYTE = MappingProxyType({byte: char for char, byte in BYTE_OF_CHAR.items()})


def token_to_bytes(token: str) -> bytes:
    """The bytes a byte-level token stands for; a token with a foreign character stands for its own UTF-8."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "surrogatepass")


def bytes_to_token(data: bytes) -> str:
    """The token text that `token_to_bytes` maps back to `data`."""
    return "".join(CHAR_OF_BYTE[byte] for byte in data)
