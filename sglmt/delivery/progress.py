"""What a receiver does with a row, given what it already has. Pure; the worker's and detokenizer's judgement.

A row says which attempt it belongs to, how many tokens (and characters) of the request came before it, and
brings some more. Whatever was lost, repeated or replayed, the receiver delivers every token once, in order:
it drops what it has, and asks for a replay when something is missing in between.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Verdict(enum.Enum):
    """What to do with a row."""

    DELIVER = "deliver"  # what is left after skipping `skip_tokens` and `skip_chars`
    DUPLICATE = "duplicate"  # nothing new in it
    GAP = "gap"  # something before it is missing: ask for a replay
    STALE = "stale"  # of an attempt that was replaced


class Judgement(NamedTuple):
    """A verdict, and how much of the row is already here."""

    verdict: Verdict
    skip_tokens: int = 0
    skip_chars: int = 0


def judge_row(
    *,
    attempt: int,
    tokens: int,
    chars: int,
    row_attempt: int,
    row_offset: int,
    row_tokens: int,
    row_text_offset: int,
    row_chars: int,
    row_finishes: bool,
) -> Judgement:
    """Judge one row against what was received so far (`attempt`, `tokens`, `chars`).

    A finish row is news even when all its tokens are here. A row of a higher attempt cannot reach a receiver
    that raises attempts itself, and is treated as stale.
    """
    if row_attempt != attempt:
        return Judgement(Verdict.STALE)
    if row_offset > tokens or row_text_offset > chars:
        return Judgement(Verdict.GAP)
    skip_tokens = tokens - row_offset
    skip_chars = chars - row_text_offset
    if skip_tokens > row_tokens or (skip_tokens == row_tokens and skip_chars >= row_chars):
        # Nothing new, unless it ends the request exactly where the receiver stands.
        ends_here = row_finishes and skip_tokens == row_tokens and skip_chars == row_chars
        if not ends_here and (row_tokens or row_chars or row_finishes or skip_tokens or skip_chars):
            return Judgement(Verdict.DUPLICATE)
    return Judgement(Verdict.DELIVER, min(skip_tokens, row_tokens), min(skip_chars, row_chars))
