"""A log file that stays bounded and can be reopened. Written by the log writer's thread, in the supervisor.

`PATH` is appended to until it would grow beyond its limit; then it becomes `PATH.1`, that one `PATH.2`, and so on
up to the number that is kept. Where files cannot be renamed the file is cut instead: the limit holds. Without a
limit somebody else rotates it: moves the file and has it reopened (USR1). A full disk costs lines, nothing else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from sglmt.errors import ResourceError
from sglmt.supervisor.logs import Descriptor


class LogFile(Descriptor):
    """An open log file. `follow` are descriptors (standard output and error) that always mean the same file."""

    def __init__(self, path: Path, max_bytes: int | None = None, keep: int = 0, follow: Sequence[int] = ()) -> None:
        """Open `path` for appending, mode 0600. Raises ResourceError, naming it."""
        self._path = Path(os.path.abspath(path))
        self._max_bytes = max_bytes
        self._keep = keep
        self._follow = tuple(follow)
        try:
            super().__init__(_open(self._path))
        except OSError as error:
            raise ResourceError(f"log file {self._path}: cannot be opened: {error.strerror}") from error
        self.follow(*follow)

    def follow(self, *descriptors: int) -> None:
        """From now on these descriptors mean the file too."""
        self._follow = descriptors
        for descriptor in descriptors:
            os.dup2(self.fd, descriptor)

    def write(self, data: bytes) -> int:
        """Write whole lines; the number of lines that were lost."""
        lost = 0
        while data:
            part = len(data) if self._max_bytes is None else self._fitting(data, self._max_bytes)
            if part == 0:
                self._rotate()
                part = self._fitting(data, self._max_bytes or 0) or data.find(b"\n") + 1 or len(data)
            lost += super().write(data[:part])
            data = data[part:]
        return lost

    def reopen(self) -> str | None:
        """Open the path anew: the file under it may be another one by now. What went wrong, else None."""
        try:
            fresh = _open(self._path)
        except OSError as error:
            return f"the log file {self._path} cannot be reopened: {error.strerror}; the old one is still written"
        os.dup2(fresh, self.fd, inheritable=False)
        os.close(fresh)
        self.follow(*self._follow)
        return None

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.fd)

    def _fitting(self, data: bytes, max_bytes: int) -> int:
        """How many bytes of `data`, in whole lines, the file still takes."""
        room = max_bytes - os.fstat(self.fd).st_size
        if len(data) <= room:
            return len(data)
        return data.rfind(b"\n", 0, max(0, room)) + 1

    def _rotate(self) -> None:
        try:
            if self._keep == 0:
                raise OSError
            for number in range(self._keep - 1, 0, -1):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(self._numbered(number), self._numbered(number + 1))
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._path, self._numbered(1))
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, 0)
        if self.reopen() is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, 0)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


def _open(path: Path) -> int:
    """A blocking descriptor that appends. A pipe that nobody reads is an error, not a wait."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK
    fd = os.open(path, flags, 0o600)
    os.set_blocking(fd, True)
    return fd
