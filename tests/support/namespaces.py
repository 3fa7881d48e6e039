"""Commands in mount and pid namespaces of their own, for tests of what a container does. Needs root."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

PRIVATE_MOUNTS = ("unshare", "--mount")
OWN_PIDS = ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")


def need_namespaces() -> None:
    """Skip the test where they cannot be made."""
    done = subprocess.run([*OWN_PIDS, "true"], capture_output=True, check=False, timeout=20)
    if done.returncode != 0:
        pytest.skip("needs the right to make namespaces")


def shm_of(size: str, *, options: str = "", filled: bool = False) -> str:
    """Shell words that put another file system in the place of /dev/shm."""
    mount = f"mount -t tmpfs -o size={size}{',' + options if options else ''} tmpfs /dev/shm"
    return f"{mount} && {{ dd if=/dev/zero of=/dev/shm/full bs=4k 2>/dev/null; true; }}" if filled else mount


def no_shm(scratch: Path) -> str:
    """Shell words after which there is no /dev/shm."""
    kept = shlex.quote(str(scratch))
    nodes = "null zero full random urandom tty"
    return (
        f"mount --rbind /dev {kept} && mount -t tmpfs tmpfs /dev && "
        f"for n in {nodes}; do touch /dev/$n && mount --bind {kept}/$n /dev/$n; done && ln -s /proc/self/fd /dev/fd"
    )


def interpreter_for_all(scratch: Path) -> str:
    """Shell words after which every user can run this interpreter, also where it lies in root's home."""
    prefix, kept = shlex.quote(sys.base_prefix), shlex.quote(str(scratch))
    if not sys.base_prefix.startswith("/root/"):
        return "true"
    return (
        f"mount --bind {prefix} {kept} && mount -t tmpfs -o mode=755 tmpfs /root && "
        f"mkdir -p {prefix} && mount --bind {kept} {prefix}"
    )


def within(setup: str, command: Sequence[str | Path], namespaces: Sequence[str] = PRIVATE_MOUNTS) -> list[str]:
    """The command line that runs `command` in new namespaces, after the shell words of `setup`."""
    script = f"{setup or 'true'} && exec {shlex.join(map(str, command))}"
    return [*namespaces, "sh", "-c", script]


@contextlib.contextmanager
def as_pid_one(command: Sequence[str | Path], setup: str = "", **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """`command` as pid 1 of a pid namespace; the handle is the one of `unshare`, which passes its exit code on."""
    process = subprocess.Popen(within(setup, command, OWN_PIDS), stdin=subprocess.DEVNULL, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(20)


def inside(unshare: subprocess.Popen[bytes]) -> psutil.Process:
    """Pid 1 of the namespace, as seen from here."""
    (init,) = psutil.Process(unshare.pid).children()
    return init


def titled(init: psutil.Process, title: str) -> psutil.Process | None:
    """The process below `init` with this title, as seen from here; None when there is none now."""
    for process in init.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.cmdline()[:1] == [title]:
                return process
    return None
