"""What a request asks of the engine and of the detokenizer: plain data, checked at the HTTP edge."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """What the engine needs to choose tokens. Every number is finite and in range when it leaves a worker."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: off
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None


class TextSpec(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """How the detokenizer turns a request's ids into text."""

    stop: tuple[str, ...] = ()
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    shown_ids: tuple[int, ...] = ()  # special tokens that are not skipped


class LogprobSpec(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Which log-probabilities a request asks for."""

    top_logprobs_num: int = 0
    token_ids: tuple[int, ...] = ()
    prompt_from: int | None = None  # first prompt position to report, None: output only


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Log-probabilities of consecutive tokens: one entry a token in each list that is there."""

    chosen: list[float | None]
    top: list[list[tuple[int, float]]] | None = None
    requested: list[list[tuple[int, float]]] | None = None

    def slice(self, start: int, end: int | None = None) -> TokenLogprobs:
        """The same for tokens [start, end)."""
        return TokenLogprobs(
            chosen=self.chosen[start:end],
            top=None if self.top is None else self.top[start:end],
            requested=None if self.requested is None else self.requested[start:end],
        )


class FinishReason(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Why a request ended. `kind`: stop, length, abort or error.

    `matched` is the stop string or stop token id; `status`, `message` and `code` are for abort and error;
    `retry_after_s` goes with 429 and 503.
    """

    kind: str
    matched: str | int | None = None
    status: int | None = None
    message: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
