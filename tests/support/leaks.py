"""What a test may leave behind: nothing. Used by the leak fixture of conftest.

Processes are recognised by a mark in the environment they were started with, which survives a double fork, or
by being our descendants. Files are compared before and after.
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK_VARIABLE = "PYTEST_LEAK_MARK"
SHM_DIR = Path("/dev/shm")
SEGMENT_PREFIX = "multi_tokenizer_args_"
SETTLE_S = 3.0
# Descriptors that libraries open once and keep: random source, event loops' helpers, caches of /proc.
TOLERATED_FDS = ("/dev/urandom", "/dev/null", "anon_inode:[eventpoll]", "anon_inode:[eventfd]", "/proc/")


# Launchers that tests started. The dead carry no mark, and other sessions on this machine leave segments too.
_OWN_PIDS: set[int] = set()


def note_launcher(pid: int) -> None:
    """From now on what this process leaves in shared memory counts, also after its death."""
    _OWN_PIDS.add(pid)


@dataclass(frozen=True)
class Belongings:
    """What exists at one moment."""

    processes: frozenset[tuple[int, float]]
    fds: frozenset[tuple[int, str]]
    segments: frozenset[str]
    run_files: frozenset[str]


def mark_descendants() -> str:
    """Mark the environment of everything that is started from now on; parallel test runs have a mark each."""
    os.environ[MARK_VARIABLE] = uuid.uuid4().hex
    return os.environ[MARK_VARIABLE]


def take_stock() -> Belongings:
    """Look at everything now."""
    return Belongings(_processes(), _fds(), _segments(), _run_files())


def leaks_since(before: Belongings) -> list[str]:
    """What is there that was not before, in words; what is just going away gets a moment to do so."""
    end_s = time.monotonic() + SETTLE_S
    while True:
        left = differences(before, take_stock())
        if not left or time.monotonic() >= end_s:
            return left
        time.sleep(0.05)


def differences(before: Belongings, now: Belongings) -> list[str]:
    """What is there now and was not before, in words."""
    left = [f"process {_describe(pid)}" for pid, _start in sorted(now.processes - before.processes)]
    left += [f"descriptor {fd} -> {target}" for fd, target in sorted(now.fds - before.fds)]
    left += [f"shared memory {name}" for name in sorted(now.segments - before.segments)]
    left += [f"run file {name}" for name in sorted(now.run_files - before.run_files)]
    return left


def _processes() -> frozenset[tuple[int, float]]:
    own = os.getpid()
    found: set[tuple[int, float]] = set()
    mark = f"{MARK_VARIABLE}={os.environ.get(MARK_VARIABLE, '')}".encode()
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        try:
            if process.pid == own or (process.pid not in children and not _is_marked(process.pid, mark)):
                continue
            found.add((process.pid, process.create_time()))
        except psutil.Error:
            continue
    return frozenset(found)


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{pid} ({process.status()}): {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(pid)


def _fds() -> frozenset[tuple[int, str]]:
    found: set[tuple[int, str]] = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if not target.startswith(TOLERATED_FDS):
            found.add((int(name), target))
    return frozenset(found)


def _segments() -> frozenset[str]:
    """Segments of launchers that a test started: known ones, dead or alive, and whatever carries our mark."""
    mark = f"{MARK_VARIABLE}={os.environ.get(MARK_VARIABLE, '')}".encode()
    found: set[str] = set()
    for path in SHM_DIR.glob(f"{SEGMENT_PREFIX}*"):
        try:
            if path.stat().st_uid != os.getuid():
                continue
        except OSError:
            continue
        pid = path.name.removeprefix(SEGMENT_PREFIX).partition("_")[0]
        if pid.isdigit() and (int(pid) in _OWN_PIDS or int(pid) == os.getpid() or _is_marked(int(pid), mark)):
            found.add(path.name)
    return frozenset(found)


def _run_files() -> frozenset[str]:
    """Run directories in the usual places: tests name places of their own, so nothing may appear here."""
    bases = [Path(tempfile.gettempdir()) / f"sglmt-{os.getuid()}"]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        bases.append(Path(runtime) / "sglmt")
    mark = f"{MARK_VARIABLE}={os.environ.get(MARK_VARIABLE, '')}".encode()
    return frozenset(str(path) for base in bases for path in base.glob("*/instance.json") if _owned(path, mark))


def _owned(record: Path, mark: bytes) -> bool:
    """Whether the instance that wrote this record is one of ours."""
    import json

    try:
        pid = int(json.loads(record.read_bytes())["process"]["pid"])
    except (OSError, ValueError, KeyError):
        return False
    return pid in _OWN_PIDS or _is_marked(pid, mark)
