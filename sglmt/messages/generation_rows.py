"""The columns that output rows have on their whole way: scheduler → detokenizer → worker. Pure data.

`BatchTokenIDOutput` and `BatchStrOutput` add what only they have. A column declared here reaches the worker without
another line anywhere: the detokenizer passes on every column of this class that it does not make itself.
"""

from __future__ import annotations

from typing import Annotated

from sglmt.messages.columns import Batch, DictOfObjects, Objects, PerRow, Ragged, RaggedColumn, Shared, Sparse
from sglmt.messages.sampling import FinishReason, TokenLogprobs


class GenerationRows(Batch, kw_only=True, omit_defaults=True):
    """One row a request that moved. `offsets` counts its whole output (tokens) before this row."""

    keys: Annotated[bytes, PerRow("Q")]
    attempts: Annotated[bytes, PerRow("I")]
    offsets: Annotated[bytes, PerRow("I")]
    output_ids: Annotated[RaggedColumn, Ragged("I")]
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
