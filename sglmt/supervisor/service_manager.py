"""Tells a service manager (systemd) how the instance is: the sd_notify(3) protocol. Runs in the supervisor.

One datagram to the socket in `NOTIFY_SOCKET` for each change: READY once requests can be served, STOPPING when the
instance drains to end, RELOADING around a reload, STATUS in words, WATCHDOG at half the interval that was asked for.
Without the variable nothing is done; a socket that cannot be reached costs one warning; nothing ever waits.
Children do not get the variable (sglmt.supervisor.environment).
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Mapping

from sglmt.supervisor.services import Log

MAX_UNSENT = 64
_BUSY = (BlockingIOError, InterruptedError)


class ServiceManager:
    """One instance's line to the service manager. The supervisor's loop only."""

    def __init__(self, environ: Mapping[str, str], log: Log) -> None:
        self._log = log
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        self._every_s = watchdog_interval_s(environ, os.getpid())
        self._next_beat_s = 0.0
        self._unsent: deque[str] = deque(maxlen=MAX_UNSENT)
        self._status = ""
        self._warned = False
        self._socket: socket.socket | None = None
        self._ready = False
        self._stopping = False

    @property
    def wanted(self) -> bool:
        """Whether anybody is to be told."""
        return self._address is not None

    def ready(self) -> None:
        """Requests can be served, for the first time or again after a reload."""
        self._ready = True
        self._tell("READY=1")

    def reloading(self) -> None:
        """The configuration is being applied; `reloaded` ends it."""
        if self._ready:
            self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def reloaded(self) -> None:
        """The reload has ended, well or not: what serves, serves."""
        if self._ready:
            self._tell("READY=1")

    def stopping(self) -> None:
        """The instance drains and then ends."""
        self._ready = False
        if not self._stopping:
            self._stopping = True
            self._tell("STOPPING=1")

    def status(self, text: str) -> None:
        """One line for `systemctl status`; sent when it is new."""
        line = " ".join(text.split())
        if line != self._status:
            self._status = line
            self._tell(f"STATUS={line}")

    @property
    def beats_every_s(self) -> float | None:
        """How often it wants a sign of life; None: not at all."""
        return self._every_s

    def tick(self, now_s: float) -> None:
        """From the supervisor's loop, often: the watchdog's sign of life, and what could not be sent before."""
        if self._every_s is not None and now_s >= self._next_beat_s:
            self._next_beat_s = now_s + self._every_s
            self._tell("WATCHDOG=1")
        elif self._unsent:
            self._send_all()

    def close(self) -> None:
        """Give the descriptor back."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, message: str) -> None:
        if self._address is not None:
            self._unsent.append(message)
            self._send_all()

    def _send_all(self) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)
        while self._unsent:
            try:
                self._socket.sendto(self._unsent[0].encode(), self._address or "")
            except _BUSY:
                return  # its queue is full: the next tick tries again
            except OSError as error:
                self._unsent.clear()
                self._warn(error.strerror or type(error).__name__)
                return
            self._unsent.popleft()

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._log("warning", "supervisor", f"the service manager's NOTIFY_SOCKET cannot be reached: {why}")


def watchdog_interval_s(environ: Mapping[str, str], pid: int) -> float | None:
    """How often the service manager wants a sign of life from `pid`: half its limit; None: not at all."""
    if environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    try:
        limit_us = int(environ.get("WATCHDOG_USEC", ""))
    except ValueError:
        return None
    return limit_us / 2e6 if limit_us > 0 else None


def _address(text: str) -> str | None:
    """The address of a path or an abstract socket (`@name`); None for none."""
    if not text:
        return None
    return "\0" + text[1:] if text.startswith("@") else text
