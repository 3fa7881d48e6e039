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
from sglmt.messages.generation_rows import GenerationRows
from sglmt.messages.registry import message
from sglmt.messages.sampling import FinishReason, TextSpec


@message(20, Scope.PEER)
@batch
class BatchTokenIDOutput(GenerationRows, kw_only=True, omit_defaults=True):
    """What one engine step brought, all requests that moved.

    A row at offset 0 starts (or restarts) the text of its request and has its entry in `text_specs`; with no ids
    and no finish it says "admitted".
    """

    text_specs: Annotated[dict[int, TextSpec], Sparse()] = {}


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
