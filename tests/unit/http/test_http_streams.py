"""What a stream's end looks like: a finish reason, an abort, an error; before and after the headers."""

from __future__ import annotations

import asyncio
import gc
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglmt.http.errors import ApiError
from sglmt.http.streams import Flusher, StreamSink
from sglmt.messages.sampling import FinishReason

ABORT = FinishReason(kind="abort", status=499, code="aborted", message="ended")
ERROR = FinishReason(kind="error", status=500, code="engine_error", message="broken")
REQUEST: Any = SimpleNamespace(choice=0, input_logprobs=None, prompt_tokens=1, tokens=2, cached_tokens=0)


class Written:
    """A formatter that writes words."""

    def __init__(self, finishes_aborts: bool) -> None:
        self.finishes_aborts = finishes_aborts

    def stream_start(self) -> bytes:
        return b""

    def prompt_logprobs(self, choice: int, input_logprobs: object) -> bytes:
        return b""

    def delta(self, choice: int, text: str, token_ids: object, logprobs: object) -> bytes:
        return text.encode() + b"|"

    def text_frame(self, choice: int) -> None:
        return None

    def finish(
        self, choice: int, text: str, token_ids: object, logprobs: object, finish: FinishReason, usage: object
    ) -> bytes:
        return f"{text}<{finish.kind}>".encode()

    def stream_end(self) -> bytes:
        return b"END"

    def stream_error(self, error: ApiError) -> bytes:
        return f"!{error.status}".encode()

    def result(self, choices: object) -> bytes:
        raise AssertionError("streams have no whole result")


def run(use: Callable[[StreamSink], object], finishes_aborts: bool, choices: int = 1) -> StreamSink:
    async def body() -> StreamSink:
        writes: list[bytes] = []
        connection: Any = SimpleNamespace(
            write_paused=False, nothing_waits=False, is_lost=False, transport=SimpleNamespace(write=writes.append)
        )
        sink = StreamSink(connection, Written(finishes_aborts), choices, Flusher(), lambda: None)
        use(sink)
        return sink

    return asyncio.run(body())


def end(sink: StreamSink, finish: FinishReason) -> None:
    sink.finished(REQUEST, "rest", array("I"), None, finish)


def open_and_end(finish: FinishReason) -> Callable[[StreamSink], None]:
    def use(sink: StreamSink) -> None:
        sink.row(REQUEST, "a", array("I", [1]), None)
        sink.open()
        end(sink, finish)

    return use


@pytest.mark.parametrize(
    ("finish", "finishes_aborts", "tail", "failed_with"),
    [
        (FinishReason(kind="stop"), True, b"rest<stop>END", None),
        (ABORT, True, b"rest<abort>END", 499),
        (ABORT, False, b"!499", 499),
        (ERROR, True, b"!500", 500),
        (ERROR, False, b"!500", 500),
    ],
)
def test_after_the_headers(finish: FinishReason, finishes_aborts: bool, tail: bytes, failed_with: int | None) -> None:
    sink = run(open_and_end(finish), finishes_aborts)
    assert sink.tail == tail
    assert (sink.failure.status if sink.failure else None) == failed_with


@pytest.mark.parametrize("finishes_aborts", [True, False])
def test_before_the_headers_an_abort_is_an_http_error(finishes_aborts: bool) -> None:
    def use(sink: StreamSink) -> None:
        end(sink, ABORT)
        error = sink.admission.exception()
        assert isinstance(error, ApiError)
        assert error.status == 499

    sink = run(use, finishes_aborts)
    assert sink.tail == b""
    assert sink.failure is None


def test_an_abort_of_one_choice_leaves_the_others_running() -> None:
    def use(sink: StreamSink) -> None:
        other = SimpleNamespace(**{**REQUEST.__dict__, "choice": 1})
        sink.admitted(REQUEST)
        sink.admitted(other)  # type: ignore[arg-type]
        sink.open()
        end(sink, ABORT)
        assert not sink.done.done()
        sink.finished(other, "x", array("I"), None, FinishReason(kind="length"))  # type: ignore[arg-type]

    sink = run(use, finishes_aborts=True, choices=2)
    assert sink.take_rest() == b"rest<abort>x<length>END"


def test_a_closed_sink_leaves_nothing_to_the_garbage_collector() -> None:
    class Framed(Written):
        def text_frame(self, choice: int) -> Any:
            return b"<", b">"

    async def body() -> None:
        connection: Any = SimpleNamespace(
            write_paused=False, nothing_waits=True, is_lost=False, send_straight=len, write_straight=lambda data: True
        )
        request: Any = SimpleNamespace(**REQUEST.__dict__)  # of this test alone: the sink leaves its line in it
        flusher = Flusher()
        sink = StreamSink(connection, Framed(True), 1, flusher, lambda: None)
        sink.open()
        sink.row(request, "a", array("I", [1]), None)
        flusher.flush()
        sink.finished(request, "rest", array("I"), None, FinishReason(kind="stop"))
        sink.close()

    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        asyncio.run(body())
        gc.collect()
        assert not [left for left in gc.garbage if isinstance(left, StreamSink)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
