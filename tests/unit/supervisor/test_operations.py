"""One operation at a time, to the end; who asks twice, leaves early, or asks while the instance ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from sglmt.errors import ConfigError, ExitCode
from sglmt.supervisor.operations import Operation, OperationError, Operations


class Inbox:
    """Does what is posted soon, and keeps what goes wrong."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def post(self, work: Callable[[], None]) -> None:
        def do() -> None:
            try:
                work()
            except Exception as error:
                self.errors.append(error)

        asyncio.get_running_loop().call_soon(do)


def run(scenario: Callable[[Operations, Inbox], Any]) -> None:
    async def main() -> None:
        inbox = Inbox()
        operations = Operations(inbox.post, lambda level, source, text: None)
        async with asyncio.timeout(10):
            await scenario(operations, inbox)
        await operations.close()

    asyncio.run(main())


async def ended(operations: Operations, number: int) -> tuple[list[str], str | None, int]:
    """(lines, error, exit code) of an operation, when it is done."""
    lines: list[str] = []
    while True:
        report = await operations.report(number, len(lines), time.monotonic() + 5)
        lines += report.lines
        assert report.seen == len(lines)
        if report.done:
            return lines, report.error, report.exit_code


def test_they_wait_for_each_other_and_the_same_one_is_not_queued_twice() -> None:
    order: list[str] = []

    async def scenario(operations: Operations, _inbox: Inbox) -> None:
        go_on = asyncio.Event()

        async def slow(operation: Operation) -> None:
            order.append("slow begins")
            await go_on.wait()
            order.append("slow ends")

        async def quick(operation: Operation) -> None:
            order.append("quick")
            operation.say("one")
            operation.say("one")
            operation.say("two")

        first = operations.begin("slow", slow)
        await operations.until(lambda: first.begun) if not first.begun else None
        second = operations.begin("quick", quick)
        assert operations.begin("quick", quick) is second
        assert not operations.idle
        go_on.set()
        assert await ended(operations, second.number) == (["one", "two"], None, 0)
        assert operations.idle

    async def with_turns(operations: Operations, inbox: Inbox) -> None:
        turning = asyncio.create_task(turn_forever(operations))
        try:
            await scenario(operations, inbox)
        finally:
            turning.cancel()

    run(with_turns)
    assert order == ["slow begins", "slow ends", "quick"]


async def turn_forever(operations: Operations) -> None:
    while True:
        operations.turned()
        await asyncio.sleep(0)


def test_an_error_is_reported_and_a_bug_reaches_the_supervisor() -> None:
    async def scenario(operations: Operations, inbox: Inbox) -> None:
        async def refused(operation: Operation) -> None:
            def change() -> None:
                raise ConfigError("no")

            await operations.do(change)

        async def broken(operation: Operation) -> None:
            raise ZeroDivisionError

        assert await ended(operations, operations.begin("a", refused).number) == ([], "no", ExitCode.CONFIG)
        assert inbox.errors == []
        number = operations.begin("b", broken).number
        assert (await ended(operations, number))[2] == ExitCode.FAILURE
        await asyncio.sleep(0)
        assert [type(error) for error in inbox.errors] == [ZeroDivisionError]
        with pytest.raises(OperationError, match="not known"):
            await operations.report(99, 0, time.monotonic())

    run(scenario)


def test_the_end_of_the_instance_ends_them() -> None:
    async def scenario(operations: Operations, _inbox: Inbox) -> None:
        async def for_ever(operation: Operation) -> None:
            operation.say("at it")
            await asyncio.Event().wait()

        running, waiting = operations.begin("a", for_ever), operations.begin("b", for_ever)
        assert (await operations.report(running.number, 0, time.monotonic() + 5)).lines == ["at it"]
        assert operations.running is running
        assert running.progress == "a: at it"
        operations.refuse("the instance is stopping")
        for operation in (running, waiting):
            assert (await ended(operations, operation.number))[1:] == ("the instance is stopping", ExitCode.STOPPING)
        with pytest.raises(OperationError, match="stopping"):
            operations.begin("c", for_ever)

    run(scenario)


def test_news_are_waited_for_no_longer_than_asked() -> None:
    async def scenario(operations: Operations, _inbox: Inbox) -> None:
        async def silent(operation: Operation) -> None:
            await asyncio.Event().wait()

        report = await operations.report(operations.begin("a", silent).number, 0, time.monotonic() + 0.01)
        assert (report.lines, report.done) == ([], False)
        operations.refuse("over")

    run(scenario)
