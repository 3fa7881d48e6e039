"""Log-probabilities as `/generate` writes them: lists of [logprob, token id, text or null]. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglmt.http.formatting import finite
from sglmt.messages.sampling import TokenLogprobs

TokenText = Callable[[int], str] | None
Columns = dict[str, list[Any]]


def output_columns(ids: Sequence[int], logprobs: TokenLogprobs, token_text: TokenText) -> Columns:
    """Members of meta_info for these output tokens; only what was asked for is there."""
    return _columns("output", ids, logprobs, token_text)


def input_columns(ids: Sequence[int], logprobs: TokenLogprobs, token_text: TokenText) -> Columns:
    """Members of meta_info for the prompt's tokens, from the first one asked for."""
    return _columns("input", ids, logprobs, token_text)


def _columns(side: str, ids: Sequence[int], logprobs: TokenLogprobs, token_text: TokenText) -> Columns:
    columns: Columns = {
        f"{side}_token_logprobs": [
            _entry(token_id, logprob, token_text) for token_id, logprob in zip(ids, logprobs.chosen, strict=False)
        ]
    }
    if logprobs.top is not None:
        columns[f"{side}_top_logprobs"] = [_entries(each, token_text) for each in logprobs.top]
    if logprobs.requested is not None:
        columns[f"{side}_token_ids_logprobs"] = [_entries(each, token_text) for each in logprobs.requested]
    return columns


def _entries(each: list[tuple[int, float]], token_text: TokenText) -> list[list[Any]] | None:
    return [_entry(token_id, logprob, token_text) for token_id, logprob in each] or None


def _entry(token_id: int, logprob: float | None, token_text: TokenText) -> list[Any]:
    return [finite(logprob), token_id, None if token_text is None else token_text(token_id)]
