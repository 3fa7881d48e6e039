"""Whether an engine can go on with a request that already has output, by what the request uses. Pure.

Runs in the scheduler. A request continues when an earlier life of the engine, or the time before a pause, has given
part of its output. What that means for each feature the engine itself declares as `continue.<feature>`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sglmt.engines.base import Capability, EngineRequest


class Continuation(NamedTuple):
    """How a request continues (exact, approximate, refused), and the features that make it so."""

    how: str
    features: tuple[str, ...]


def judge_continuation(request: EngineRequest, capabilities: Mapping[str, str]) -> Continuation:
    """The worst that the engine declares of the features this request uses. One it does not declare is refused.

    Where no output is there yet, or no more may come, nothing is continued, and that is exact.
    """
    if not 0 < len(request.prefix_ids) < request.sampling.max_new_tokens:
        return Continuation(Capability.EXACT, ())
    by_word: dict[str, list[str]] = {}
    for feature in used_features(request):
        word = capabilities.get(f"continue.{feature}", Capability.REFUSED)
        by_word.setdefault(word if word in _BEST_FIRST else Capability.REFUSED, []).append(feature)
    worst = max(by_word, key=_BEST_FIRST.index)
    return Continuation(worst, tuple(by_word[worst]))


def used_features(request: EngineRequest) -> list[str]:
    """The features of `continue.<feature>` that this request uses; at least one. A seed decides only what is drawn."""
    sampling = request.sampling
    drawn = sampling.temperature > 0.0 and sampling.top_k != 1
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty - 1.0)
    grammars = (sampling.json_schema, sampling.regex, sampling.ebnf)
    used = {
        "greedy": not drawn,
        "sampled": drawn,
        "seed": drawn and sampling.seed is not None,
        "penalties": any(penalties),
        "grammar": any(grammar is not None for grammar in grammars),
        "logprobs": request.logprobs is not None,
    }
    return [feature for feature, is_used in used.items() if is_used]


_BEST_FIRST = (Capability.EXACT, Capability.APPROXIMATE, Capability.REFUSED)
