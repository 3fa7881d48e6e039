"""Sampling parameters in OpenVINO GenAI's words. Pure but for a random seed where the request has none.

The library's `ignore_eos` makes it ignore every stop token id, so ends are always given as one explicit set.
"""

from __future__ import annotations

import secrets
from typing import Any

from sglmt.engines.base import EngineRequest
from sglmt.engines.token_source import scramble

_GREEDY_BELOW = 1e-5  # dividing logits by less overflows 32-bit floats
_SEED_MASK = 2**32 - 1


def generation_config(
    genai: Any, request: EngineRequest, limit: int, eos_token_ids: tuple[int, ...]
) -> tuple[Any, frozenset[int]]:
    """(GenerationConfig, ids that end the request). `limit` counts the whole output, prefix included."""
    sampling = request.sampling
    done = len(request.prefix_ids)
    config = genai.GenerationConfig()
    config.apply_chat_template = False
    config.max_new_tokens = limit - done
    config.min_new_tokens = min(max(0, sampling.min_new_tokens - done), limit - done)
    ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos_token_ids))
    # The library insists on an EOS id that is one of the stop ids, even where it is to be ignored.
    config.set_eos_token_id(min(ends) if ends else 0)
    if ends:
        config.stop_token_ids = set(ends)
    else:
        config.ignore_eos = True
    config.repetition_penalty = sampling.repetition_penalty
    config.presence_penalty = sampling.presence_penalty
    config.frequency_penalty = sampling.frequency_penalty
    if request.logprobs is not None:
        config.logprobs = 1
    config.do_sample = sampling.temperature >= _GREEDY_BELOW
    if config.do_sample:
        config.temperature = sampling.temperature
        config.top_p = sampling.top_p
        config.min_p = sampling.min_p
        if sampling.top_k > 0:
            config.top_k = sampling.top_k
        config.rng_seed = _seed(sampling.seed, done)
    return config, ends


def _seed(seed: int | None, done: int) -> int:
    """The library's generator starts at this; its own default would give unseeded requests all the same luck.

    A continuation must not draw the numbers of the beginning again, hence another seed for each position.
    """
    if seed is None:
        return secrets.randbits(32)
    return (seed if done == 0 else scramble((seed + done) & (2**64 - 1))) & _SEED_MASK
