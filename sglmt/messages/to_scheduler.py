"""Messages the scheduler receives: from workers (through the router in multi mode) and from detokenizers."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sglmt.messages.frame import Scope
from sglmt.messages.registry import message
from sglmt.messages.sampling import FinishReason, LogprobSpec, SamplingParams, TextSpec

# What becomes part of a packed column is checked where it comes in, not where it is packed.
U64 = Annotated[int, msgspec.Meta(ge=0)]  # msgpack has no larger integers
U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


@message(1, Scope.SCHEDULER)
class TokenizedGenerateReqInput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One submission (one attempt) of one request.

    `input_ids` and `prefix_ids` are packed u32: the prompt, and the output the worker already has from earlier
    attempts. `sampling.max_new_tokens` counts the whole output, prefix included. `deadline_s` is CLOCK_MONOTONIC.
    """

    key: U64
    attempt: U32
    rid: str
    group: U64  # key of the first of the requests that share this rid (`n` > 1)
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

    key: U64
    attempt: U32
    rid: str
    group: U64
    input_ids: bytes
    priority: int = 0
    deadline_s: float | None = None
    resubmits: int = 0


@message(3, Scope.SCHEDULER)
class AbortReq(msgspec.Struct, kw_only=True, omit_defaults=True):
    """End requests: by `keys` (their own worker no longer wants them: no answer), by exact `rid`, or all.

    Requests ended by rid or `all_requests` are answered with an abort finish to whichever worker owns them. Such an
    abort has a `number` of the worker `life` that asks: it is answered with `AbortsDone`, repeated until then, and
    carried out once. No abort of that life up to `settled` is open. 0: no number, no answer.
    """

    keys: list[int] = []
    rid: str | None = None
    all_requests: bool = False
    message: str = "aborted"
    life: U32 = 0
    number: U32 = 0
    settled: U32 = 0


@message(4, Scope.SCHEDULER)
class FinishReq(msgspec.Struct, kw_only=True):
    """A detokenizer ended a request (stop string met, or a token id it cannot turn into text): free the slot.

    `output_tokens` is the length the answer was cut at; `finish` is what the worker was told.
    """

    key: U64
    attempt: U32
    output_tokens: U32
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

    life: U32
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


@message(8, Scope.SCHEDULER)
class HeldTextsReq(msgspec.Struct, kw_only=True):
    """All keys (packed u64) a detokenizer holds text state of, every few seconds.

    Answered with `ForgetRequests` for those the scheduler does not know: whatever was lost, no state stays for ever.
    """

    keys: bytes
