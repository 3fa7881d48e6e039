"""The simulator's token source: what the next id is, and the numbers that go with it. Pure.

Everything derives from one 32-bit state a request, a checksum over the seed and every id so far, of prompt and
output. So a continuation from `prompt + prefix` reaches exactly the state the undisturbed run had, nothing
depends on what else is in the batch, and a long prompt costs next to nothing. Log-probabilities are made up but
consistent: each state orders the vocabulary, the chosen id first, and halves the probability with every rank.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence
from zlib import crc32

MASK = 2**64 - 1
# Multiplier and increment of a well-known 64-bit linear congruential generator (Knuth, MMIX).
MULTIPLIER = 6364136223846793005
INCREMENT = 1442695040888963407
NUMBER_SHIFT = 32  # ids are taken from the upper half: in a product only high bits depend on all lower ones

EMBEDDING_DIMENSIONS = 64
_LOWEST_LOGPROB = -60.0
_LN2 = math.log(2.0)
_HALF_RANGE = float(2**63)


def scramble(value: int) -> int:
    """A 64-bit number that looks unrelated to `value` (the SplitMix64 finalizer)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def initial_state(server_seed: int, request_seed: int | None) -> int:
    """The state before any id. Without a request seed the server's alone decides."""
    state = scramble(server_seed & MASK)
    return (state if request_seed is None else scramble(state ^ (request_seed & MASK))) >> 32


def seed_of(text: str) -> int:
    """A 63-bit seed made from a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def fold(state: int, ids: Iterable[int]) -> int:
    """The state after `ids`: the checksum of their 32-bit values, continued from `state`."""
    return crc32(ids.tobytes() if isinstance(ids, array) else array("I", ids).tobytes(), state)


def number(state: int) -> int:
    """A 64-bit number that any bit of the state changes beyond recognition."""
    return (state * MULTIPLIER + INCREMENT) & MASK


def chosen_logprob(state: int) -> float:
    """Log-probability of whatever id is chosen in `state`: its probability lies in [0.5, 0.99)."""
    return math.log(0.5 + 0.49 * (number(state) >> 11) / 2**53)


def logprob_of(state: int, chosen: int, token_id: int, vocab_size: int) -> float:
    """Log-probability of any id in `state`; halves with every step away from the chosen id, floored."""
    if token_id == chosen:
        return chosen_logprob(state)
    distance = (token_id - chosen) % vocab_size or vocab_size
    rest = math.log1p(-math.exp(chosen_logprob(state)))
    return max(rest - distance * _LN2, _LOWEST_LOGPROB)


def top_logprobs(state: int, chosen: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """The `count` likeliest (id, log-probability) in `state`, best first: the chosen, then its successors."""
    ids = [chosen, *((chosen + step) % vocab_size for step in range(1, min(count, vocab_size)))]
    return [(token_id, logprob_of(state, chosen, token_id, vocab_size)) for token_id in ids[:count]]


def embedding_of(ids: Sequence[int]) -> list[float]:
    """A vector of length 1 with EMBEDDING_DIMENSIONS numbers, from the ids alone (no seed)."""
    state = fold(initial_state(0, None), ids)
    numbers = [scramble(state ^ dimension) / _HALF_RANGE - 1.0 for dimension in range(EMBEDDING_DIMENSIONS)]
    norm = math.sqrt(sum(number * number for number in numbers))
    return [number / norm for number in numbers]
