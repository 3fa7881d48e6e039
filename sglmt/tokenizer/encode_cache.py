"""Exact caching of tokenization: whole prompts, and the pieces between special tokens. One per worker.

Turn 20 of a chat repeats 19 turns; cut at the special tokens that were proven to separate (`segments`), only the
new turn is encoded. Entries are (text, add_special_tokens) → packed u32 ids; both caches forget what was used
longest ago, and are bounded in bytes. May be used by the event loop and by one encoding thread at a time each.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping

MIN_SEGMENTED_CHARS = 512  # shorter prompts are encoded whole: cutting them costs more than it saves
MIN_CACHED_SEGMENT_CHARS = 16
_ENTRY_OVERHEAD_BYTES = 200


class BoundedCache:
    """Text → ids, least recently used out first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[tuple[str, bool], array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[str, bool]) -> array[int] | None:
        """The ids, None when unknown."""
        with self._lock:
            ids = self._entries.get(key)
            if ids is not None:
                self._entries.move_to_end(key)
            return ids

    def put(self, key: tuple[str, bool], ids: array[int]) -> None:
        """Remember; an entry larger than a quarter of the cache is not."""
        size = _size(key, ids)
        if size > self._max_bytes // 4:
            return
        with self._lock:
            known = self._entries.pop(key, None)
            if known is not None:
                self._bytes -= _size(key, known)
            self._entries[key] = ids
            self._bytes += size
            while self._bytes > self._max_bytes:
                oldest, forgotten = self._entries.popitem(last=False)
                self._bytes -= _size(oldest, forgotten)

    @property
    def used_bytes(self) -> int:
        """Estimated memory of the entries."""
        return self._bytes


class Plan:
    """One text on its way: what is known of it, and how many characters are not."""

    __slots__ = ("_cache", "_key", "_pieces", "ids", "missing_chars")

    def __init__(self, cache: EncodeCache, key: tuple[str, bool]) -> None:
        self._cache = cache
        self._key = key
        self._pieces: list[str] | None = None
        self.ids = cache.whole.get(key)
        self.missing_chars = 0
        if self.ids is None:
            self._pieces = cache.cut(*key)
            self.missing_chars = cache.missing_chars(key, self._pieces)

    def encode(self) -> array[int]:
        """The ids; encodes what is missing. May run in a thread."""
        if self.ids is None:
            self.ids = self._cache.encode_pieces(self._key, self._pieces)
        return self.ids


class EncodeCache:
    """The cache in front of one tokenizer. `hits` and `misses` count prompts, `*_tokens` their tokens."""

    def __init__(
        self,
        encode: Callable[[str, bool], list[int]],
        separators: Mapping[str, int],
        max_bytes: int,
    ) -> None:
        """`separators` must have been proven for `encode` (see `segments`)."""
        self._encode = encode
        self._separators = dict(separators)
        self._pattern = (
            re.compile("(" + "|".join(re.escape(text) for text in sorted(separators, key=len, reverse=True)) + ")")
            if separators
            else None
        )
        self.whole = BoundedCache(max_bytes // 2)
        self._segments = BoundedCache(max_bytes // 2)
        self.hits = 0
        self.misses = 0
        self.reused_tokens = 0
        self.encoded_tokens = 0

    def plan(self, text: str, add_special_tokens: bool) -> Plan:
        """Look a text up. Cheap; `Plan.encode` does the work."""
        plan = Plan(self, (text, add_special_tokens))
        if plan.ids is not None:
            self.hits += 1
            self.reused_tokens += len(plan.ids)
        else:
            self.misses += 1
        return plan

    def cut(self, text: str, add_special_tokens: bool) -> list[str] | None:
        """The pieces of a text, separators at odd places; None when it is encoded whole."""
        if self._pattern is None or add_special_tokens or len(text) < MIN_SEGMENTED_CHARS:
            return None
        pieces = self._pattern.split(text)
        return pieces if len(pieces) > 1 else None

    def missing_chars(self, key: tuple[str, bool], pieces: list[str] | None) -> int:
        """Characters that have to be encoded."""
        if pieces is None:
            return len(key[0])
        return sum(len(piece) for piece in pieces[::2] if piece and self._segments.get((piece, False)) is None)

    def encode_pieces(self, key: tuple[str, bool], pieces: list[str] | None) -> array[int]:
        """Encode a text and remember it."""
        if pieces is None:
            ids = array("I", self._encode(*key))
            self.encoded_tokens += len(ids)
        else:
            ids = array("I")
            for place, piece in enumerate(pieces):
                if place % 2:
                    ids.append(self._separators[piece])
                elif piece:
                    ids.extend(self._segment(piece))
        self.whole.put(key, ids)
        return ids

    def _segment(self, piece: str) -> array[int]:
        key = (piece, False)
        ids = self._segments.get(key)
        if ids is not None:
            self.reused_tokens += len(ids)
            return ids
        ids = array("I", self._encode(piece, False))
        self.encoded_tokens += len(ids)
        if len(piece) >= MIN_CACHED_SEGMENT_CHARS:
            self._segments.put(key, ids)
        return ids


def _size(key: tuple[str, bool], ids: array[int]) -> int:
    chars = len(key[0])
    return _ENTRY_OVERHEAD_BYTES + (chars if key[0].isascii() else 4 * chars) + 4 * len(ids)
