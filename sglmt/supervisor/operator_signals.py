"""HUP, TTIN, TTOU and USR1 of the supervisor: reload, one worker more, one worker less, reopen the log files.

Only noted when they arrive, handled in the supervisor's loop; each that the kernel delivers counts. (Two signals of
one number that arrive before the process runs are one to the kernel: to set a number use `sglmt scale N`.) HUP also
comes when the terminal goes away; then it means what it always meant: end. It stays ignored where it was (nohup).
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
from collections.abc import Callable


class OperatorSignals:
    """Installed from `install` to `remove`.

    `on_hangup(terminal_is_gone)` is called for each HUP, `on_step(+1 or -1)` for each TTIN and TTOU, `on_reopen` for
    USR1.
    """

    def __init__(
        self, on_hangup: Callable[[bool], None], on_step: Callable[[int], None], on_reopen: Callable[[], None]
    ) -> None:
        self._on_hangup = on_hangup
        self._on_reopen = on_reopen
        self._on_step = on_step
        self._had_terminal = False
        self._installed: list[signal.Signals] = []

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Main thread only."""
        self._had_terminal = has_terminal()
        handlers: list[tuple[signal.Signals, Callable[[], None]]] = [
            (signal.SIGTTIN, functools.partial(self._on_step, 1)),
            (signal.SIGTTOU, functools.partial(self._on_step, -1)),
            (signal.SIGUSR1, self._on_reopen),
        ]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handlers.append((signal.SIGHUP, self._hangup))
        for sig, handler in handlers:
            loop.add_signal_handler(sig, handler)
            self._installed.append(sig)

    def remove(self, loop: asyncio.AbstractEventLoop) -> None:
        """Back to the defaults."""
        for sig in self._installed:
            loop.remove_signal_handler(sig)
        self._installed.clear()

    def _hangup(self) -> None:
        self._on_hangup(self._had_terminal and not has_terminal())


def has_terminal() -> bool:
    """Whether this process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
