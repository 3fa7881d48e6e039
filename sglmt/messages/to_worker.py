"""Messages a tokenizer worker receives: rows from detokenizers, control replies through the router."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sglmt.messages.columns import (
    Batch,
    DictOfObjects,
    Objects,
    PerRow,
    Ragged,
    RaggedColumn,
    Shared,
    Sparse,
    batch,
)
from sglmt.messages.frame import Scope
from sglmt.messages.registry import message
from sglmt.messages.sampling import FinishReason, TokenLogprobs


@message(40, Scope.WORKER)
@batch
class BatchStrOutput(Batch, kw_only=True, omit_defaults=True):
    """Text of one step for one worker (multi mode) or for all (single mode).

    `offsets` and `text_offsets` say how many tokens and characters of the request came before this row, so a
    receiver drops what it already has and sees a gap, whatever was replayed.
    """

    keys: Annotated[bytes, PerRow("Q")]
    attempts: Annotated[bytes, PerRow("I")]
    offsets: Annotated[bytes, PerRow("I")]
    text_offsets: Annotated[bytes, PerRow("I")]
    output_ids: Annotated[RaggedColumn, Ragged("I")]
    texts: Annotated[list[str], Objects()]
    finish_reasons: Annotated[dict[int, FinishReason], Sparse()] = {}
    rids: Annotated[list[str | None] | None, Objects()] = None
    output_logprobs: Annotated[dict[int, TokenLogprobs], Sparse()] = {}
    input_logprobs: Annotated[dict[int, TokenLogprobs], Sparse()] = {}
    prompt_tokens: Annotated[dict[int, int], Sparse()] = {}
    cached_tokens: Annotated[dict[int, int], Sparse()] = {}
    cached_tokens_details: Annotated[dict[int, dict[str, int]], Sparse()] = {}
    reasoning_tokens: Annotated[bytes | None, PerRow("I")] = None
    hidden_states: Annotated[RaggedColumn | None, Ragged("f")] = None
    dp_ranks: Annotated[bytes | None, PerRow("I")] = None
    retraction_counts: Annotated[bytes | None, PerRow("I")] = None
    spec_verify_counts: Annotated[bytes | None, PerRow("I")] = None
    spec_accepted_tokens: Annotated[bytes | None, PerRow("I")] = None
    time_stats: Annotated[list[dict[str, float] | None] | None, Objects()] = None
    customized_info: Annotated[dict[str, list[object]] | None, DictOfObjects()] = None
    weight_version: Annotated[str | None, Shared()] = None


@message(41, Scope.WORKER)
class UnknownRequests(msgspec.Struct, kw_only=True):
    """The scheduler does not know these (key, attempt) a list named: submit them again."""

    requests: list[tuple[int, int]]
