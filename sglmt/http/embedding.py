"""A checked embedding request, whichever API it came through, its results, and where they are collected.

Runs in the tokenizer workers: made by the parsers, read by the handler that tokenizes and submits it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sglmt.http.errors import ApiError, from_finish
from sglmt.http.formatting import is_failure
from sglmt.messages.sampling import FinishReason, TokenLogprobs
from sglmt.workers.live_request import LiveRequest


@dataclass(slots=True)
class EmbeddingRow:
    """One text of a request: as text or as ids, and the client's id for it. `error`: it was refused."""

    rid: str
    param: str
    text: str | None = None
    input_ids: list[int] | None = None
    error: ApiError | None = None


@dataclass(slots=True)
class EmbeddingResult:
    """What became of a row: its vector, or why there is none. `ended_at_s` is monotonic."""

    prompt_tokens: int
    ended_at_s: float
    vector: Sequence[float] = ()
    error: ApiError | None = None


@dataclass(slots=True)
class EmbeddingRequest:
    """Everything but the lengths of the texts is checked.

    `one_fails_all`: a row that cannot be answered ends the whole request, else only itself.
    """

    rows: list[EmbeddingRow]
    one_fails_all: bool
    formatter_type: Callable[[EmbeddingRequest, EmbeddingContext], EmbeddingFormatter]
    is_batch: bool = False  # the texts came as a list
    add_special_tokens: bool = True
    as_base64: bool = False
    dimensions: int | None = None
    priority: int = 0
    timeout_s: float | None = None
    model: str | None = None  # as the client wrote it


@dataclass(slots=True)
class EmbeddingContext:
    """What a formatter must be told besides the request. `started_s` is the monotonic time of arrival."""

    model_name: str
    started_s: float


class EmbeddingFormatter(Protocol):
    """Writes the answer of one request, row by row, so that a large one can be written in parts."""

    def row(self, index: int, result: EmbeddingResult) -> bytes:
        """The JSON object of one row."""
        ...

    def body(self, rows: Sequence[bytes], results: Sequence[EmbeddingResult]) -> bytes:
        """The whole answer."""
        ...


class EmbeddingSink:
    """Collects the vectors of one request; `done` completes with the results, in row order.

    With `one_fails_all` it fails with the ApiError of the first row that fails, without waiting for the others.
    """

    __slots__ = ("_one_fails_all", "_remaining", "_results", "done")

    def __init__(self, rows: int, one_fails_all: bool) -> None:
        self._one_fails_all = one_fails_all
        self._remaining = rows
        self._results: list[EmbeddingResult | None] = [None] * rows
        self.done: asyncio.Future[list[EmbeddingResult]] = asyncio.get_running_loop().create_future()
        self._finish_when_complete()

    def refused(self, index: int, prompt_tokens: int, error: ApiError) -> None:
        """A row that was not submitted."""
        self._take(index, EmbeddingResult(prompt_tokens, time.monotonic(), error=error))

    def admitted(self, request: LiveRequest) -> None:
        """Nothing is written before the end."""

    def row(self, request: LiveRequest, text: str, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> None:
        """Embeddings have no text."""

    def finished(
        self,
        request: LiveRequest,
        text: str,
        token_ids: Sequence[int],
        logprobs: TokenLogprobs | None,
        finish: FinishReason,
    ) -> None:
        error = from_finish(finish) if is_failure(finish) else None
        vector = request.embedding or ()
        if error is None and not vector:
            error = ApiError(500, "the engine gave no embedding for this request", code="engine_error")
        result = EmbeddingResult(request.prompt_tokens, time.monotonic(), () if error else vector, error)
        self._take(request.choice, result)

    def _take(self, index: int, result: EmbeddingResult) -> None:
        if self._results[index] is not None:
            return
        self._results[index] = result
        self._remaining -= 1
        if self._one_fails_all and result.error is not None and not self.done.done():
            self.done.set_exception(result.error)
        self._finish_when_complete()

    def _finish_when_complete(self) -> None:
        if not self._remaining and not self.done.done():
            self.done.set_result([result for result in self._results if result is not None])

    def connection_lost(self) -> None:
        if not self.done.done():
            self.done.cancel()

    def can_write(self) -> None:
        """Nothing is written before the end."""
