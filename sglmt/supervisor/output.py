"""Reads one pipe of a child, line by line, without ever waiting. Runs in the supervisor's loop.

Used for standard output, standard error and the ready pipe. What a child has written before it died is read by
`drain`, bounded; the rest of a line without newline counts as a line then.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from sglmt.supervisor.logs import LineAssembler

_READ_BYTES = 65536
_MOST_DRAINED_BYTES = 4 * 1024 * 1024

_LEVELS = {
    "DEBUG": "debug", "INFO": "info", "WARNING": "warning", "WARN": "warning", "ERROR": "error",
    "CRITICAL": "error",
}  # fmt: skip


class LinePipe:
    """Calls `on_line` with each whole line (bytes, no newline). Does not own the descriptor."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, on_line: Callable[[bytes], None]) -> None:
        self._loop = loop
        self._fd = fd
        self._on_line = on_line
        self._lines = LineAssembler()
        self._open = True
        loop.add_reader(fd, self._read)

    def drain(self) -> None:
        """Read what is there now, flush the last line, and stop reading."""
        left = _MOST_DRAINED_BYTES
        while self._open and left > 0:
            count = self._read()
            if not count:
                break
            left -= count
        for line in self._lines.flush():
            self._on_line(line)
        self._end()

    def _read(self) -> int:
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self._end()
            return 0
        for line in self._lines.feed(data):
            self._on_line(line)
        return len(data)

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)


def split_level(line: bytes) -> tuple[str, str]:
    """(level, text) of a child's line: `WARNING text` has one, anything else is info."""
    text = line.decode("utf-8", errors="replace")
    first, _, rest = text.partition(" ")
    level = _LEVELS.get(first.rstrip(":"))
    return (level, rest) if level is not None and rest else ("info", text)
