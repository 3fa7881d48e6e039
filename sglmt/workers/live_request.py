"""One request a worker waits for: what was submitted, what came back, and whom to tell. Worker process only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import msgspec

from sglmt.delivery.live_requests import ResubmitBudget
from sglmt.messages.sampling import FinishReason, TokenLogprobs
from sglmt.messages.to_scheduler import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput

Submission = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput


class Sink(Protocol):
    """Who receives a request's output, in order and once. Called by the loop that serves all: never waits."""

    def admitted(self, request: LiveRequest) -> None:
        """The scheduler has taken the request."""

    def row(self, request: LiveRequest, text: str, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> None:
        """New text and ids."""

    def finished(
        self,
        request: LiveRequest,
        text: str,
        token_ids: Sequence[int],
        logprobs: TokenLogprobs | None,
        finish: FinishReason,
    ) -> None:
        """The last text and ids, and why it ended."""


class TextLine(Protocol):
    """A sink's short way for tokens that are plain text."""

    def write(self, text: str, now_s: float) -> bool:
        """Take `text`, which is not empty; False when it must be given to the sink."""
        ...


class LiveRequest:
    """State of one key. `text_line` is set by its sink, `steady` by `SteadyRequests`."""

    __slots__ = (
        "admitted",
        "attempt",
        "budget",
        "cached_tokens",
        "chars",
        "choice",
        "embedding",
        "first_token_at_s",
        "has_input_logprobs",
        "input_logprobs",
        "key",
        "last_token_at_s",
        "measured",
        "output_ids",
        "prompt_tokens",
        "sink",
        "steady",
        "submission",
        "submitted_at_s",
        "text_line",
        "tokens",
    )

    def __init__(
        self,
        submission: Submission,
        choice: int,
        prompt_tokens: int,
        sink: Sink,
        max_resubmits: int,
        now_s: float,
        measured: bool = True,
    ) -> None:
        """`measured`: counts as tokens and latencies of the instance (a worker's own probes do not)."""
        self.key = submission.key
        self.attempt = submission.attempt
        self.submission = submission
        self.choice = choice
        self.prompt_tokens = prompt_tokens
        self.sink = sink
        self.text_line: TextLine | None = None
        self.steady = False
        self.measured = measured
        self.budget = ResubmitBudget(max_resubmits)
        self.output_ids: array[int] = array("I")
        self.tokens = 0
        self.chars = 0
        self.admitted = False
        self.cached_tokens = 0
        self.has_input_logprobs = False  # they came; a stream's sink takes them from here
        self.input_logprobs: TokenLogprobs | None = None
        self.embedding: tuple[float, ...] | None = None
        self.submitted_at_s = now_s
        self.first_token_at_s: float | None = None
        self.last_token_at_s = 0.0

    def next_submission(self) -> Submission:
        """The submission of the next attempt: the same request, continued after what was received."""
        self.attempt += 1
        common = {"attempt": self.attempt, "resubmits": self.budget.resubmits}
        if isinstance(self.submission, TokenizedGenerateReqInput):
            common["prefix_ids"] = self.output_ids.tobytes()  # type: ignore[assignment]
        return msgspec.structs.replace(self.submission, **common)
