"""`/abort_request` says truthfully whether the scheduler has carried it out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglmt.http.errors import ApiError
from sglmt.http.info_handlers import abort_request


class FakeCall:
    """A call whose frontend answers when it is told to."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.asked: list[tuple[str | None, bool]] = []
        self.answers: list[bytes] = []
        self.answered: Callable[[bool], None] | None = None
        self.is_asked = asyncio.Event()
        self.service = SimpleNamespace(frontend=self)

    async def body(self) -> bytes:
        return self._body

    async def answer(self, body: bytes) -> None:
        self.answers.append(body)

    def abort_by_rid(self, rid: str | None, all_requests: bool, answered: Callable[[bool], None]) -> None:
        self.asked.append((rid, all_requests))
        self.answered = answered
        self.is_asked.set()


async def ask(call: Any, carried_out: bool) -> None:
    task = asyncio.create_task(abort_request(call))
    await call.is_asked.wait()
    assert call.answers == []
    call.answered(carried_out)
    await task


def test_it_is_answered_when_it_is_done() -> None:
    call = FakeCall(b'{"rid": "x"}')
    asyncio.run(ask(call, True))
    assert (call.asked, call.answers) == ([("x", False)], [b'{"status":"ok"}'])


def test_without_a_confirmation_it_is_a_503_to_be_tried_again() -> None:
    call = FakeCall(b'{"abort_all": true}')
    with pytest.raises(ApiError) as raised:
        asyncio.run(ask(call, False))
    assert (raised.value.status, raised.value.code) == (503, "engine_away")
    assert raised.value.retry_after_s == 1
    assert (call.asked, call.answers) == ([(None, True)], [])


def test_a_client_that_has_left_is_told_nothing() -> None:
    async def leave(call: Any) -> None:
        task = asyncio.create_task(abort_request(call))
        await call.is_asked.wait()
        task.cancel()
        await asyncio.wait({task})
        call.answered(True)

    call = FakeCall(b'{"rid": "x"}')
    asyncio.run(leave(call))
    assert call.answers == []
