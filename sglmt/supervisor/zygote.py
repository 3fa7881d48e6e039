"""The supervisor's end of the zygote: fast starts by forking a process that has everything loaded.

Runs in the supervisor. The zygote is a convenience: when it is not there, slow or dead, children are spawned the
plain way, and another zygote is started for the next ones. The supervisor is a subreaper, so that the children the
zygote forks become its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from sglmt.ipc.bootstrap import Bootstrap
from sglmt.ipc.zygote_protocol import (
    MAX_PACKET_BYTES,
    Forked,
    ForkRequest,
    Prepare,
    Prepared,
    ZygoteAnswer,
    ZygoteRequest,
)
from sglmt.messages.frame import Role
from sglmt.supervisor.environment import child_environment
from sglmt.supervisor.reaper import has_ended
from sglmt.supervisor.services import Log
from sglmt.supervisor.spawn import SpawnedChild, child_pipes, pid_fd

FORK_WITHIN_S = 1.0
RESTART_EVERY_S = 30.0
WAITED_FOR_S = 4.0
_PR_SET_CHILD_SUBREAPER = 36


class ZygoteUnavailableError(Exception):
    """No child came of it: spawn it the plain way."""


class Zygote:
    """One zygote process at a time."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._connection: socket.socket | None = None
        self._decoder = msgspec.msgpack.Decoder(ZygoteAnswer)
        self._prepare: Prepare | None = None
        self._is_prepared = False
        self.pid: int | None = None
        self._next_start_s = 0.0
        self._started_s = 0.0

    def start(self) -> None:
        """Start the process; failure only costs speed. The main thread's: PDEATHSIG follows the thread."""
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                [
                    sys.executable, "-P", "-m", "sglmt.workers.zygote",
                    "--socket-fd", str(theirs.fileno()), "--supervisor-pid", str(os.getpid()),
                ],
                child_environment(Role.TOKENIZER_WORKER, os.environ),
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), theirs.fileno()),
                ],
                setpgroup=0,
                setsigmask=(),
                setsigdef=(signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE),
            )  # fmt: skip
        except OSError as error:
            ours.close()
            self._log("warning", "supervisor", f"no zygote: {error.strerror}; children are spawned one by one")
            return
        finally:
            theirs.close()
        self._connection = ours
        self._is_prepared = False
        self._started_s = time.monotonic()

    def is_worth_waiting_for(self, now_s: float) -> bool:
        """Whether it has been started a moment ago and still loads: soon it forks in an instant what would cost a
        processor seconds to spawn, and until then that would slow it down. `now_s` is monotonic."""
        return self._connection is not None and now_s - self._started_s < WAITED_FOR_S and not self._usable()

    async def prepare(self, model_info: dict[str, Any], tokenizer_backend: str, deadline_s: float) -> None:
        """Have it load the model's tokenizer; returns when it has, or at monotonic `deadline_s` without it."""
        self._prepare = Prepare(model_info=model_info, tokenizer_backend=tokenizer_backend)
        if self._connection is None:
            return
        try:
            self._send(self._prepare)
            while not self._is_prepared and time.monotonic() < deadline_s:
                self._read_prepared(0.0)
                await asyncio.sleep(0.005)
        except (OSError, ZygoteUnavailableError):
            self._lost("it ended while it loaded")

    def fork(self, bootstrap: Bootstrap, environment: Mapping[str, str]) -> SpawnedChild:
        """A child forked by the zygote. Raises ZygoteUnavailableError; OSError for pipes."""
        connection = self._connection
        if connection is None or not self._usable():
            raise ZygoteUnavailableError
        with contextlib.ExitStack() as childs_ends, contextlib.ExitStack() as our_ends:
            pipes = child_pipes(our_ends, childs_ends)
            descriptors = [pipes.child_stdout, pipes.child_stderr, pipes.child_ready, bootstrap.death_fd]
            if bootstrap.listen_fd is not None:
                descriptors.append(bootstrap.listen_fd)
            try:
                self._send(ForkRequest(bootstrap=bootstrap, environment=dict(environment)), descriptors)
                answer = self._receive(FORK_WITHIN_S)
            except OSError as error:
                self._lost(error.strerror or type(error).__name__)
                raise ZygoteUnavailableError from error
            if not isinstance(answer, Forked):
                self._lost("it does not answer")
                raise ZygoteUnavailableError
            our_ends.pop_all()
            return SpawnedChild(answer.pid, pid_fd(answer.pid), pipes.ready, pipes.stdout, pipes.stderr)

    def _usable(self) -> bool:
        """Whether it has loaded; a zygote that still loads is not waited for."""
        if not self._is_prepared:
            with contextlib.suppress(OSError, ZygoteUnavailableError):
                self._read_prepared(0.0)
        return self._is_prepared

    def _read_prepared(self, within_s: float) -> None:
        answer = self._receive(within_s)
        if isinstance(answer, Prepared):
            self._is_prepared = True
            if answer.error is not None:
                self._log("warning", "supervisor", f"zygote: {answer.error}; children load for themselves")

    def _send(self, request: ZygoteRequest, descriptors: list[int] | None = None) -> None:
        assert self._connection is not None
        self._connection.settimeout(FORK_WITHIN_S)
        socket.send_fds(self._connection, [msgspec.msgpack.encode(request)], descriptors or [])

    def _receive(self, within_s: float) -> ZygoteAnswer | None:
        """The next answer, None when there is none in time. Raises ZygoteUnavailableError at its end."""
        assert self._connection is not None
        self._connection.settimeout(within_s)
        try:
            packet = self._connection.recv(MAX_PACKET_BYTES)
        except (TimeoutError, BlockingIOError):
            return None
        if not packet:
            raise ZygoteUnavailableError
        return self._decoder.decode(packet)

    def _lost(self, why: str) -> None:
        """End this one and start another for the next children; those it forked are not concerned."""
        self._log("warning", "supervisor", f"zygote: {why}; starting another, children are spawned meanwhile")
        self.close()
        self._restart()

    def _restart(self) -> None:
        self.start()
        if self._connection is not None and self._prepare is not None:
            with contextlib.suppress(OSError):
                self._send(self._prepare)

    def look_after(self, now_s: float) -> None:
        """Once a second: reap it when it has ended, and start another; not more often than now and then."""
        if self.pid is not None and has_ended(self.pid):
            if now_s >= self._next_start_s:
                self._next_start_s = now_s + RESTART_EVERY_S
                self._lost("it ended")
            else:
                self.close()
        elif self.pid is None and self._prepare is not None and now_s >= self._next_start_s:
            self._next_start_s = now_s + RESTART_EVERY_S
            self._restart()

    def close(self) -> None:
        """End it and reap it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        pid, self.pid = self.pid, None
        if pid is not None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
