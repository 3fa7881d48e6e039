"""Which special tokens cut a text into pieces whose ids do not depend on each other. Runs in the resolver.

Added tokens are found in the text before anything else is done to it. So a chat's ids are the ids of the texts
between them and the tokens' own ids, if the tokenizer treats a piece alike wherever it stands (some strip white
space around a token, or treat the first piece otherwise). That is tried out, for each token, not assumed.
"""

from __future__ import annotations

import tokenizers

MAX_SEPARATORS = 64
_PIECES = ("", "Hello, world", " leading and trailing ", "\n\nuser\n", "  two", "١٢٣ 日本 naïve 🔥", "x\t", "'ll")


def proven_separators(library: tokenizers.Tokenizer) -> dict[str, int]:
    """Text → id of the special tokens that cut a text into independent pieces; empty when none does."""
    added = library.get_added_tokens_decoder().values()
    texts = sorted({token.content for token in added if token.special and len(token.content) > 1})
    proven: dict[str, int] = {}
    for text in texts[:MAX_SEPARATORS]:
        token_id = library.token_to_id(text)
        if token_id is not None and _is_independent(library, text, token_id):
            proven[text] = token_id
    return proven


def _is_independent(library: tokenizers.Tokenizer, separator: str, token_id: int) -> bool:
    alone = {piece: _encode(library, piece) for piece in _PIECES}
    for before in _PIECES:
        for after in _PIECES:
            if _encode(library, before + separator + after) != [*alone[before], token_id, *alone[after]]:
                return False
    return True


def _encode(library: tokenizers.Tokenizer, text: str) -> list[int]:
    ids: list[int] = library.encode(text, add_special_tokens=False).ids
    return ids
