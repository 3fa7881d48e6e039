"""Which requests an engine died on. Owned by the scheduler; outlives its process in a file of the run directory.

Before the scheduler calls into the engine it writes down the requests that are in there and have not yet
yielded anything, and strikes them out when the call has returned. A scheduler that finds keys in the file at its
start knows: the engine died inside that call, on one of these. They are *suspects*, and are admitted one at a
time (a *trial*). A suspect whose trial killed the engine is *convicted*: it gets an error instead of a third life.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

_HEADER = struct.Struct("<II")  # keys, 1 when they are on trial
_KEY_BYTES = 8


class SuspectFile:
    """The file, mapped. Costs a few microseconds a call with new requests and nothing without."""

    def __init__(self, path: Path, max_keys: int) -> None:
        self._max_keys = max_keys
        size = _HEADER.size + max_keys * _KEY_BYTES
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size != size:
                os.ftruncate(fd, 0)
                os.posix_fallocate(fd, 0, size)
            self._mapping = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        count, on_trial = _HEADER.unpack_from(self._mapping)
        count = min(count, max_keys)
        found = set(struct.unpack_from(f"<{count}Q", self._mapping, _HEADER.size))
        self.convicted: set[int] = found if on_trial else set()
        self.suspects: set[int] = set() if on_trial else found
        self._strike_out()

    @contextlib.contextmanager
    def inside_engine(self, unmoved: Collection[int], on_trial: bool) -> Iterator[None]:
        """The engine is being called, with these requests that have yielded nothing yet."""
        if not unmoved:
            yield
            return
        keys = list(unmoved)[: self._max_keys]
        struct.pack_into(f"<{len(keys)}Q", self._mapping, _HEADER.size, *keys)
        _HEADER.pack_into(self._mapping, 0, len(keys), int(on_trial))
        yield
        self._strike_out()  # not when the call raised: that ends this process

    def _strike_out(self) -> None:
        _HEADER.pack_into(self._mapping, 0, 0, 0)
