"""The run directory: what an instance keeps in the file system, and how others find it. Runs in the supervisor
and in every command that looks for instances.

`<base>/<name>/` holds the lock (held for life), `instance.json`, the state page, `control.sock` and the ipc
sockets. Base directories, best first: `--runtime-dir`; `$XDG_RUNTIME_DIR/sglmt`; `$TMPDIR/sglmt-<uid>`;
`/tmp/sglmt-<uid>`. A base that is not named by the operator is passed over when it cannot be used or would make
a socket path too long; one that is named is used or refused.

A lock that is free means that the run which left the directory is dead: what it left is ended and wiped. Only
when its process is alive all the same (somebody removed the lock file) is the directory left alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sglmt.errors import ConfigError, ResourceError, SglmtError
from sglmt.ipc.addresses import CONTROL_SOCKET, LONGEST_NAME_BYTES, MAX_SOCKET_PATH_BYTES
from sglmt.ipc.process_identity import ProcessIdentity, pid_namespace

STATE_PAGE = "state"
_LOCK = "lock"
_RECORD = "instance.json"
_CLAIM_WAIT_S = 2.0
_RETRY_EVERY_S = 0.02


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `instance.json`. `url` is None until the port is bound."""

    name: str
    instance_id: str
    process: ProcessIdentity
    url: str | None
    started_at_unix_s: float


@dataclass(frozen=True)
class FoundInstance:
    """An instance directory. `alive` is False for what a killed run left."""

    record: InstanceRecord
    path: Path
    alive: bool


class RunDir:
    """A claimed run directory, this process's own until `remove` or its death."""

    def __init__(self, path: Path, lock_fd: int, leftover: InstanceRecord | None) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self.leftover = leftover

    @classmethod
    def claim(cls, name: str, runtime_dir: str | None, environ: Mapping[str, str] = os.environ) -> RunDir:
        """Create or take over `<base>/<name>`.

        Its old content is still there (`leftover` says whose) until `wipe`. Raises ConfigError when a socket
        path would be too long, ResourceError when another instance has it or no base can be written.
        """
        path = _prepare_base(name, runtime_dir, environ) / name
        deadline_s = time.monotonic() + _CLAIM_WAIT_S
        while True:
            _make_private(path)
            lock_fd = _try_lock(path / _LOCK)
            record = read_record(path)
            if lock_fd is None:
                if time.monotonic() > deadline_s or (record is not None and _is_alive(record.process)):
                    raise _in_use(name, path, record)
                time.sleep(_RETRY_EVERY_S)
                continue
            if record is not None and record.process.pid != os.getpid() and _is_alive(record.process):
                os.close(lock_fd)
                raise _in_use(name, path, record)
            return cls(path, lock_fd, record)

    @classmethod
    def take(cls, path: Path) -> RunDir | None:
        """The directory of a dead run, to be removed; None when somebody holds it after all."""
        lock_fd = _try_lock(path / _LOCK)
        return cls(path, lock_fd, read_record(path)) if lock_fd is not None else None

    def wipe(self) -> None:
        """Remove everything but the lock."""
        for entry in os.scandir(self.path):
            if entry.name == _LOCK:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)

    def write_record(self, record: InstanceRecord) -> None:
        """Write `instance.json` in one step. Raises ResourceError when the disk refuses."""
        path = self.path / _RECORD
        fresh = path.with_suffix(".new")
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.encode(record))
            os.replace(fresh, path)
        except OSError as error:
            raise ResourceError(f"run directory {self.path}: {error.strerror}") from error

    def remove(self) -> None:
        """Delete the directory (never the base) and give the name back."""
        with contextlib.suppress(OSError):
            self.wipe()
        with contextlib.suppress(OSError):
            os.unlink(self.path / _LOCK)
        with contextlib.suppress(OSError):
            os.rmdir(self.path)
        os.close(self._lock_fd)


def base_directories(runtime_dir: str | None, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Where run directories may be, best first, each once."""
    if runtime_dir is not None:
        return [Path(os.path.abspath(runtime_dir))]
    bases: list[Path] = []
    xdg = environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(xdg):
        bases.append(Path(xdg) / "sglmt")
    for temp in (environ.get("TMPDIR"), "/tmp"):  # noqa: S108 - owner is checked
        if temp:
            bases.append(Path(os.path.abspath(temp)) / f"sglmt-{os.getuid()}")
    return list(dict.fromkeys(bases))


def find_instances(runtime_dir: str | None = None, environ: Mapping[str, str] = os.environ) -> list[FoundInstance]:
    """Every instance of this user, live and stale, by name; a name in two bases appears twice."""
    found = [one for base in base_directories(runtime_dir, environ) for one in list_instances(base)]
    return sorted(found, key=lambda one: one.record.name)


def list_instances(base: Path) -> list[FoundInstance]:
    """The instances whose directories are in `base`."""
    return list(_instances_in(base))


def read_record(path: Path) -> InstanceRecord | None:
    """The record of a run directory; None when there is none, or none that is ours and readable."""
    try:
        fd = os.open(path / _RECORD, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return None
        try:
            return msgspec.json.decode(file.read(65536), type=InstanceRecord)
        except (msgspec.MsgspecError, OSError):
            return None


def _instances_in(base: Path) -> Iterator[FoundInstance]:
    try:
        entries = sorted(os.scandir(base), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            path = Path(entry.path)
            record = read_record(path)
            if record is not None:
                yield FoundInstance(record, path, _is_held(record.process, path / _LOCK))


def _is_held(process: ProcessIdentity, lock: Path) -> bool:
    """Whether the run that wrote the record goes on: by its process where that can be seen, else by the lock."""
    if process.pid_namespace == pid_namespace() and process.start_time_s > 0:
        return not process.is_proven_gone()
    lock_fd = _try_lock(lock, create=False)
    if lock_fd is None:
        return lock.exists()
    os.close(lock_fd)
    return False


def _is_alive(process: ProcessIdentity) -> bool:
    """Certainly alive; a process of another pid namespace cannot be seen and so is not."""
    return process.pid_namespace == pid_namespace() and not process.is_proven_gone()


def _in_use(name: str, path: Path, record: InstanceRecord | None) -> SglmtError:
    who = f"pid {record.process.pid}" if record is not None else "another launch"
    return ResourceError(
        f"--name {name!r} is in use by {who} ({path}); choose another --name, or `sglmt stop {name}` first"
    )


def _prepare_base(name: str, runtime_dir: str | None, environ: Mapping[str, str]) -> Path:
    """The base to use, created. Raises ConfigError or ResourceError, naming each candidate."""
    problems: list[SglmtError] = []
    for base in base_directories(runtime_dir, environ):
        try:
            _check_length(base / name)
            _make_base(base, named=runtime_dir is not None)
            return base
        except SglmtError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    tried = "; ".join(str(problem) for problem in problems)
    raise ResourceError(f"no directory for run files; give --runtime-dir DIR. Tried: {tried}")


def _check_length(run_dir: Path) -> None:
    longest = len(os.fsencode(run_dir)) + 1 + max(LONGEST_NAME_BYTES, len(CONTROL_SOCKET))
    if longest > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"run directory {str(run_dir)!r}: socket paths in it would have {longest} bytes, "
            f"the system allows {MAX_SOCKET_PATH_BYTES}; give a shorter --runtime-dir or --name"
        )


def _make_base(base: Path, *, named: bool) -> None:
    try:
        base.mkdir(mode=0o700, parents=named, exist_ok=True)
        status = os.lstat(base)
        if named:
            status = os.stat(base)  # an operator may name a link
    except OSError as error:
        raise ResourceError(f"run directory {base}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise ResourceError(f"run directory {base}: not a directory")
    writable_by_others = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    if named and writable_by_others:
        raise ResourceError(f"run directory {base}: others may write to it; chmod go-w it, or choose another")
    if not named and (status.st_uid != os.getuid() or status.st_mode & 0o077):
        raise ResourceError(f"run directory {base}: not private to this user (owner or mode)")
    if not os.access(base, os.W_OK | os.X_OK):
        raise ResourceError(f"run directory {base}: not writable")


def _make_private(path: Path) -> None:
    """Create the instance's directory, 0700 and ours. Raises ResourceError when it is somebody else's."""
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise ResourceError(f"run directory {path}: exists and is not a directory of this user; remove it")
        path.chmod(0o700)
    except FileNotFoundError:
        return  # removed by the run that just ended; the caller tries again
    except OSError as error:
        raise ResourceError(f"run directory {path}: {error.strerror}") from error


def _try_lock(path: Path, *, create: bool = True) -> int | None:
    """Descriptor of the locked file; None when somebody has it or the file went away meanwhile."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    try:
        fd = os.open(path, flags, 0o600)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResourceError(f"lock file {path}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False)):
            return fd
    except OSError:
        pass
    os.close(fd)
    return None
