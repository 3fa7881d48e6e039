"""Starts one child process. Runs in the supervisor's main thread only: a child's PDEATHSIG follows the thread
that spawned it.

The child gets its own process group (a Ctrl-C in the terminal is the supervisor's matter), default signal
dispositions, /dev/null as standard input, pipes as standard output and error, and by number: the bootstrap pipe,
the ready pipe, the death pipe, and the listening socket where it is a worker. Everything else is close-on-exec.
`posix_spawn` is used: no Python runs between fork and exec.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from sglmt.ipc.bootstrap import MAX_BOOTSTRAP_BYTES, Bootstrap

_DEFAULT_PIPE_BYTES = 65536
_RESET_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD, signal.SIGPIPE,
    signal.SIGXFSZ, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU, signal.SIGTSTP,
)  # fmt: skip


def child_command() -> tuple[str, ...]:
    """The program every role starts with; `-P`: modules never come from the working directory."""
    return (sys.executable, "-P", "-m", "sglmt.workers.child")


@dataclass(frozen=True)
class SpawnedChild:
    """What the supervisor holds of a running child. Descriptors are non-blocking and the holder's to close.

    `pid_fd` is readable when the child has ended; None where the kernel has no pidfds.
    """

    pid: int
    pid_fd: int | None
    ready_fd: int
    stdout_fd: int
    stderr_fd: int

    def close(self) -> None:
        """Close all descriptors."""
        for fd in (self.pid_fd, self.ready_fd, self.stdout_fd, self.stderr_fd):
            if fd is not None:
                os.close(fd)


def spawn(command: Sequence[str], label: str, bootstrap: Bootstrap, environment: Mapping[str, str]) -> SpawnedChild:
    """Start `command --bootstrap-fd N label`.

    `bootstrap.ready_fd` is replaced by the write end of a pipe made here; `death_fd` and `listen_fd` are
    inherited. Raises OSError when the process cannot be made; nothing is left open then.
    """
    with contextlib.ExitStack() as childs_ends, contextlib.ExitStack() as our_ends:
        pipes = child_pipes(our_ends, childs_ends)
        told = msgspec.structs.replace(bootstrap, ready_fd=pipes.child_ready)
        bootstrap_fd = _bootstrap_pipe(told, childs_ends)
        inherited = [bootstrap_fd, pipes.child_ready, bootstrap.death_fd]
        if bootstrap.listen_fd is not None:
            inherited.append(bootstrap.listen_fd)
        pid = os.posix_spawn(
            command[0],
            [*command, "--bootstrap-fd", str(bootstrap_fd), label],
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, pipes.child_stdout, 1),
                (os.POSIX_SPAWN_DUP2, pipes.child_stderr, 2),
                *((os.POSIX_SPAWN_DUP2, fd, fd) for fd in inherited),  # same number: inherited
            ],
            setpgroup=0,
            setsigmask=(),
            setsigdef=_RESET_SIGNALS,
        )
        our_ends.pop_all()
        return SpawnedChild(pid, pid_fd(pid), pipes.ready, pipes.stdout, pipes.stderr)


@dataclass(frozen=True)
class ChildPipes:
    """Output and ready pipe of a child to be: our ends, and the child's."""

    stdout: int
    stderr: int
    ready: int
    child_stdout: int
    child_stderr: int
    child_ready: int


def child_pipes(our_ends: contextlib.ExitStack, childs_ends: contextlib.ExitStack) -> ChildPipes:
    """Three pipes; each stack closes its ends. Raises OSError."""
    stdout, child_stdout = _pipe(our_ends, childs_ends)
    stderr, child_stderr = _pipe(our_ends, childs_ends)
    ready, child_ready = _pipe(our_ends, childs_ends)
    return ChildPipes(stdout, stderr, ready, child_stdout, child_stderr, child_ready)


def _pipe(our_ends: contextlib.ExitStack, childs_ends: contextlib.ExitStack) -> tuple[int, int]:
    """(our non-blocking read end, the child's write end)."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    our_ends.callback(os.close, read_fd)
    childs_ends.callback(os.close, write_fd)
    os.set_blocking(read_fd, False)
    return read_fd, write_fd


def _bootstrap_pipe(bootstrap: Bootstrap, childs_ends: contextlib.ExitStack) -> int:
    """Read end of a pipe that already holds the whole message: nobody waits for the child to read it."""
    message = msgspec.msgpack.encode(bootstrap)
    if len(message) > MAX_BOOTSTRAP_BYTES:
        raise OSError(f"bootstrap message has {len(message)} bytes, the limit is {MAX_BOOTSTRAP_BYTES}")
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    childs_ends.callback(os.close, read_fd)
    try:
        os.set_blocking(write_fd, False)
        if len(message) > _DEFAULT_PIPE_BYTES:
            fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, MAX_BOOTSTRAP_BYTES)
        if os.write(write_fd, message) != len(message):
            raise OSError(f"bootstrap message of {len(message)} bytes does not fit into a pipe")
    finally:
        os.close(write_fd)
    return read_fd


def pid_fd(pid: int) -> int | None:
    """A descriptor that is readable when the process has ended; None where the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
