"""Request keys and worker lives as integers. Pure; used by every process.

A *life* is one run of a tokenizer worker: `index << 20 | generation`. It is what `http_worker_ipc` names: the
socket path is made from it and from nothing else. A *key* is one request of that life:
`life << 32 | counter`, an unsigned 64-bit number. So a row that has a key has its return address; there is no
second field that could be forgotten.
"""

from __future__ import annotations

INDEX_BITS = 12
GENERATION_BITS = 20
COUNTER_BITS = 32

MAX_WORKERS = 1 << INDEX_BITS
MAX_GENERATION = (1 << GENERATION_BITS) - 1
MAX_COUNTER = (1 << COUNTER_BITS) - 1


def make_life(index: int, generation: int) -> int:
    """The life number of a worker. Raises ValueError when either part does not fit."""
    if not 0 <= index < MAX_WORKERS or not 0 <= generation <= MAX_GENERATION:
        raise ValueError(f"worker index {index} or generation {generation} out of range")
    return index << GENERATION_BITS | generation


def split_life(life: int) -> tuple[int, int]:
    """(index, generation) of a life."""
    return life >> GENERATION_BITS, life & MAX_GENERATION


def make_key(life: int, counter: int) -> int:
    """The key of the counter-th request of a life. Raises ValueError when the counter does not fit."""
    if not 0 <= counter <= MAX_COUNTER:
        raise ValueError(f"request counter {counter} out of range")
    return life << COUNTER_BITS | counter


def life_of(key: int) -> int:
    """Which worker life a key's answers go to."""
    return key >> COUNTER_BITS


def counter_of(key: int) -> int:
    """The request counter within its life."""
    return key & MAX_COUNTER
