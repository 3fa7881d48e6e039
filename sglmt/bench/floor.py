"""The floor: what one SSE event a token costs in Python when nothing else is done. Its server and its starter.

`python -m sglmt.bench.floor` is a bare uvicorn (uvloop, httptools) raw ASGI application: one ticker a process,
and every stream sends the same bytes at every tick. `Floor` starts as many of them as the measured server has
workers, on one port, and stops them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from types import TracebackType
from typing import Any, Self

from sglmt.errors import DeadlineError

START_WITHIN_S = 20.0
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Ticker:
    """Wakes everybody who waits, on a grid of `step_s`."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._next: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def tick(self) -> asyncio.Future[None]:
        """Completes at the next tick."""
        loop = asyncio.get_running_loop()
        if self._task is None:
            self._task = loop.create_task(self._run())
        if self._next is None:
            self._next = loop.create_future()
        return self._next

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s += self._step_s
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            woken, self._next = self._next, None
            if woken is not None:
                woken.set_result(None)


class FloorApp:
    """The application: `tokens` events of `event_bytes` bytes for every request."""

    def __init__(self, step_s: float, tokens: int, event_bytes: int) -> None:
        self._ticker = Ticker(step_s)
        self._tokens = tokens
        self._event = event_of(event_bytes)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI entry."""
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        message = {"type": "http.response.body", "body": self._event, "more_body": True}
        for _ in range(self._tokens):
            await self._ticker.tick()
            await send(message)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def event_of(size: int) -> bytes:
    """One SSE event of `size` bytes (at least the framing)."""
    head, tail = b'data: {"text":"', b'"}\n\n'
    return head + b"x" * max(0, size - len(head) - len(tail)) + tail


def listening_socket(port: int) -> socket.socket:
    """A socket on 127.0.0.1 that shares its port with others of this kind; not yet listening."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind(("127.0.0.1", port))
    return made


class Floor:
    """`processes` floor servers on one free port, as a context manager."""

    def __init__(self, processes: int, step_s: float, tokens: int, event_bytes: int) -> None:
        self._arguments = [f"--step={step_s}", f"--tokens={tokens}", f"--event-bytes={event_bytes}"]
        self._count = processes
        self._children: list[subprocess.Popen[bytes]] = []
        self.port = 0

    @property
    def processes(self) -> dict[int, str]:
        """Pid → role."""
        return {child.pid: "floor" for child in self._children}

    def __enter__(self) -> Self:
        with listening_socket(0) as reserved:  # keeps the port while the servers bind it too
            self.port = reserved.getsockname()[1]
            command = [sys.executable, "-m", "sglmt.bench.floor", f"--port={self.port}", *self._arguments]
            for _ in range(self._count):
                self._children.append(subprocess.Popen(command, stdout=subprocess.PIPE))
            try:
                self._wait_until_ready(time.monotonic() + START_WITHIN_S)
            except BaseException:
                self._stop()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _wait_until_ready(self, deadline_s: float) -> None:
        for child in self._children:
            assert child.stdout is not None
            line = child.stdout.readline()  # a child that dies closes it
            if line != b"ready\n" or time.monotonic() > deadline_s:
                raise DeadlineError(f"a floor server did not start within {START_WITHIN_S:g} s (said {line!r})")

    def _stop(self) -> None:
        for child in self._children:
            child.terminate()
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(5.0)
            if child.poll() is None:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()
        self._children.clear()


async def _serve(port: int, app: FloorApp) -> None:
    import uvicorn

    with listening_socket(port) as listener:
        config = uvicorn.Config(
            app, http="httptools", lifespan="off", ws="none", access_log=False, log_config=None, backlog=4096
        )
        server = uvicorn.Server(config)
        listener.listen(4096)
        print("ready", flush=True)
        await server.serve(sockets=[listener])


def main() -> None:
    """Serve until SIGTERM; ends with its parent."""
    parser = argparse.ArgumentParser(prog="sglmt.bench.floor")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step", type=float, required=True, metavar="S")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--event-bytes", type=int, required=True)
    args = parser.parse_args()
    _end_with_parent()
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(args.port, FloorApp(args.step, args.tokens, args.event_bytes)))


def _end_with_parent() -> None:
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(0)


if __name__ == "__main__":
    main()
