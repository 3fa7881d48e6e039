"""The private cache of resolved models: one directory per fingerprint, complete or absent.

Runs in the resolver only; several may run at once on one cache. An entry is prepared under a temporary name and
renamed into place, so nobody sees half of one; the checksums beside the files tell a damaged entry, which is set
aside and built again. Directories are 0700 and files 0600.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sglmt.errors import ModelError

_CHECKSUMS = "checksums.json"


def read_entry(entry: Path) -> dict[str, bytes] | None:
    """The files of a complete, undamaged entry by name; None when there is no such entry."""
    try:
        checksums = msgspec.json.decode((entry / _CHECKSUMS).read_bytes(), type=dict[str, str])
        files = {name: (entry / name).read_bytes() for name in checksums if name == os.path.basename(name)}
    except (OSError, msgspec.DecodeError):
        return None
    if any(_checksum(files.get(name, b"")) != checksum for name, checksum in checksums.items()):
        return None
    return files


def write_entry(entry: Path, files: Mapping[str, bytes]) -> None:
    """Put an entry in place, replacing a damaged one. Raises ModelError when the cache cannot be written."""
    root = entry.parent
    try:
        _make_private(root)
        prepared = Path(tempfile.mkdtemp(prefix=f".{entry.name[:16]}-", dir=root))
        try:
            _write_files(prepared, files)
            _put_in_place(prepared, entry)
        finally:
            shutil.rmtree(prepared, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"cannot write the tokenizer cache {root}: {error.strerror or error}; "
            "free space or choose another --cache-dir"
        ) from error


def _make_private(root: Path) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    root.mkdir(mode=0o700, exist_ok=True)
    status = os.lstat(root)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ModelError(
            f"the tokenizer cache {root} must be a directory of this user that nobody else may write; "
            "change its owner and mode (0700) or choose another --cache-dir"
        )


def _write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    checksums = {name: _checksum(data) for name, data in files.items()}
    for name, data in {**files, _CHECKSUMS: msgspec.json.encode(checksums)}.items():
        descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def _put_in_place(prepared: Path, entry: Path) -> None:
    for _ in range(10):
        try:
            os.rename(prepared, entry)  # fails when a directory with files is there
            return
        except OSError:
            if read_entry(entry) is not None:
                return  # another resolver was faster: same fingerprint, same content
        aside = Path(tempfile.mkdtemp(prefix=".damaged-", dir=entry.parent))
        try:
            os.rename(entry, aside / "entry")
        except FileNotFoundError:
            pass
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    raise OSError(f"{entry.name} cannot be replaced")


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
