"""One served model with an engine that can do everything, and one whose engine can do little."""

from __future__ import annotations

import dataclasses

import pytest

from sglmt.http.limits import ModelLimits

FEATURES = [
    *("temperature", "top_p", "top_k", "min_p", "penalties", "seed", "stop_token_ids", "min_new_tokens"),
    *("logit_bias", "json_schema", "regex", "ebnf"),
    *("chosen_logprobs", "top_logprobs", "token_ids_logprobs", "prompt_logprobs"),
]


@pytest.fixture
def limits() -> ModelLimits:
    return ModelLimits(
        model_name="smol",
        aliases=("m",),
        context_length=4096,
        vocab_size=1000,
        max_prompts_per_request=16,
        eos_token_ids=(2,),
        capabilities=dict.fromkeys(FEATURES, "exact"),
        engine="able",
    )


@pytest.fixture
def poor_limits(limits: ModelLimits) -> ModelLimits:
    capabilities = {"temperature": "exact", "top_p": "approximate"}
    return dataclasses.replace(limits, capabilities=capabilities, engine="plain")
