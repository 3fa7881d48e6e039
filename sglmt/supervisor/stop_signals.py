"""INT and TERM of the supervisor: only noted when they arrive, handled in its loop.

The first means stop, the second means now. Signals close together are one request: a terminal and a wrapper may
both pass a Ctrl-C on, as INT and as TERM.
"""

from __future__ import annotations

import asyncio
import functools
import signal
from collections.abc import Callable

SAME_REQUEST_S = 0.3
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Installed from `install` to `remove`; `on_request(name, first)` is called for each request to stop."""

    def __init__(self, on_request: Callable[[str, bool], None]) -> None:
        self._on_request = on_request
        self._installed: list[signal.Signals] = []
        self._last_s: float | None = None

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Main thread only. SIGCHLD is reset: a parent that ignored it would make exits unreadable."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for sig in _SIGNALS:
            loop.add_signal_handler(sig, functools.partial(self._arrived, loop, sig))
            self._installed.append(sig)

    def remove(self, loop: asyncio.AbstractEventLoop) -> None:
        """Back to the defaults."""
        for sig in self._installed:
            loop.remove_signal_handler(sig)
        self._installed.clear()

    def _arrived(self, loop: asyncio.AbstractEventLoop, sig: signal.Signals) -> None:
        now_s, last_s = loop.time(), self._last_s
        if last_s is not None and now_s - last_s < SAME_REQUEST_S:
            return
        self._last_s = now_s
        self._on_request(sig.name, last_s is None)
