"""The listening socket: bound once by the supervisor, held for life, inherited by every tokenizer worker.

It is bound before anything slow happens, so that a taken port is known at once, and listens only when somebody
can answer: until then the kernel refuses connections instead of queueing them for nobody.

SO_REUSEADDR is on while binding (connections of an earlier run may linger in TIME_WAIT), off while bound (two
sockets that both have it could share a port that nobody listens on yet), and on again from `listen` on: `listen`
checks for conflicts once more, and accepted connections inherit the option, without which their TIME_WAIT would
keep the port from the next launch.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from typing import Any

import psutil

from sglmt.errors import PortError

BACKLOG = 4096
_RELEASE_WAIT_S = 3.0
_RETRY_EVERY_S = 0.05

HolderLookup = Callable[[int], str | None]


class Listener:
    """One bound TCP socket. `start_listening` may be called once somebody accepts."""

    def __init__(self, bound: socket.socket, scheme: str = "http") -> None:
        self._socket = bound
        self._scheme = scheme
        self.listening = False

    @classmethod
    def bind(cls, host: str, port: int, who_holds: HolderLookup = lambda port: None, scheme: str = "http") -> Listener:
        """Bind `host`:`port` (0: any free port); `scheme` is for the URL.

        `who_holds(port)` names a running instance that has it. Raises PortError, naming address and holder. A
        port that is just being released (a killed run whose processes are ending) is waited for, a few seconds.
        """
        family, address = _resolve(host, port)
        deadline_s = time.monotonic() + _RELEASE_WAIT_S
        while True:
            try:
                return cls(_bind(family, address), scheme)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise PortError(_refusal(host, port, error)) from error
                holder = who_holds(port) or _listening_process(port)
                if holder is not None or time.monotonic() > deadline_s:
                    by = f" by {holder}" if holder else ""
                    raise PortError(
                        f"{host}:{port}: the port is taken{by}; stop that, or choose another --port (0: any free one)"
                    ) from error
                time.sleep(_RETRY_EVERY_S)

    def start_listening(self) -> None:
        """Accept connections from now on. Raises PortError when another process listens here after all."""
        if self.listening:
            return
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.listen(BACKLOG)
        except OSError as error:
            raise PortError(f"{self.url}: cannot listen: {error.strerror}") from error
        self.listening = True

    @property
    def fd(self) -> int:
        """For the workers to inherit."""
        return self._socket.fileno()

    @property
    def port(self) -> int:
        """The port, also when any free one was asked for."""
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """How a client on this machine reaches it; the wildcard address is shown as loopback."""
        host = str(self._socket.getsockname()[0]).partition("%")[0]
        shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
        return f"{self._scheme}://[{shown}]:{self.port}" if ":" in shown else f"{self._scheme}://{shown}:{self.port}"

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise PortError(f"--host {host!r}: {error.strerror or error}; give an address of this machine") from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)  # a name with both: IPv4
    return found[0][0], found[0][4]


def _bind(family: socket.AddressFamily, address: tuple[Any, ...]) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)  # close-on-exec, as all descriptors here
    try:
        bound.setblocking(False)
        if family == socket.AF_INET6 and address[0] == "::":
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError:
        bound.close()
        raise
    return bound


def _refusal(host: str, port: int, error: OSError) -> str:
    where = f"{host}:{port}"
    if error.errno == errno.EACCES:
        return f"{where}: no permission to bind; ports below 1024 need a privilege, choose another --port"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{where}: not an address of this machine; choose another --host"
    return f"{where}: cannot bind: {error.strerror}"


def _listening_process(port: int) -> str | None:
    """Who listens on the port, `pid 12 (nginx)`, as far as this user may know.

    None when nobody does, or only a process of ours that has lost its supervisor and is ending.
    """
    try:
        listening = [
            connection.pid
            for connection in psutil.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        ]
    except (psutil.Error, OSError):
        return "another process"
    pids = [pid for pid in listening if pid is not None]
    if not pids:
        return "a process of another user" if listening else None
    living = [pid for pid in pids if not _is_orphan(pid)]
    return f"pid {living[0]} ({_name(living[0])})" if living else None


def _is_orphan(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        title = (process.cmdline() or [""])[0]
        parent = process.parent()
        supervised = parent is not None and parent.name().startswith("sglmt")
    except psutil.Error:
        return True  # it has just gone
    return title.startswith("sglmt::") and title != "sglmt::supervisor" and not supervised


def _name(pid: int) -> str:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "ending"
