"""Sampling parameters as OpenVINO GenAI gets them; every result passes the library's own validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sglmt.engines.base import EngineRequest
from sglmt.engines.openvino_sampling import generation_config
from sglmt.messages.sampling import LogprobSpec, SamplingParams

genai = pytest.importorskip("openvino_genai")
EOS = (2, 0)


def translated(prefix: Sequence[int] = (), logprobs: LogprobSpec | None = None, **sampling: Any) -> Any:
    params = SamplingParams(**{"max_new_tokens": 10, **sampling})
    request = EngineRequest(key=1, prompt_ids=[5], prefix_ids=list(prefix), sampling=params, logprobs=logprobs)
    config, ends = generation_config(genai, request, params.max_new_tokens, EOS)
    config.validate()
    return config, ends


def test_temperature_zero_is_greedy_and_any_other_samples() -> None:
    assert not translated(temperature=0.0)[0].do_sample
    config, _ = translated(temperature=0.7, top_p=0.9, top_k=4, min_p=0.1)
    assert config.do_sample
    assert config.top_k == 4
    assert (config.temperature, config.top_p, config.min_p) == pytest.approx((0.7, 0.9, 0.1))


def test_top_k_off_is_the_librarys_default() -> None:
    assert translated(top_k=-1)[0].top_k == genai.GenerationConfig().top_k


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, {0, 2}),
        ({"stop_token_ids": (9,)}, {0, 2, 9}),
        ({"ignore_eos": True, "stop_token_ids": (9,)}, {9}),
        ({"ignore_eos": True}, set()),
    ],
)
def test_one_explicit_set_of_ends(sampling: dict[str, Any], expected: set[int]) -> None:
    config, ends = translated(**sampling)
    assert ends == expected
    assert config.ignore_eos == (not expected)  # the library's flag would ignore stop token ids as well
    if expected:
        assert config.stop_token_ids == expected


def test_budgets_count_the_prefix() -> None:
    config, _ = translated(prefix=[1, 2, 3], max_new_tokens=10, min_new_tokens=5)
    assert (config.max_new_tokens, config.min_new_tokens) == (7, 2)
    assert translated(prefix=[1, 2, 3], min_new_tokens=2)[0].min_new_tokens == 0


def test_penalties_and_logprobs_are_passed_on() -> None:
    config, _ = translated(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5, logprobs=LogprobSpec())
    assert (config.repetition_penalty, config.presence_penalty, config.frequency_penalty) == pytest.approx(
        (1.2, 0.5, -0.5)
    )
    assert config.logprobs == 1
    assert translated()[0].logprobs == 0


def test_seeds_repeat_and_differ_by_position_and_without_one_by_request() -> None:
    assert translated(seed=7)[0].rng_seed == 7
    assert translated(seed=-1)[0].rng_seed == 2**32 - 1
    continued = translated(seed=7, prefix=[1])[0].rng_seed
    assert continued == translated(seed=7, prefix=[4])[0].rng_seed
    assert continued != translated(seed=7, prefix=[1, 1])[0].rng_seed != 7
    assert len({translated()[0].rng_seed for _ in range(5)}) > 1
