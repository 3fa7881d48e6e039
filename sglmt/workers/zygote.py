"""The zygote: one small single-threaded process that has imported and loaded what children need, and forks them.

Runs as `sglmt::zygote`; started by the supervisor, which falls back to plain spawning when it is gone. Every child
is forked twice: the one in between ends at once, so that the kernel hands the child to the supervisor (a
subreaper), which can then wait for it as for any child of its own. The zygote never encodes and never starts a
thread: a process with threads must not fork.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec
import setproctitle

import sglmt.workers.detokenizer
import sglmt.workers.router
import sglmt.workers.scheduler
import sglmt.workers.tokenizer_worker  # noqa: F401 - imported for the children
from sglmt.errors import ExitCode, SglmtError
from sglmt.ipc.bootstrap import Bootstrap
from sglmt.ipc.state_page import SlotWord, StatePage
from sglmt.ipc.zygote_protocol import (
    MAX_DESCRIPTORS,
    MAX_PACKET_BYTES,
    Forked,
    ForkRequest,
    Prepare,
    Prepared,
    ZygoteAnswer,
    ZygoteRequest,
)
from sglmt.tokenizer.model_info import ModelInfo
from sglmt.workers.child import run_child
from sglmt.workers.preloaded import Preloaded, preload

_PR_SET_PDEATHSIG = 1
_ADOPTED_WITHIN_S = 5.0
_EXPECTED_WITHIN_S = 5.0


class Zygote:
    """Answers requests until the supervisor closes its end."""

    def __init__(self, connection: socket.socket, supervisor_pid: int) -> None:
        self._connection = connection
        self._supervisor_pid = supervisor_pid
        self._preloaded: Preloaded | None = None
        self._decoder = msgspec.msgpack.Decoder(ZygoteRequest)

    def serve(self) -> None:
        """One request at a time."""
        while True:
            packet, descriptors, _, _ = socket.recv_fds(self._connection, MAX_PACKET_BYTES, MAX_DESCRIPTORS)
            if not packet:
                return
            request = self._decoder.decode(packet)
            if isinstance(request, Prepare):
                self._answer(self._prepare(request))
            else:
                self._fork(request, descriptors)

    def _answer(self, answer: ZygoteAnswer) -> None:
        self._connection.send(msgspec.msgpack.encode(answer))

    def _prepare(self, request: Prepare) -> Prepared:
        try:
            info = msgspec.convert(request.model_info, ModelInfo)
            self._preloaded = preload(info, request.tokenizer_backend)  # type: ignore[arg-type]
        except SglmtError as error:
            return Prepared(error=str(error))
        finally:
            gc.collect()
            gc.freeze()
        return Prepared()

    def _fork(self, request: ForkRequest, descriptors: list[int]) -> None:
        pid_read, pid_write = os.pipe()
        between = os.fork()
        if between == 0:
            os.close(pid_read)
            child = os.fork()
            if child == 0:
                os.close(pid_write)
                self._be_child(request, descriptors)
            os.write(pid_write, child.to_bytes(8, "little"))
            os._exit(0)
        os.close(pid_write)
        for descriptor in descriptors:
            os.close(descriptor)
        pid = int.from_bytes(os.read(pid_read, 8), "little")
        os.close(pid_read)
        os.waitpid(between, 0)  # from here on the child is the supervisor's
        self._answer(Forked(pid=pid))

    def _be_child(self, request: ForkRequest, descriptors: list[int]) -> NoReturn:
        """Become the child; never returns."""
        try:
            self._connection.close()
            os.setpgid(0, 0)
            stdout_fd, stderr_fd, ready_fd, death_fd, *listen_fd = descriptors
            os.dup2(stdout_fd, 1)
            os.dup2(stderr_fd, 2)
            os.close(stdout_fd)
            os.close(stderr_fd)
            os.environ.clear()
            os.environ.update(request.environment)
            bootstrap = msgspec.structs.replace(
                request.bootstrap,
                ready_fd=ready_fd,
                death_fd=death_fd,
                listen_fd=listen_fd[0] if listen_fd else None,
            )
            _wait_for_adoption(self._supervisor_pid, death_fd)
            if not _is_expected(bootstrap):
                os._exit(ExitCode.CHILD_DEATH)
            status = run_child(bootstrap, self._preloaded)
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException as error:
            status = int(ExitCode.FAILURE)
            os.write(2, f"ERROR {type(error).__name__}: {error}\n".encode())
        os._exit(status)


def _wait_for_adoption(supervisor_pid: int, death_fd: int) -> None:
    """Until the process in between has ended and the supervisor is the parent (then PDEATHSIG means it).

    A supervisor that was killed meanwhile adopts nobody: the death pipe tells, and this process ends at once, with
    the listening socket that it holds.
    """
    until_s = time.monotonic() + _ADOPTED_WITHIN_S
    supervisor_is_gone = select.poll()
    supervisor_is_gone.register(death_fd, select.POLLIN)
    while os.getppid() != supervisor_pid:
        if supervisor_is_gone.poll(1) or time.monotonic() >= until_s:
            os._exit(ExitCode.CHILD_DEATH)


def _is_expected(bootstrap: Bootstrap) -> bool:
    """Whether the supervisor has taken this process for the life it asked for. It writes the pid into the slot when
    it has our answer; when it gave up waiting for it, another process is that life already."""
    page = StatePage.open(Path(bootstrap.state_page), bootstrap.instance_id)
    try:
        slot, until_s = page.slot(bootstrap.slot), time.monotonic() + _EXPECTED_WITHIN_S
        while slot[SlotWord.PID] != os.getpid():
            taken = slot[SlotWord.PID] != 0 or slot[SlotWord.GENERATION] != bootstrap.generation
            if taken or os.getppid() != bootstrap.supervisor_pid or time.monotonic() > until_s:
                return False
            time.sleep(0.0005)
        return True
    finally:
        page.close()


def main() -> None:
    """Entry: `python -m sglmt.workers.zygote --socket-fd N --supervisor-pid P`."""
    parser = argparse.ArgumentParser(prog="sglmt-zygote")
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--supervisor-pid", type=int, required=True)
    options = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != options.supervisor_pid:
        os._exit(ExitCode.CHILD_DEATH)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setproctitle.setproctitle("sglmt::zygote")
    os.set_inheritable(options.socket_fd, False)
    connection = socket.socket(fileno=options.socket_fd)
    Zygote(connection, options.supervisor_pid).serve()


if __name__ == "__main__":
    main()
