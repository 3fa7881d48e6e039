"""Varied natural English for prompts, made from the documentation that comes with Python. Pure, seeded.

Used by both benchmarks. A tokenizer that remembers words or prompts must not look faster than it is, so every
prompt is another draw of sentences from some thousand; the same seed gives the same prompts.
"""

from __future__ import annotations

import random
import re
from functools import cache

CHARS_PER_TOKEN = 4.7  # of English prose, for tokenizers of large vocabularies; callers that can, calibrate
_MIN_SENTENCE_WORDS = 5


@cache
def sentences() -> tuple[str, ...]:
    """Some thousand sentences, each a line of prose."""
    from pydoc_data.topics import topics  # type: ignore[import-not-found, unused-ignore]

    found: dict[str, None] = {}
    for topic in topics.values():
        for paragraph in re.split(r"\n\s*\n", topic):
            if paragraph.startswith(" ") or not paragraph.rstrip().endswith("."):
                continue  # grammar, examples, headings
            prose = " ".join(paragraph.replace('"', "").split())
            for sentence in re.split(r"(?<=[.;:]) ", prose):
                if len(sentence.split()) >= _MIN_SENTENCE_WORDS:
                    found[sentence] = None
    return tuple(found)


def prose(chars: int, rng: random.Random) -> str:
    """Sentences drawn by `rng`, cut at a word after about `chars` characters."""
    pool = sentences()
    parts: list[str] = []
    size = 0
    while size < chars:
        part = rng.choice(pool)
        parts.append(part)
        size += len(part) + 1
    text = " ".join(parts)
    end = text.rfind(" ", 0, chars + 1)
    return text[: end if end > 0 else chars]


def prompts(count: int, tokens: int, seed: int, chars_per_token: float = CHARS_PER_TOKEN) -> list[str]:
    """`count` different prompts of about `tokens` tokens each."""
    rng = random.Random(f"{seed}/{tokens}")
    return [prose(round(tokens * chars_per_token), rng) for _ in range(count)]
