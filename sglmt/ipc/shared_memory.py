"""The argument segment: (server_args, port_args, model_info, scheduler_info) in POSIX shared memory, as data.

`sglmt launch` creates one segment `multi_tokenizer_args_<pid>_<random>` exclusively, mode 0600, its size
reserved up front (a full /dev/shm is an ENOSPC here, not a SIGBUS in a child), and writes it again under a
higher revision when the scheduler knows more. Children map it read-only, check owner, instance and checksum,
and refuse anything else by name. Where /dev/shm cannot be used the same file lies in the run directory, and
children are told its path. `os.open` + `mmap` is used because `multiprocessing.SharedMemory` unlinks the
segment when an attached child exits (before Python 3.13).

Header, little endian: 8s magic | u32 protocol | u32 revision | u64 instance id | u32 uid | u32 launcher pid |
f64 launcher start time | u64 pid namespace | u32 payload length | u32 payload crc32.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import stat
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from sglmt.errors import ResourceError, SegmentError
from sglmt.ipc.process_identity import ProcessIdentity
from sglmt.server_args import PortArgs, SchedulerInfo, ServerArgs

SHM_DIR = Path("/dev/shm")  # noqa: S108 - the one place POSIX shared memory lives on Linux
NAME_PREFIX = "multi_tokenizer_args_"
SEGMENT_BYTES = 256 * 1024
PROTOCOL_VERSION = 1

_RETRY_EVERY_S = 0.002
_MAGIC = b"SGLMTARG"
_HEADER = struct.Struct("<8sIIQIIdQII")
_NAME_PATTERN = re.compile(rf"{NAME_PREFIX}(\d+)_[0-9a-f]{{16}}")


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """The content. `model_info` is the resolver's `ModelInfo` as plain data; secrets are never in here."""

    server_args: ServerArgs
    port_args: PortArgs
    model_info: dict[str, Any]
    scheduler_info: SchedulerInfo | None = None


@dataclass(frozen=True)
class SegmentHeader:
    """Who wrote a segment and which revision it holds."""

    revision: int
    instance_id: int
    uid: int
    owner: ProcessIdentity
    payload_bytes: int
    checksum: int


class Segment:
    """The supervisor's writable side."""

    def __init__(self, path: Path, instance_id: int, owner: ProcessIdentity) -> None:
        self.path = path
        self._instance_id = instance_id
        self._owner = owner
        self.revision = 0

    @classmethod
    def create(cls, instance_id: int, owner: ProcessIdentity, directory: Path = SHM_DIR) -> Segment:
        """A fresh segment under a name nobody has. Raises ResourceError with needed and free sizes."""
        for _ in range(16):
            path = directory / f"{NAME_PREFIX}{owner.pid}_{secrets.token_hex(8)}"
            segment = cls(path, instance_id, owner)
            try:
                _reserve(path, segment._header(b""))
            except FileExistsError:
                continue
            except OSError as error:
                raise ResourceError(
                    f"shared memory {path}: {error.strerror}; {SEGMENT_BYTES} bytes are needed, "
                    f"{_free_bytes(directory)} are free"
                ) from error
            return segment
        raise ResourceError(f"shared memory {directory}: no free segment name after 16 tries")

    @property
    def name(self) -> str:
        """The file name, the same wherever it lies."""
        return self.path.name

    def write(self, arguments: Arguments) -> int:
        """Write the next revision and return its number; re-creates a segment that was removed or cut.

        Raises ResourceError when it does not fit or cannot be written.
        """
        payload = msgspec.msgpack.encode(arguments)
        if _HEADER.size + len(payload) > SEGMENT_BYTES:
            raise ResourceError(f"arguments have {len(payload)} bytes, the segment {SEGMENT_BYTES}")
        if not self._is_intact():
            self.path.unlink(missing_ok=True)
            try:
                _reserve(self.path, self._header(b""))
            except OSError as error:
                raise ResourceError(f"shared memory {self.path}: {error.strerror}") from error
        header = self._header(payload)
        fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(fd, payload, _HEADER.size)
            os.pwrite(fd, header, 0)
        finally:
            os.close(fd)
        self.revision += 1
        return self.revision

    def _header(self, payload: bytes) -> bytes:
        """The header of the next revision, which holds `payload`."""
        return _HEADER.pack(
            _MAGIC, PROTOCOL_VERSION, self.revision + 1, self._instance_id, os.getuid(), self._owner.pid,
            self._owner.start_time_s, self._owner.pid_namespace, len(payload), zlib.crc32(payload),
        )  # fmt: skip

    def _is_intact(self) -> bool:
        try:
            status = os.stat(self.path, follow_symlinks=False)
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and status.st_size == SEGMENT_BYTES

    def unlink(self) -> None:
        """Remove the segment."""
        self.path.unlink(missing_ok=True)


def read_header(path: Path) -> SegmentHeader:
    """Read who wrote a segment. Raises SegmentError when it is no segment of ours."""
    return _read(path)[0]


def read_arguments(
    name: str, instance_id: int, directory: Path = SHM_DIR, deadline_s: float = 0.0
) -> tuple[Arguments, int]:
    """(content, revision) of the segment `name`.

    Raises SegmentError, naming the segment, when it is missing, malformed, of another owner or instance. A
    reader may meet a write in progress, however long the writer is kept from going on: it tries again until
    `deadline_s` (monotonic). The writer itself has nothing to wait for.
    """
    path = directory / name
    if not _NAME_PATTERN.fullmatch(name):
        raise SegmentError(f"segment {name!r}: not a name of ours")
    while True:
        try:
            return _read_once(path, instance_id)
        except SegmentError:
            if time.monotonic() >= deadline_s:
                raise
        time.sleep(_RETRY_EVERY_S)


def _read_once(path: Path, instance_id: int) -> tuple[Arguments, int]:
    header, payload = _read(path)
    if header.instance_id != instance_id:
        raise SegmentError(f"segment {path}: of instance {header.instance_id:016x}, this is {instance_id:016x}")
    if zlib.crc32(payload) != header.checksum:
        raise SegmentError(f"segment {path}: checksum does not match")
    try:
        return msgspec.msgpack.decode(payload, type=Arguments), header.revision
    except msgspec.MsgspecError as error:
        raise SegmentError(f"segment {path}: {error}") from error


def sweep(directory: Path = SHM_DIR) -> list[str]:
    """Remove segments whose launcher is proven gone; return their names.

    Proven: same user, same pid namespace, and no process of that pid and start time. Others are left alone.
    """
    removed: list[str] = []
    try:
        names = os.listdir(directory)
    except OSError:
        return removed
    for name in names:
        if not _NAME_PATTERN.fullmatch(name):
            continue
        path = directory / name
        try:
            header = _read(path)[0]
        except SegmentError:
            continue
        if header.uid == os.getuid() and header.owner.is_proven_gone():
            path.unlink(missing_ok=True)
            removed.append(name)
    return removed


def _read(path: Path) -> tuple[SegmentHeader, bytes]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SegmentError(f"segment {path}: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise SegmentError(f"segment {path}: not a regular file of this user")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise SegmentError(f"segment {path}: open to others (mode {stat.S_IMODE(status.st_mode):o})")
        if status.st_size != SEGMENT_BYTES:
            raise SegmentError(f"segment {path}: {status.st_size} bytes, a segment has {SEGMENT_BYTES}")
        with mmap.mmap(fd, SEGMENT_BYTES, prot=mmap.PROT_READ) as mapping:
            fields = _HEADER.unpack_from(mapping)
            magic, protocol, revision, instance_id, uid, pid, start_time_s, namespace, length, checksum = fields
            if magic != _MAGIC or protocol != PROTOCOL_VERSION:
                raise SegmentError(f"segment {path}: not a segment of this version")
            if length > SEGMENT_BYTES - _HEADER.size:
                raise SegmentError(f"segment {path}: length {length} is larger than the segment")
            payload = mapping[_HEADER.size : _HEADER.size + length]
    finally:
        os.close(fd)
    owner = ProcessIdentity(pid=pid, start_time_s=start_time_s, pid_namespace=namespace)
    return SegmentHeader(revision, instance_id, uid, owner, length, checksum), payload


def _reserve(path: Path, header: bytes) -> None:
    """Make a segment of full size that says whose it is from the moment it has a name: a launcher may be killed at any
    time, and what nobody owns is never swept. Raises FileExistsError, or OSError; nothing is left then.
    """
    directory_fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = os.open(path.parent, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError as error:
        os.close(directory_fd)
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
        _reserve_by_name(path, header)
        return
    try:
        _fill(fd, header)
        # linkat(2) follows the link to the descriptor only when Python is given a directory descriptor
        os.link(
            f"/proc/self/fd/{fd}", path.name, src_dir_fd=directory_fd, dst_dir_fd=directory_fd, follow_symlinks=True
        )
    finally:
        os.close(fd)
        os.close(directory_fd)


def _reserve_by_name(path: Path, header: bytes) -> None:
    """The same on a file system that has no files without a name."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _fill(fd, header)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _fill(fd: int, header: bytes) -> None:
    os.pwrite(fd, header, 0)
    os.posix_fallocate(fd, 0, SEGMENT_BYTES)


def _free_bytes(directory: Path) -> int:
    try:
        status = os.statvfs(directory)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
