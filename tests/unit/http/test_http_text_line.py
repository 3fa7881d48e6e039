"""The short way of plain text to the socket: the same bytes as the long way, in order, whatever the socket takes."""

from __future__ import annotations

import asyncio
import json
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglmt.http.errors import ApiError
from sglmt.http.formatting import FormatContext, Formatter
from sglmt.http.limits import ModelLimits
from sglmt.http.openai.chat import parse_chat
from sglmt.http.openai.completions import parse_completion
from sglmt.http.streams import KEEP_ALIVE_AFTER_S, Flusher, StreamSink
from sglmt.messages.sampling import TokenLogprobs

LIMITS = ModelLimits("smol", 4096, 1000, 16, "simulator", {})
CONTEXT = FormatContext("smol", 1700, "r", str, lambda i: str(i).encode())


def completions() -> Formatter:
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    return parse_completion(body, LIMITS).make_formatter(CONTEXT)


def chat() -> Formatter:
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "stream": True}).encode()
    return parse_chat(body, LIMITS).make_formatter(CONTEXT)


class Wire:
    """A connection whose socket takes as much of a chunk as `takes` says next (None: it is broken or full); what it
    does not take waits in the transport until `drain`."""

    def __init__(self, takes: list[int | None]) -> None:
        self.takes = takes
        self.out = bytearray()
        self.straight = 0
        self.waiting = bytearray()
        self.write_paused = False
        self.is_lost = False
        self.transport = SimpleNamespace(write=self.waiting.extend)

    @property
    def nothing_waits(self) -> bool:
        return not self.waiting

    def send_straight(self, data: bytes) -> int:
        assert not self.waiting, "overtakes what waits"
        taken = self.takes.pop(0) if self.takes else len(data)
        if taken is None:
            raise BlockingIOError
        self.out += data[:taken]
        self.straight += 1
        return min(taken, len(data))

    def write_straight(self, data: bytes) -> bool:
        try:
            sent = self.send_straight(data)
        except OSError:
            sent = 0
        self.waiting += data[sent:]
        return sent == len(data)

    def drain(self) -> None:
        self.out += self.waiting
        self.waiting.clear()


class Stream:
    """One open stream of one choice, driven as the frontend does it."""

    def __init__(self, formatter: Formatter, wire: Wire) -> None:
        self.wire = wire
        self.flusher = Flusher()
        connection: Any = wire
        self.sink = StreamSink(connection, formatter, 1, self.flusher, lambda: None)
        self.request: Any = SimpleNamespace(choice=0, input_logprobs=None, text_line=None)
        self.sink.admitted(self.request)
        self.sink.open()

    def row(self, text: str, collect: bool = False, logprobs: TokenLogprobs | None = None, now_s: float = 0.0) -> None:
        line = self.request.text_line
        if logprobs or line is None or collect or not text or not line.write(text, now_s):
            self.sink.row(self.request, text, array("I", [1]), logprobs)

    def events(self) -> list[Any]:
        """What a client reads: chunks, then events, then JSON."""
        data, body = bytes(self.wire.out), b""
        while data:
            size, _, data = data.partition(b"\r\n")
            body += data[: int(size, 16)]
            assert data[int(size, 16) :][:2] == b"\r\n"
            data = data[int(size, 16) + 2 :]
        return [json.loads(event.removeprefix(b"data: ")) for event in body.split(b"\n\n") if event]


def texts_of(events: list[Any]) -> list[str]:
    choices = [event["choices"][0] for event in events]
    return [text for each in choices if (text := each["text"] if "text" in each else each["delta"]["content"])]


steps = st.lists(
    st.one_of(
        st.tuples(st.just("row"), st.text(max_size=5)),
        st.tuples(st.just("row"), st.sampled_from(["\u2028", "\x85", '"\\', "日本", "x" * 3000])),
        st.tuples(st.just("collected"), st.text(max_size=5)),
        st.tuples(st.just("logprobs"), st.text(max_size=5)),
        st.tuples(st.just("flush"), st.just("")),
        st.tuples(st.just("drain"), st.just("")),
    ),
    max_size=30,
)


@pytest.mark.parametrize("make_formatter", [completions, chat])
@given(steps, st.lists(st.one_of(st.none(), st.integers(0, 300)), max_size=10))
def test_all_text_arrives_once_and_in_order(make_formatter: Any, steps: Any, takes: list[int | None]) -> None:
    async def body() -> None:
        stream = Stream(make_formatter(), Wire(list(takes)))
        given_texts: list[str] = []
        for step, text in steps:
            if step == "flush":
                stream.flusher.flush()
            elif step == "drain":
                stream.wire.drain()
            else:
                logprobs = TokenLogprobs(chosen=[-1.0]) if step == "logprobs" else None
                stream.row(text, collect=step == "collected", logprobs=logprobs)
                given_texts.append(text)
        stream.flusher.flush()
        stream.wire.drain()
        assert "".join(texts_of(stream.events())) == "".join(given_texts)

    asyncio.run(body())


def test_plain_tokens_take_the_short_way_and_say_the_same() -> None:
    async def body() -> None:
        written: dict[bool, list[Any]] = {}
        for collect in (False, True):
            stream = Stream(completions(), Wire([]))
            for text in ("a", "b\n", "ü", "d"):
                stream.row(text, collect)
                stream.flusher.flush()
            written[collect] = stream.events()
            line = stream.request.text_line
            assert line is not None
            assert line.open
            if not collect:
                assert stream.wire.straight == 4
        assert written[False] == written[True]

    asyncio.run(body())


def test_it_is_closed_while_something_waits_and_open_again_behind_it() -> None:
    async def body() -> None:
        stream = Stream(completions(), Wire([]))
        stream.row("a")
        stream.flusher.flush()
        stream.wire.takes = [10]
        stream.row("b")  # the end of it waits
        assert not stream.request.text_line.open
        stream.row("c")
        stream.flusher.flush()
        assert not stream.request.text_line.open
        stream.wire.drain()
        stream.row("d")
        stream.flusher.flush()
        assert stream.request.text_line.open
        assert texts_of(stream.events()) == ["a", "b", "c", "d"]

    asyncio.run(body())


@pytest.mark.parametrize("end", ["lost", "failed", "rest taken"])
def test_nothing_is_written_behind_the_end(end: str) -> None:
    async def body() -> None:
        stream = Stream(completions(), Wire([]))
        stream.row("a")
        stream.flusher.flush()
        if end == "lost":
            stream.sink.connection_lost()
        elif end == "failed":
            stream.sink.fail(ApiError(500, "broken"))
        else:
            stream.sink.take_rest()
        assert not stream.request.text_line.write("b", 0.0)
        assert texts_of(stream.events()) == ["a"]

    asyncio.run(body())


def test_its_writes_hold_off_the_keep_alive() -> None:
    async def body() -> None:
        stream = Stream(completions(), Wire([]))
        stream.row("a")
        stream.flusher.flush()
        start_s = stream.sink.last_write_s
        stream.row("b", now_s=start_s + KEEP_ALIVE_AFTER_S)
        stream.sink.keep_alive(start_s + KEEP_ALIVE_AFTER_S + 1)
        stream.flusher.flush()
        assert b"keep-alive" not in stream.wire.out
        stream.sink.keep_alive(start_s + 2 * KEEP_ALIVE_AFTER_S)
        stream.flusher.flush()
        assert b"keep-alive" in stream.wire.out

    asyncio.run(body())
