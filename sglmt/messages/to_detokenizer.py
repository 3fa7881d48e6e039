"""Messages a detokenizer receives from the scheduler."""

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
from sglmt.messages.sampling import FinishReason, TextSpec, TokenLogprobs


@message(20, Scope.PEER)
@batch
class BatchTokenIDOutput(Batch, kw_only=True, omit_defaults=True):
    """What one engine step brought, all requests that moved.

    `offsets` counts a request's whole output before this row. A row at offset 0 starts (or restarts) the text
    of its request and has its entry in `text_specs`; with no ids and no finish it says "admitted".
    """

    keys: Annotated[bytes, PerRow("Q")]
    attempts: Annotated[bytes, PerRow("I")]
    offsets: Annotated[bytes, PerRow("I")]
    output_ids: Annotated[RaggedColumn, Ragged("I")]
    text_specs: Annotated[dict[int, TextSpec], Sparse()] = {}
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


@message(21, Scope.PEER)
@batch
class BatchEmbeddingOutput(Batch, kw_only=True, omit_defaults=True):
    """Embedding vectors, one row a request; passes the detokenizer unchanged, split by worker."""

    keys: Annotated[bytes, PerRow("Q")]
    attempts: Annotated[bytes, PerRow("I")]
    embeddings: Annotated[RaggedColumn, Ragged("f")]
    finish_reasons: Annotated[dict[int, FinishReason], Sparse()] = {}
    rids: Annotated[list[str | None] | None, Objects()] = None
    prompt_tokens: Annotated[bytes | None, PerRow("I")] = None
    cached_tokens: Annotated[bytes | None, PerRow("I")] = None
    dp_ranks: Annotated[bytes | None, PerRow("I")] = None
    time_stats: Annotated[list[dict[str, float] | None] | None, Objects()] = None
    customized_info: Annotated[dict[str, list[object]] | None, DictOfObjects()] = None
    weight_version: Annotated[str | None, Shared()] = None


@message(22, Scope.PEER)
class ForgetRequests(msgspec.Struct, kw_only=True):
    """These keys have ended without a row (their worker no longer wants them): drop their text state."""

    keys: list[int]
