"""The listening socket as a file: `--uds PATH`, in place of a TCP port. Claimed once, held for life.

Whether a socket file is in use cannot be seen from the file, nor always by connecting (nobody listens before the
first worker can answer), so the claim is a lock on `PATH.lock`, which the kernel gives back whatever happens. With
the lock in hand a file at PATH is what a dead run left, unless somebody else's server answers there; only a socket
is ever replaced. Both files are removed at the end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from pathlib import Path

from sglmt.errors import PortError
from sglmt.supervisor.listener import BACKLOG, HolderLookup, Listener

_RELEASE_WAIT_S = 3.0
_RETRY_EVERY_S = 0.05
_CONNECT_WITHIN_S = 1.0


class UnixListener(Listener):
    """One bound unix socket. `start_listening` may be called once somebody accepts."""

    def __init__(self, bound: socket.socket, path: Path, lock_fd: int) -> None:
        super().__init__(bound)
        self._path = path
        self._lock_fd: int | None = lock_fd
        self._file = os.lstat(path)

    @classmethod
    def bind_path(cls, path: Path, mode: int, who_holds: str | None = None) -> UnixListener:
        """Claim `path` and bind it, the file's permissions being `mode` from its first moment.

        `who_holds` names a running instance that has it. Raises PortError, naming path and reason, when something
        else is there or it is in use; one that is just being released is waited for, a few seconds.
        """
        deadline_s = time.monotonic() + _RELEASE_WAIT_S
        while True:
            lock_fd = _try_lock(path)
            try:
                if lock_fd is not None and not _is_served(path):
                    return cls(_bind(path, mode), path, lock_fd)
            except BaseException:
                _unlock(path, lock_fd)
                raise
            _unlock(path, lock_fd)
            if who_holds is not None or time.monotonic() > deadline_s:
                by = f" by {who_holds}" if who_holds else " by another server"
                raise PortError(f"--uds {str(path)!r}: in use{by}; stop that, or choose another path")
            time.sleep(_RETRY_EVERY_S)

    def start_listening(self) -> None:
        """Accept connections from now on. Raises PortError when the kernel refuses."""
        if self.listening:
            return
        try:
            self._socket.listen(BACKLOG)
        except OSError as error:
            raise PortError(f"{self.url}: cannot listen: {error.strerror}") from error
        self.listening = True

    @property
    def port(self) -> int:
        """None: 0."""
        return 0

    @property
    def url(self) -> str:
        """`unix:PATH`."""
        return f"unix:{self._path}"

    def close(self) -> None:
        """Remove the file, if it is still ours, and give the path back."""
        super().close()
        if self._lock_fd is None:
            return
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(self._path), self._file):
                self._path.unlink()
        _unlock(self._path, self._lock_fd)
        self._lock_fd = None


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _try_lock(path: Path) -> int | None:
    """The held lock; None when somebody has it or gave it back just now. Raises PortError."""
    lock = _lock_path(path)
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise PortError(f"--uds {str(path)!r}: its lock file {lock} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.lstat(lock)):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None


def _unlock(path: Path, lock_fd: int | None) -> None:
    if lock_fd is not None:
        with contextlib.suppress(OSError):
            _lock_path(path).unlink()
        os.close(lock_fd)


def _is_served(path: Path) -> bool:
    """Whether a server answers at `path`. A socket that nobody serves is removed; anything else is refused."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise PortError(_refusal(path, error)) from error
    if not stat.S_ISSOCK(status.st_mode):
        raise PortError(f"--uds {str(path)!r}: something that is no socket is there; remove it, or choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_WITHIN_S)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            pass
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise PortError(_refusal(path, error)) from error
            return True  # its queue is full, or it speaks another kind of socket
        else:
            return True
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise PortError(_refusal(path, error)) from error
    return False


def _bind(path: Path, mode: int) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # close-on-exec, as all descriptors here
    umask = os.umask(0o777 & ~mode)
    try:
        bound.setblocking(False)
        bound.bind(os.fspath(path))
    except OSError as error:
        bound.close()
        raise PortError(_refusal(path, error)) from error
    finally:
        os.umask(umask)
    return bound


def _refusal(path: Path, error: OSError) -> str:
    return f"--uds {str(path)!r}: {error.strerror or error}"


def bind_listener(
    host: str, port: int, uds: str | None, uds_mode: int, scheme: str, who_holds: HolderLookup, holder: str | None
) -> Listener:
    """The listening socket that was asked for: a unix socket when `uds` says so, else a TCP port.

    `who_holds(port)` and `holder` name a running instance that has the port, or the path. Raises PortError.
    """
    if uds is None:
        return Listener.bind(host, port, who_holds, scheme)
    return UnixListener.bind_path(Path(os.path.abspath(uds)), uds_mode, holder)
