"""What continuing a request is, by the features it uses and what the engine declares of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglmt.engines import openvino
from sglmt.engines.base import Capability, EngineRequest
from sglmt.engines.continuing import judge_continuation, used_features
from sglmt.messages.sampling import LogprobSpec, SamplingParams

FEATURES = ("greedy", "sampled", "seed", "penalties", "grammar", "logprobs")
ALL_EXACT = {f"continue.{feature}": Capability.EXACT for feature in FEATURES}
BEST_FIRST = [Capability.EXACT, Capability.APPROXIMATE, Capability.REFUSED]


def request(prefix: int = 3, logprobs: LogprobSpec | None = None, **sampling: Any) -> EngineRequest:
    values = {"max_new_tokens": 10, "temperature": 0.0, **sampling}
    return EngineRequest(
        key=1, prompt_ids=[1], prefix_ids=[5] * prefix, sampling=SamplingParams(**values), logprobs=logprobs
    )


@pytest.mark.parametrize(
    ("made", "used"),
    [
        (request(), ["greedy"]),
        (request(seed=3), ["greedy"]),  # nothing is drawn
        (request(temperature=1.0, top_k=1, seed=3), ["greedy"]),
        (request(temperature=0.7), ["sampled"]),
        (request(temperature=0.7, seed=0), ["sampled", "seed"]),
        (request(frequency_penalty=0.1), ["greedy", "penalties"]),
        (request(presence_penalty=-0.1), ["greedy", "penalties"]),
        (request(repetition_penalty=1.1), ["greedy", "penalties"]),
        (request(json_schema="{}"), ["greedy", "grammar"]),
        (request(regex=""), ["greedy", "grammar"]),
        (request(ebnf="x"), ["greedy", "grammar"]),
        (request(logprobs=LogprobSpec()), ["greedy", "logprobs"]),
        (request(logit_bias={1: 2.0}, min_new_tokens=2, stop_token_ids=(4,)), ["greedy"]),
    ],
)
def test_which_features_a_request_uses(made: EngineRequest, used: list[str]) -> None:
    assert used_features(made) == used
    for feature in FEATURES:
        how = judge_continuation(made, ALL_EXACT | {f"continue.{feature}": Capability.REFUSED}).how
        assert how == (Capability.REFUSED if feature in used else Capability.EXACT)


def test_the_features_that_make_it_so_are_named() -> None:
    made = request(temperature=1.0, seed=1, json_schema="{}", logprobs=LogprobSpec())
    declared = ALL_EXACT | {"continue.seed": Capability.APPROXIMATE, "continue.logprobs": Capability.APPROXIMATE}
    assert judge_continuation(made, declared) == (Capability.APPROXIMATE, ("seed", "logprobs"))
    assert judge_continuation(made, declared | {"continue.grammar": Capability.REFUSED}) == (
        Capability.REFUSED,
        ("grammar",),
    )


@pytest.mark.parametrize("prefix", [0, 10])
def test_where_nothing_is_continued_nothing_is_judged(prefix: int) -> None:
    assert judge_continuation(request(prefix=prefix), {}).how == Capability.EXACT
    assert judge_continuation(request(prefix=5), {}).how == Capability.REFUSED


@pytest.mark.parametrize("word", ["", "maybe", None])
def test_what_is_not_declared_is_refused(word: str | None) -> None:
    declared = {} if word is None else {"continue.greedy": word}
    assert judge_continuation(request(), declared) == (Capability.REFUSED, ("greedy",))


def test_the_real_engine_says_that_a_greedy_answer_may_differ() -> None:
    assert judge_continuation(request(), openvino.CAPABILITIES).how == Capability.APPROXIMATE
    assert judge_continuation(request(temperature=1.0), openvino.CAPABILITIES).how == Capability.EXACT


@given(
    st.fixed_dictionaries({f"continue.{feature}": st.sampled_from(BEST_FIRST) for feature in FEATURES}),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_the_worst_of_what_is_used_counts(
    declared: dict[str, str], drawn: bool, seeded: bool, penalized: bool, with_logprobs: bool
) -> None:
    made = request(
        temperature=float(drawn),
        seed=1 if seeded else None,
        presence_penalty=float(penalized),
        logprobs=LogprobSpec() if with_logprobs else None,
    )
    how, features = judge_continuation(made, declared)
    words = {feature: declared[f"continue.{feature}"] for feature in used_features(made)}
    assert how == max(words.values(), key=BEST_FIRST.index)
    assert set(features) == {feature for feature, word in words.items() if word == how}
