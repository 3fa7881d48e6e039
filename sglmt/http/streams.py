"""Where a request's output goes: straight into its connection (SSE) or into a result (JSON). Worker process.

Sinks are called by the loop that serves everybody and never wait. A `StreamSink` collects what one wake-up
brought and writes it once, as one HTTP chunk on the connection's transport; a client that does not read pauses
only itself, and past `MAX_UNSENT_BYTES` its request is ended.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Sequence

from sglmt.http.errors import ApiError, from_finish, internal_error
from sglmt.http.exchange import chunk_of
from sglmt.http.formatting import SSE_KEEP_ALIVE, ChoiceResult, ChoiceUsage, Formatter, json_text
from sglmt.http.server import Connection
from sglmt.messages.sampling import FinishReason, TokenLogprobs
from sglmt.workers.live_request import LiveRequest

MAX_UNSENT_BYTES = 8 * 1024 * 1024
_SIZE_LINES = [b"%x\r\n" % size for size in range(2048)]
KEEP_ALIVE_AFTER_S = 15.0


class Flusher:
    """The sinks that were written to since the last flush; one per worker."""

    __slots__ = ("_dirty",)

    def __init__(self) -> None:
        self._dirty: list[StreamSink] = []

    def add(self, sink: StreamSink) -> None:
        """`sink` has something to write."""
        self._dirty.append(sink)

    def flush(self) -> None:
        """One write a sink."""
        if self._dirty:
            dirty, self._dirty = self._dirty, []
            now_s = time.monotonic()
            for sink in dirty:
                sink.flush(now_s)


def usage_of(request: LiveRequest) -> ChoiceUsage:
    """The token counts of a finished request."""
    return ChoiceUsage(request.prompt_tokens, request.tokens, request.cached_tokens)


class TextLine:
    """A stream's short way to its socket: for tokens that are plain text, while nothing waits to be written.

    Everything a token needs is in this one object, because what a paced token costs is the memory it touches. The sink
    it belongs to says when the way is `open`; what comes otherwise goes through the sink.
    """

    __slots__ = ("_head", "_send", "_sink", "_tail", "_text_free_bytes", "last_write_s", "open")

    def __init__(self, sink: StreamSink, send: Callable[[bytes], int], frame: tuple[bytes, bytes]) -> None:
        """`frame`: the bytes before and after the JSON text in every event."""
        self._sink = sink
        self._send = send
        self._head, tail = frame
        self._tail = tail + b"\r\n"
        self._text_free_bytes = len(self._head) + len(tail)
        self.open = False
        self.last_write_s = 0.0

    def write(self, text: str, now_s: float) -> bool:
        """Send `text` as one event in one HTTP chunk; False when it must go through the sink."""
        if not self.open:
            return False
        quoted = json_text(text)
        size = self._text_free_bytes + len(quoted)
        size_line = _SIZE_LINES[size] if size < len(_SIZE_LINES) else b"%x\r\n" % size
        chunk = b"".join((size_line, self._head, quoted, self._tail))
        self.last_write_s = now_s
        try:
            sent = self._send(chunk)
        except OSError:  # full, or broken: the transport knows what to do
            sent = 0
        if sent != len(chunk):
            self._sink.write_rest(chunk[sent:])
        return True


class StreamSink:
    """One streaming answer; all its choices share the connection.

    `admission` completes when every choice was admitted, or fails with the ApiError of one that was not; `tail`
    is the last bytes, for the caller to send with the end of the body when `done` completes; `failure` is why it did
    not end normally after the headers were out.
    """

    __slots__ = (
        "_admitted",
        "_buffer",
        "_choices",
        "_connection",
        "_delta",
        "_flusher",
        "_formatter",
        "_is_dirty",
        "_line",
        "_on_slow",
        "_open",
        "_remaining",
        "_straight",
        "admission",
        "done",
        "failure",
        "last_write_s",
        "tail",
    )

    def __init__(
        self,
        connection: Connection,
        formatter: Formatter,
        choices: int,
        flusher: Flusher,
        on_slow: Callable[[], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self._connection = connection
        self._formatter = formatter
        self._delta = formatter.delta
        self._choices = choices
        self._remaining = choices
        self._flusher = flusher
        self._straight = False  # nothing waits in the transport, and nobody else writes: straight to the socket
        frame = formatter.text_frame(0) if choices == 1 else None  # several choices share one write
        self._line = None if frame is None else TextLine(self, connection.send_straight, frame)
        self._on_slow = on_slow
        self._admitted: set[int] = set()
        self._buffer: list[bytes] = []
        self._is_dirty = False
        self._open = False
        self.admission: asyncio.Future[None] = loop.create_future()
        self.done: asyncio.Future[None] = loop.create_future()
        self.tail = b""
        self.failure: ApiError | None = None
        self.last_write_s = 0.0

    def open(self) -> bytes:
        """The headers go out now: what is to go with them, as a chunk. What comes later is written by `flush`."""
        self._open = True
        self.last_write_s = time.monotonic()
        try:
            self._buffer.insert(0, self._formatter.stream_start())
        except Exception:
            self._fail_by_our_fault()
        data = b"".join(self._buffer)
        self._buffer.clear()
        return chunk_of(data)

    def admitted(self, request: LiveRequest) -> None:
        self._note_admission(request.choice)

    def _note_admission(self, choice: int) -> None:
        self._admitted.add(choice)
        if len(self._admitted) == self._choices and not self.admission.done():
            self.admission.set_result(None)

    def row(self, request: LiveRequest, text: str, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> None:
        if not self._open:
            self._note_admission(request.choice)
        request.text_line = self._line
        try:
            if request.input_logprobs is not None:
                self._put(self._take_input_logprobs(request))
            data = self._delta(request.choice, text, token_ids, logprobs)
        except Exception:
            self._fail_by_our_fault()
            return
        self._put(data)

    def _take_input_logprobs(self, request: LiveRequest) -> bytes:
        input_logprobs, request.input_logprobs = request.input_logprobs, None
        return b"" if input_logprobs is None else self._formatter.prompt_logprobs(request.choice, input_logprobs)

    def finished(
        self,
        request: LiveRequest,
        text: str,
        token_ids: Sequence[int],
        logprobs: TokenLogprobs | None,
        finish: FinishReason,
    ) -> None:
        if self.done.done():
            return
        if finish.kind in ("abort", "error"):
            error = from_finish(finish)
            if finish.kind == "error" or not self._formatter.finishes_aborts or not self.admission.done():
                self.fail(error)
                return
            self.failure = error
        if not self._open:
            self._note_admission(request.choice)
        try:
            if request.input_logprobs is not None:
                self._put(self._take_input_logprobs(request))
            data = self._formatter.finish(request.choice, text, token_ids, logprobs, finish, usage_of(request))
            self._remaining -= 1
            if self._remaining:
                self._put(data)
            else:
                self._end(data + self._formatter.stream_end())
        except Exception:
            self._fail_by_our_fault()

    def _fail_by_our_fault(self) -> None:
        """Writing this answer raised: that costs this request, nobody else's. Call while handling the exception."""
        traceback.print_exc()
        self.fail(internal_error())

    def fail(self, error: ApiError) -> None:
        """End the answer with an error: an HTTP error while the headers are not out, an event afterwards."""
        if self.done.done():
            return
        if not self._open and not self.admission.done():
            self.admission.set_exception(error)
            self.done.set_result(None)
        else:
            self.failure = error
            self._end(self._formatter.stream_error(error))

    def _end(self, data: bytes) -> None:
        self._use_transport()
        self.tail = data
        self.done.set_result(None)

    def _put(self, data: bytes) -> None:
        if not data:
            return
        if self._line is not None:
            self._line.open = False  # until this has left
        self._buffer.append(data)
        if self._open and not self._is_dirty:
            self._is_dirty = True
            self._flusher.add(self)

    def flush(self, now_s: float | None = None) -> None:
        """Write what was collected as one HTTP chunk, unless the client does not read."""
        self._is_dirty = False
        buffer = self._buffer
        if not buffer or not self._open:
            return
        connection = self._connection
        if not self._straight:
            if connection.write_paused:
                if sum(map(len, buffer)) > MAX_UNSENT_BYTES:
                    self._on_slow()
                return
            if connection.is_lost:
                buffer.clear()
                return
            self._straight = connection.nothing_waits
        data = buffer[0] if len(buffer) == 1 else b"".join(buffer)
        buffer.clear()
        self.last_write_s = now_s or time.monotonic()
        chunk = chunk_of(data)
        if self._straight:
            self._straight = connection.write_straight(chunk)
        else:
            connection.transport.write(chunk)
        if self._line is not None:
            self._line.open = self._straight

    def write_rest(self, data: bytes) -> None:
        """The socket did not take this end of a chunk: from now on something waits."""
        self._use_transport()
        self._connection.transport.write(data)

    def take_rest(self) -> bytes:
        """Everything not yet written, the tail included; the caller sends it with the end of the body."""
        rest = b"".join([*self._buffer, self.tail])
        self._buffer.clear()
        self._open = False
        self._use_transport()
        return rest

    def keep_alive(self, now_s: float) -> None:
        """A comment when nothing was written for long."""
        last_write_s = self.last_write_s if self._line is None else max(self.last_write_s, self._line.last_write_s)
        if self._open and now_s - last_write_s >= KEEP_ALIVE_AFTER_S:
            self._put(SSE_KEEP_ALIVE)

    def can_write(self) -> None:
        self.flush()

    def _use_transport(self) -> None:
        """From now on something waits, or nothing is to be written here any more."""
        self._straight = False
        if self._line is not None:
            self._line.open = False

    def close(self) -> None:
        """Nothing is written here any more. Sink and line let go of each other, so that nothing is left to the
        garbage collector."""
        self._use_transport()
        self._line = None

    def connection_lost(self) -> None:
        self._use_transport()
        if not self.admission.done():
            self.admission.cancel()
        if not self.done.done():
            self.done.cancel()


class CollectSink:
    """One answer that is not streamed. `done` completes with the results, in choice order."""

    __slots__ = ("_logprobs", "_n", "_remaining", "_results", "_texts", "done")

    def __init__(self, choices: int, n: int) -> None:
        self._n = n
        self._remaining = choices
        self._texts: list[list[str]] = [[] for _ in range(choices)]
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(choices)]
        self._results: list[ChoiceResult | None] = [None] * choices
        self.done: asyncio.Future[list[ChoiceResult]] = asyncio.get_running_loop().create_future()

    def admitted(self, request: LiveRequest) -> None:
        """Nothing is written before the end."""

    def row(self, request: LiveRequest, text: str, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> None:
        self._texts[request.choice].append(text)
        if logprobs is not None:
            self._logprobs[request.choice].append(logprobs)

    def finished(
        self,
        request: LiveRequest,
        text: str,
        token_ids: Sequence[int],
        logprobs: TokenLogprobs | None,
        finish: FinishReason,
    ) -> None:
        self.row(request, text, token_ids, logprobs)
        prompt_index, index_in_prompt = divmod(request.choice, self._n)
        self._results[request.choice] = ChoiceResult(
            prompt_index=prompt_index,
            index_in_prompt=index_in_prompt,
            text="".join(self._texts[request.choice]),
            token_ids=request.output_ids,
            logprobs=joined_logprobs(self._logprobs[request.choice]),
            input_logprobs=request.input_logprobs,
            finish=finish,
            usage=usage_of(request),
        )
        self._remaining -= 1
        if not self._remaining and not self.done.done():
            self.done.set_result([result for result in self._results if result is not None])

    def connection_lost(self) -> None:
        if not self.done.done():
            self.done.cancel()

    def can_write(self) -> None:
        """Nothing is written before the end."""


def joined_logprobs(parts: list[TokenLogprobs]) -> TokenLogprobs | None:
    """The log-probabilities of consecutive rows as one; None without any."""
    if not parts:
        return None
    return TokenLogprobs(
        chosen=[value for part in parts for value in part.chosen],
        top=None if parts[0].top is None else [entry for part in parts for entry in part.top or ()],
        requested=None if parts[0].requested is None else [entry for part in parts for entry in part.requested or ()],
    )
