"""Messages the scheduler receives: from workers (through the router in multi mode) and from detokenizers."""

from __future__ import annotations

import msgspec

from sglmt.messages.frame import Scope
from sglmt.messages.registry import message
from sglmt.messages.sampling import FinishReason, LogprobSpec, SamplingParams, TextSpec


@message(1, Scope.SCHEDULER)
class TokenizedGenerateReqInput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One submission (one attempt) of one request.

    `input_ids` and `prefix_ids` are packed u32: the prompt, and the output the worker already has from earlier
    attempts. `sampling.max_new_tokens` counts the whole output, prefix included. `deadline_s` is CLOCK_MONOTONIC.
    """

    key: int
    attempt: int
    rid: str
    group: int  # key of the first of the requests that share this rid (`n` > 1)
    input_ids: bytes
    sampling: SamplingParams
    text: TextSpec
    prefix_ids: bytes = b""
    logprobs: LogprobSpec | None = None
    confirm_admission: bool = False
    priority: int = 0
    deadline_s: float | None = None
    resubmits: int = 0  # resubmissions in a row that brought no new token
    lora_name: str | None = None


@message(2, Scope.SCHEDULER)
class TokenizedEmbeddingReqInput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One embedding request; answered by one row of BatchEmbeddingOutput."""

    key: int
    attempt: int
    rid: str
    group: int
    input_ids: bytes
    priority: int = 0
    deadline_s: float | None = None
    resubmits: int = 0


@message(3, Scope.SCHEDULER)
class AbortReq(msgspec.Struct, kw_only=True, omit_defaults=True):
    """End requests: by `keys` (their own worker no longer wants them: no answer), by exact `rid`, or all.

    Requests ended by rid or `all_requests` are answered with an abort finish to whichever worker owns them.
    """

    keys: list[int] = []
    rid: str | None = None
    all_requests: bool = False
    message: str = "aborted"


@message(4, Scope.SCHEDULER)
class FinishReq(msgspec.Struct, kw_only=True):
    """A detokenizer ended a request (stop string met, or a token id it cannot turn into text): free the slot.

    `output_tokens` is the length the answer was cut at; `finish` is what the worker was told.
    """

    key: int
    attempt: int
    output_tokens: int
    finish: FinishReason


@message(5, Scope.SCHEDULER)
class ResumeReq(msgspec.Struct, kw_only=True):
    """A detokenizer saw a gap in the offsets of these (key, attempt): replay them from the first token."""

    requests: list[tuple[int, int]]


@message(6, Scope.SCHEDULER)
class LiveRequestsReq(msgspec.Struct, kw_only=True):
    """Everything a worker life still waits for; the source of truth of recovery.

    `number` rises with every list of the life (an older list is ignored). The list speaks for requests with
    counter ≤ `up_to_counter`; those absent from it are forgotten. Columns are packed: keys u64, attempts u32,
    offsets u32 (tokens received so far).
    """

    life: int
    number: int
    up_to_counter: int
    keys: bytes
    attempts: bytes
    offsets: bytes


@message(7, Scope.SCHEDULER)
class ControlMarker(msgspec.Struct, kw_only=True):
    """A worker life has applied this version of the control state; everything it sent before was sent before."""

    life: int
    version: int
