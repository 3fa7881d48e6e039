"""A fault of ours while an answer is written: one error event, the terminator, the end; and nobody else notices."""

from __future__ import annotations

import asyncio
import json
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from sglmt.http.formatting import FormatContext
from sglmt.http.limits import ModelLimits
from sglmt.http.openai.chat import parse_chat
from sglmt.http.openai.chat_format import ChatFormatter
from sglmt.http.streams import Flusher, StreamSink
from sglmt.messages.sampling import FinishReason

REQUEST: Any = SimpleNamespace(choice=0, input_logprobs=None, prompt_tokens=1, tokens=2, cached_tokens=0)
BODY = json.dumps({"messages": [{"role": "user", "content": "a"}], "stream": True}).encode()


class Breaking(ChatFormatter):
    """Raises in the method named `broken`."""

    broken = ""

    def delta(self, *arguments: Any) -> bytes:
        return self._or_raise("delta", super().delta(*arguments))

    def text_frame(self, choice: int) -> None:
        return None

    def finish(self, *arguments: Any) -> bytes:
        return self._or_raise("finish", super().finish(*arguments))

    def stream_end(self) -> bytes:
        return self._or_raise("stream_end", super().stream_end())

    def _or_raise(self, method: str, written: bytes) -> bytes:
        if self.broken == method:
            raise RuntimeError("secret detail of ours")
        return written


def sent(limits: ModelLimits, broken: str, deltas: int) -> list[str]:
    """Everything a client gets, as lines: `deltas` good ones, then more on a formatter that is broken."""

    async def body() -> list[str]:
        writes: list[bytes] = []
        connection: Any = SimpleNamespace(
            write_paused=False, nothing_waits=False, is_lost=False, transport=SimpleNamespace(write=writes.append)
        )
        formatter = Breaking(parse_chat(BODY, limits), FormatContext("smol", 1700, "r", str, lambda i: str(i).encode()))
        flusher = Flusher()
        sink = StreamSink(connection, formatter, 1, flusher, lambda: None)
        sink.admitted(REQUEST)
        sink.open()
        for _ in range(deltas):
            sink.row(REQUEST, "a", array("I", [1]), None)
        flusher.flush()
        formatter.broken = broken
        sink.row(REQUEST, "b", array("I", [1]), None)
        sink.row(REQUEST, "c", array("I", [1]), None)
        sink.finished(REQUEST, "d", array("I", [1]), None, FinishReason(kind="stop"))
        await asyncio.wait_for(sink.done, 2)
        assert sink.failure is not None
        assert sink.failure.status == 500
        written = b"".join(chunk.split(b"\r\n", 1)[1][:-2] for chunk in writes) + sink.take_rest()
        return [line for line in written.decode().splitlines() if line]

    return asyncio.run(body())


@pytest.mark.parametrize("method", ["delta", "finish", "stream_end"])
def test_it_costs_this_answer_only(method: str, limits: ModelLimits, capfd: pytest.CaptureFixture[str]) -> None:
    lines = sent(limits, method, 5)
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert lines[-1] == "data: [DONE]"
    (error,) = [event["error"] for event in events if "error" in event]
    assert (error["type"], error["code"]) == ("internal_error", "internal_error")
    assert "secret" not in "".join(lines)
    assert events[-1] == {"error": error}
    finishes = [choice["finish_reason"] for event in events for choice in event.get("choices", [])]
    assert set(finishes) == {None}
    assert "secret detail of ours" in capfd.readouterr().err  # for the operator
