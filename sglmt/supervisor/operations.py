"""Changes to a running instance, one at a time: who asked for what, how far it is, how it ended.

Runs in the supervisor's loop. An operation is a coroutine that changes what is wanted (by posting to the inbox, as
everybody) and waits until it is so; `turned` lets waiters look again after each thing that happened. Operations wait
for each other in the order of asking; one that is asked for again before it has begun is not queued twice. Whoever
asked may leave: the operation goes on, and its last lines are kept for `report`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from sglmt.control.protocol import OperationReport
from sglmt.errors import ExitCode, SglmtError
from sglmt.supervisor.services import Log

KEPT_OPERATIONS = 64
KEPT_LINES = 4096

Work = Callable[["Operation"], Awaitable[None]]


class OperationError(SglmtError):
    """An operation was refused, or ended without having done what it was to do."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILURE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class Operation:
    """One change. Lines are for people: the progress."""

    number: int
    what: str
    log: Log
    lines: list[str] = field(default_factory=list)
    begun: bool = False
    done: bool = False
    error: str | None = None
    exit_code: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, text: str) -> None:
        """One line of progress; the same one twice in a row counts once."""
        if not self.lines or self.lines[-1] != text:
            if len(self.lines) < KEPT_LINES:
                self.lines.append(text)
            self.log("info", "supervisor", f"{self.what}: {text}")
            self.news.set()

    @property
    def progress(self) -> str:
        """`restart all: 2 of 4 workers replaced`."""
        return f"{self.what}: {self.lines[-1]}" if self.lines else self.what


class Operations:
    """The queue of one instance."""

    def __init__(self, post: Callable[[Callable[[], None]], None], log: Log) -> None:
        """`post` puts work into the supervisor's inbox: there an unexpected error of an operation is raised."""
        self._post = post
        self._log = log
        self._one_at_a_time = asyncio.Lock()
        self._operations: dict[int, Operation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Event()
        self._closed: str | None = None
        self._count = 0

    def begin(self, what: str, work: Work) -> Operation:
        """Begin, or queue behind the others. Raises OperationError when the instance is ending."""
        if self._closed is not None:
            raise OperationError(f"{what}: {self._closed}", ExitCode.STOPPING)
        for operation in self._operations.values():
            if operation.what == what and not operation.begun:
                return operation
        self._count += 1
        operation = Operation(self._count, what, self._log)
        self._operations[self._count] = operation
        self._operations.pop(self._count - KEPT_OPERATIONS, None)
        task = asyncio.get_running_loop().create_task(self._carry_out(operation, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return operation

    async def _carry_out(self, operation: Operation, work: Work) -> None:
        try:
            async with self._one_at_a_time:
                operation.begun = True
                if self._closed is not None:
                    raise OperationError(self._closed, ExitCode.STOPPING)
                await work(operation)
        except SglmtError as error:
            operation.error, operation.exit_code = str(error), int(error.exit_code)
            self._log("error", "supervisor", f"{operation.what}: {error}")
        except asyncio.CancelledError:
            operation.error = self._closed or "ended"
            operation.exit_code = int(ExitCode.STOPPING)
        except Exception as error:  # a bug: it ends the supervisor, loudly, from its own loop
            self._fail(error)
            operation.error, operation.exit_code = repr(error), int(ExitCode.FAILURE)
        finally:
            operation.done = True
            operation.news.set()

    def _fail(self, error: Exception) -> None:
        def fail() -> None:
            raise error

        self._post(fail)

    @property
    def running(self) -> Operation | None:
        """The oldest one that has begun and not ended."""
        return next((each for each in self._operations.values() if each.begun and not each.done), None)

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return all(operation.done for operation in self._operations.values())

    async def report(self, number: int, seen: int, until_s: float) -> OperationReport:
        """Wait for news of an operation, at most until monotonic `until_s`. Raises OperationError for a number nobody
        knows any more."""
        operation = self._operations.get(number)
        if operation is None:
            raise OperationError(f"operation {number}: not known (any more)")
        while not operation.done and len(operation.lines) <= seen:
            operation.news.clear()
            try:
                async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                    await operation.news.wait()
            except TimeoutError:
                break
        return OperationReport(
            number=number, what=operation.what, lines=operation.lines[seen:], seen=len(operation.lines),
            done=operation.done, error=operation.error, exit_code=operation.exit_code,
        )  # fmt: skip

    # --- for the work -------------------------------------------------------------------------------------

    async def do(self, change: Callable[[], None]) -> None:
        """Have the supervisor do this, in its turn; returns when it is done. Raises the SglmtError it ends with."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def work() -> None:
            if done.cancelled():
                return
            try:
                change()
            except SglmtError as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self._post(work)
        await done

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait for a condition, looked at after everything that happens (ten times a second at least)."""
        while not reached():
            turn = self._turn
            await turn.wait()

    def turned(self) -> None:
        """Something has happened: waiters look again."""
        turn, self._turn = self._turn, asyncio.Event()
        turn.set()

    # --- the end ------------------------------------------------------------------------------------------

    def refuse(self, reason: str) -> None:
        """The instance is ending: nothing new, and what runs ends now, for this reason."""
        if self._closed is None:
            self._closed = reason
            for task in self._tasks:
                task.cancel()

    async def close(self) -> None:
        """Wait until nothing of any operation runs."""
        self.refuse("the instance has ended")
        await asyncio.gather(*self._tasks, return_exceptions=True)
