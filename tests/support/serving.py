"""Talking to a running instance in tests: whole answers, streams read in the background, a quick look at its state."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from sglmt.control.instances import ask_status, find_one
from sglmt.status.snapshot import InstanceSnapshot
from tests.support.instance import Instance

T = TypeVar("T")
ANSWER_WITHIN_S = 60.0
POLL_EVERY_S = 0.02


def look(instance: Instance) -> InstanceSnapshot:
    """The snapshot straight from the control socket: quick enough for conditions that are asked for often."""
    snapshot = ask_status(find_one(instance.name, str(instance.runtime_dir)), time.monotonic() + 5.0)
    assert snapshot.processes, f"{instance.name} is {snapshot.state}: {snapshot.reason}"
    return snapshot


def busy(instance: Instance) -> dict[str, int]:
    """Process → requests in flight, of those that have any; the scheduler's waiting ones count too."""
    return {f"{row.role}:{row.index}": row.in_flight for row in look(instance).processes if row.in_flight}


def supervisor_pid(instance: Instance) -> int:
    """From the run directory; 0 as long as there is none."""
    try:
        record = json.loads((instance.runtime_dir / instance.name / "instance.json").read_bytes())
        return int(record["process"]["pid"])
    except OSError:
        return 0


def is_gone(pid: int) -> bool:
    """Whether it has ended; that init has not reaped it yet is not its fault."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def remains_of(pids: list[int], segment: str, directory: Path, port: int) -> list[str]:
    """What is still there of an instance, in words."""
    left = [f"process {pid}" for pid in pids if not is_gone(pid)]
    left += [f"segment {segment}"] if (Path("/dev/shm") / segment).exists() else []
    left += [f"directory {directory}"] if directory.exists() else []
    return left + ([f"listener on port {port}"] if port_is_served(port) else [])


def port_is_served(port: int) -> bool:
    """Whether somebody listens on it."""
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in psutil.net_connections("tcp"))


def post(instance: Instance, path: str, **body: Any) -> httpx.Response:
    """One request on a connection of its own."""
    return httpx.post(instance.url + path, json=body, timeout=ANSWER_WITHIN_S)


def get(instance: Instance, path: str) -> httpx.Response:
    """One request on a connection of its own."""
    return httpx.get(instance.url + path, timeout=ANSWER_WITHIN_S)


def events_of(body: str) -> list[dict[str, Any]]:
    """The JSON of every event of a whole stream; its end must be there."""
    blocks = [block for block in body.split("\n\n") if block and not block.startswith(":")]
    assert blocks[-1] == "data: [DONE]", f"the stream has no end: {body[-200:]!r}"
    return [json.loads(block.removeprefix("event: error\n").removeprefix("data: ")) for block in blocks[:-1]]


class Stream:
    """One streaming request, read by a task from when it was opened. `failure` is how the connection broke."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: httpx.Headers = httpx.Headers()
        self.body = ""
        self.times_s: list[float] = []
        self.failure: httpx.TransportError | None = None
        self.ended = False
        self._task: asyncio.Task[None] | None = None
        self._response: httpx.Response | None = None

    @property
    def events(self) -> list[dict[str, Any]]:
        """All of a stream that has ended well."""
        assert self.failure is None, f"the stream broke: {self.failure!r}; it had {self.body[-200:]!r}"
        assert self.ended
        return events_of(self.body)

    @property
    def chunks(self) -> int:
        """How many pieces have come."""
        return len(self.times_s)

    @property
    def longest_gap_s(self) -> float:
        """Between two pieces."""
        return max((after - before for before, after in zip(self.times_s, self.times_s[1:], strict=False)), default=0.0)

    async def finish(self) -> Stream:
        """Wait for the end, however it comes."""
        assert self._task is not None
        async with asyncio.timeout(ANSWER_WITHIN_S):
            await self._task
        return self

    async def leave(self) -> None:
        """Close the connection, as a client that has lost interest."""
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _read(self, client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
        try:
            async with client.stream("POST", url, json=body) as response:
                self.status, self.headers = response.status_code, response.headers
                async for text in response.aiter_text():
                    self.times_s.append(time.monotonic())
                    self.body += text
        except httpx.TransportError as error:
            self.failure = error
        self.ended = True


class Streams:
    """Opens streams on connections of their own; those still open are left at the end."""

    def __init__(self, instance: Instance, client: httpx.AsyncClient) -> None:
        self._base = instance.url
        self._client = client
        self.open: list[Stream] = []

    def start(self, path: str, **body: Any) -> Stream:
        """Send the request now, read in the background."""
        stream = Stream()
        stream._task = asyncio.create_task(stream._read(self._client, self._base + path, {**body, "stream": True}))
        self.open.append(stream)
        return stream


@contextlib.asynccontextmanager
async def streams_to(instance: Instance) -> AsyncIterator[Streams]:
    """A `Streams` for the block."""
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=ANSWER_WITHIN_S, limits=limits) as client:
        streams = Streams(instance, client)
        try:
            yield streams
        finally:
            for stream in streams.open:
                await stream.leave()


async def until(predicate: Callable[[], T], deadline_s: float, why: str) -> T:
    """`wait_until` that lets the streams go on meanwhile; the predicate runs in a thread."""
    end_s = time.monotonic() + deadline_s
    while not (result := await asyncio.to_thread(predicate)):
        assert time.monotonic() < end_s, f"not within {deadline_s:g} s: {why}; last seen: {result!r}"
        await asyncio.sleep(POLL_EVERY_S)
    return result


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process stopped for the block."""
    import signal

    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def chat_text(events: list[dict[str, Any]]) -> str:
    """The joined deltas of a chat stream."""
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def failure_code(stream: Stream) -> str:
    """The `code` a stream ended with: in an error event, or in `/generate`'s finish reason of type abort."""
    last = stream.events[-1]
    if "error" in last:
        return str(last["error"]["code"])
    reason = last["meta_info"]["finish_reason"]
    assert reason["type"] == "abort", reason
    return str(reason["code"])
