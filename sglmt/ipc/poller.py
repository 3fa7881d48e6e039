"""Which descriptors a process waits for, and what is to be done when one is ready. Used by every child.

Processes with a loop of their own call `Poller.wait`, a thin layer over one epoll object. A process with an event
loop hands its descriptors to that (`hand_over`), which saves a wait inside a wait. Both are level-triggered: what a
handler leaves unread is reported again.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from typing import NamedTuple

Handler = Callable[[], object]


class _Watched(NamedTuple):
    handler: Handler
    for_writing: bool


class Poller:
    """Descriptor → handler. One thread."""

    def __init__(self) -> None:
        self.retrying: set[object] = set()  # who has to try again soon, because no descriptor will tell
        self._epoll = select.epoll()
        self._watched: dict[int, _Watched] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._run: Callable[[Handler], object] = lambda handler: handler()

    def watch(self, fd: int, handler: Handler, *, for_writing: bool = False) -> None:
        """Call `handler` whenever `fd` can be read (or written, or its peer is gone)."""
        self._watched[fd] = _Watched(handler, for_writing)
        if self._loop is None:
            self._epoll.register(fd, select.EPOLLOUT if for_writing else select.EPOLLIN)
        elif for_writing:
            self._loop.add_writer(fd, self._run, handler)
        else:
            self._loop.add_reader(fd, self._run, handler)

    def forget(self, fd: int) -> None:
        """Watch `fd` no longer; call before it is closed."""
        watched = self._watched.pop(fd)
        if self._loop is None:
            self._epoll.unregister(fd)
        elif watched.for_writing:
            self._loop.remove_writer(fd)
        else:
            self._loop.remove_reader(fd)

    def hand_over(self, loop: asyncio.AbstractEventLoop, run: Callable[[Handler], object]) -> None:
        """From now on `loop` waits, and has `run` call the handlers. `wait` is not used any more."""
        watched = dict(self._watched)
        for fd in watched:
            self.forget(fd)
        self._loop, self._run = loop, run
        for fd, (handler, for_writing) in watched.items():
            self.watch(fd, handler, for_writing=for_writing)

    def take_back(self) -> None:
        """The loop ends: watch nothing any more."""
        for fd in list(self._watched):
            self.forget(fd)

    def wait(self, within_s: float) -> None:
        """Sleep until a descriptor is ready, `within_s` seconds at most, and call the handlers of those that are."""
        for fd, _ in self._epoll.poll(within_s):
            watched = self._watched.get(fd)
            if watched is not None:  # else a handler of this round has just closed it
                watched.handler()

    def close(self) -> None:
        """Watch nothing any more."""
        self._watched.clear()
        self._epoll.close()
