"""The simulator engine: same ids whatever happens around a request, honest ends, one shared ticker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglmt.engines.base import NOTHING, EngineOutput, EngineRequest
from sglmt.engines.simulator import SimulatorEngine
from sglmt.errors import EngineError, EngineRefusal
from sglmt.messages.sampling import LogprobSpec, SamplingParams

VOCAB = 50
EOS = 2
SPECIAL = (0, 1, 2, 7)


class FakeClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def engine(**changes: Any) -> SimulatorEngine:
    arguments: dict[str, Any] = {
        "vocab_size": VOCAB,
        "context_length": 256,
        "eos_token_ids": [EOS],
        "special_token_ids": SPECIAL,
        "step_s": 0.0,
        "seed": 5,
        "script": None,
    }
    return SimulatorEngine(**{**arguments, **changes})


def request(
    key: int = 1,
    prompt: Sequence[int] = (10, 11, 12),
    prefix: Sequence[int] = (),
    logprobs: LogprobSpec | None = None,
    embedding: bool = False,
    lora_name: str | None = None,
    **sampling: Any,
) -> EngineRequest:
    return EngineRequest(
        key=key,
        prompt_ids=list(prompt),
        prefix_ids=list(prefix),
        sampling=SamplingParams(**{"max_new_tokens": 20, **sampling}),
        logprobs=logprobs,
        embedding=embedding,
        lora_name=lora_name,
    )


def run(target: SimulatorEngine, *requests: EngineRequest) -> dict[int, list[EngineOutput]]:
    """Submit all, step to the end; outputs by key."""
    for one in requests:
        target.submit(one)
    outputs: dict[int, list[EngineOutput]] = {one.key: [] for one in requests}
    while target.has_work():
        for output in target.step().all_outputs():
            outputs[output.key].append(output)
    return outputs


def ids_of(outputs: list[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def test_ids_follow_from_seed_and_prompt_and_are_never_special() -> None:
    first = ids_of(run(engine(), request())[1])
    assert first == ids_of(run(engine(), request(key=99))[99])
    assert len(first) == 20
    assert len(set(first)) > 5
    assert not set(first) & set(SPECIAL)
    assert all(0 <= token_id < VOCAB for token_id in first)
    assert first != ids_of(run(engine(seed=6), request())[1])
    assert first != ids_of(run(engine(), request(prompt=(10, 11, 13)))[1])
    assert first != ids_of(run(engine(), request(seed=0))[1])


def test_all_permitted_ids_occur_about_equally_often() -> None:
    ids = ids_of(run(engine(context_length=20_000), request(max_new_tokens=10_000))[1])
    counts = [ids.count(token_id) for token_id in range(VOCAB) if token_id not in SPECIAL]
    mean = 10_000 / len(counts)
    assert all(0.6 * mean < count < 1.4 * mean for count in counts)


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=20),
    seed=st.none() | st.integers(-(2**70), 2**70),
    cuts=st.lists(st.integers(0, 24), min_size=1, max_size=4),
    script=st.none() | st.lists(st.integers(3, 6), min_size=1, max_size=5),
)
def test_continuing_anywhere_gives_the_ids_of_the_undisturbed_run(
    prompt: list[int], seed: int | None, cuts: list[int], script: list[int] | None
) -> None:
    whole = ids_of(run(engine(script=script), request(prompt=prompt, seed=seed, max_new_tokens=24))[1])
    assert len(whole) == 24
    for cut in cuts:
        again = request(prompt=prompt, prefix=whole[:cut], seed=seed, max_new_tokens=24)
        outputs = run(engine(script=script), again)[1]
        assert whole[:cut] + ids_of(outputs) == whole
        assert outputs[-1].finish_kind == "length"


@given(st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=5), min_size=2, max_size=6))
def test_the_batch_does_not_matter(prompts: list[list[int]]) -> None:
    requests = [request(key=key, prompt=prompt) for key, prompt in enumerate(prompts)]
    together = run(engine(), *requests)
    for one in requests:
        assert ids_of(together[one.key]) == ids_of(run(engine(), one)[one.key])


def test_a_request_ends_with_length_on_the_id_that_reaches_the_limit() -> None:
    outputs = run(engine(), request(max_new_tokens=3))[1]
    assert [output.finish_kind for output in outputs] == [None, None, "length"]
    assert [len(output.token_ids) for output in outputs] == [1, 1, 1]


@pytest.mark.parametrize("prefix", [(), (5, 6)])
def test_a_used_up_budget_ends_at_once_without_ids(prefix: tuple[int, ...]) -> None:
    clock = FakeClock()
    target = engine(step_s=1.0, clock=clock)
    target.submit(request(prefix=prefix, max_new_tokens=len(prefix)))
    assert target.next_step_at_s() is None
    (output,) = target.step().all_outputs()
    assert (output.token_ids, output.finish_kind) == ([], "length")
    assert not target.has_work()


def test_the_context_length_bounds_the_output_and_refuses_longer_prompts() -> None:
    target = engine(context_length=8)
    assert len(ids_of(run(target, request(prompt=range(10, 15), max_new_tokens=100))[1])) == 3
    with pytest.raises(EngineError, match="9 tokens is longer than the context of 8"):
        target.submit(request(prompt=range(9)))
    assert not target.has_work()


def test_a_stop_token_id_ends_a_request_but_not_before_min_new_tokens() -> None:
    whole = ids_of(run(engine(), request())[1])
    stop = whole[4]
    first, last = whole.index(stop), 4
    outputs = run(engine(), request(stop_token_ids=(stop,)))[1]
    assert ids_of(outputs) == whole[: first + 1]
    assert (outputs[-1].finish_kind, outputs[-1].matched_id) == ("stop", stop)
    later = run(engine(), request(stop_token_ids=(stop,), min_new_tokens=last + 2))[1]
    assert len(ids_of(later)) > last + 1
    assert ids_of(later) == whole[: len(ids_of(later))]


def test_a_script_repeats_and_its_eos_ends_unless_ignored() -> None:
    assert ids_of(run(engine(script=[8, 9]), request(max_new_tokens=5))[1]) == [8, 9, 8, 9, 8]
    outputs = run(engine(script=[8, EOS, 9]), request(max_new_tokens=5))[1]
    assert ids_of(outputs) == [8, EOS]
    assert (outputs[-1].finish_kind, outputs[-1].matched_id) == ("stop", EOS)
    ignored = run(engine(script=[8, EOS, 9]), request(max_new_tokens=5, ignore_eos=True))[1]
    assert ids_of(ignored) == [8, EOS, 9, 8, EOS]
    assert ignored[-1].finish_kind == "length"


def test_a_script_may_hold_ids_no_vocabulary_has() -> None:
    script = [VOCAB + 1, -1, 2**40]
    assert ids_of(run(engine(script=script), request(max_new_tokens=3))[1]) == [VOCAB + 1, 2**32 - 1, 2**32 - 1]


def test_nothing_moves_before_the_tick_and_everything_moves_at_it() -> None:
    clock = FakeClock()
    target = engine(step_s=0.5, clock=clock)
    target.submit(request(key=1))
    clock.now_s += 0.2
    target.submit(request(key=2))
    assert target.next_step_at_s() == 1000.5
    assert target.step() == NOTHING
    clock.now_s = 1000.5
    assert [output.key for output in target.step().all_outputs()] == [1, 2]
    assert target.next_step_at_s() == 1001.0
    assert target.step() == NOTHING


def test_a_late_loop_gets_one_id_and_keeps_the_grid() -> None:
    clock = FakeClock()
    target = engine(step_s=1.0, clock=clock)
    target.submit(request())
    clock.now_s = 1001.9  # due at 1001: late, by less than a step
    assert len(target.step().all_outputs()) == 1
    assert target.next_step_at_s() == 1002.0
    clock.now_s = 1007.25  # late by more than five steps
    (output,) = target.step().all_outputs()
    assert len(output.token_ids) == 1
    assert target.next_step_at_s() == 1008.25
    assert target.step() == NOTHING


def test_the_ticker_starts_anew_after_a_pause_without_work() -> None:
    clock = FakeClock()
    target = engine(step_s=1.0, clock=clock)
    target.submit(request(max_new_tokens=1))
    clock.now_s += 1.0
    assert target.step().outputs[0].finish_kind == "length"
    assert not target.has_work()
    assert target.next_step_at_s() is None
    clock.now_s += 100.0
    target.submit(request(max_new_tokens=1))
    assert target.next_step_at_s() == clock.now_s + 1.0


def test_abort_frees_a_request_and_ignores_unknown_keys() -> None:
    target = engine()
    target.submit(request(key=1))
    target.submit(request(key=2))
    target.abort(1)
    target.abort(77)
    assert [output.key for output in target.step().all_outputs()] == [2]
    assert not target.flush_cache()
    target.close()
    assert not target.has_work()
    assert target.flush_cache()


def test_a_key_cannot_run_twice_at_a_time_but_again_later() -> None:
    target = engine()
    target.submit(request(max_new_tokens=1))
    with pytest.raises(EngineError, match="already running"):
        target.submit(request())
    target.step()
    target.submit(request())
    assert target.has_work()


def test_logprobs_have_an_entry_a_token_in_every_list_asked_for() -> None:
    spec = LogprobSpec(top_logprobs_num=3, token_ids=(4, 5))
    outputs = run(engine(), request(logprobs=spec, max_new_tokens=4))[1]
    for output in outputs:
        told = output.logprobs
        assert told is not None
        assert told.top is not None
        assert told.requested is not None
        assert len(told.chosen) == len(told.top) == len(told.requested) == 1
        assert len(told.top[0]) == 3
        assert told.top[0][0] == (output.token_ids[0], told.chosen[0])
        assert [token_id for token_id, _ in told.requested[0]] == [4, 5]
        assert output.input_logprobs is None
    plain = run(engine(), request(logprobs=LogprobSpec(), max_new_tokens=1))[1][0].logprobs
    assert plain is not None
    assert (plain.top, plain.requested) == (None, None)
    assert run(engine(), request(max_new_tokens=1))[1][0].logprobs is None


def test_logprobs_of_a_continuation_are_those_of_the_undisturbed_run() -> None:
    spec = LogprobSpec(top_logprobs_num=2)
    whole = run(engine(), request(logprobs=spec, max_new_tokens=6))[1]
    rest = run(engine(), request(prefix=ids_of(whole)[:2], logprobs=spec, max_new_tokens=6))[1]
    assert [output.logprobs for output in rest] == [output.logprobs for output in whole[2:]]


@pytest.mark.parametrize("max_new_tokens", [0, 2])
def test_prompt_logprobs_come_once_with_the_first_output(max_new_tokens: int) -> None:
    spec = LogprobSpec(top_logprobs_num=2, prompt_from=0)
    outputs = run(engine(), request(prompt=(10, 11, 12), logprobs=spec, max_new_tokens=max_new_tokens))[1]
    told = outputs[0].input_logprobs
    assert told is not None
    assert told.top is not None
    assert told.chosen[0] is None
    assert all(isinstance(value, float) for value in told.chosen[1:])
    assert [len(entry) for entry in told.top] == [0, 2, 2]
    assert told.top[1][0][0] == 11
    assert all(output.input_logprobs is None for output in outputs[1:])


def test_prompt_logprobs_begin_where_asked_and_agree_with_the_whole() -> None:
    def told(first: int) -> list[float | None]:
        spec = LogprobSpec(prompt_from=first)
        logprobs = run(engine(), request(logprobs=spec))[1][0].input_logprobs
        assert logprobs is not None
        return logprobs.chosen

    assert told(2) == told(0)[2:]


def test_an_embedding_is_answered_by_the_next_step() -> None:
    clock = FakeClock()
    target = engine(step_s=1.0, clock=clock)
    target.submit(request(embedding=True, max_new_tokens=0))
    (output,) = target.step().all_outputs()
    assert output.embedding is not None
    assert (len(output.embedding), output.finish_kind, output.token_ids) == (64, "stop", [])
    assert not target.has_work()


@pytest.mark.parametrize(
    ("feature", "change"),
    [
        ("json_schema", {"json_schema": "{}"}),
        ("regex", {"regex": "a"}),
        ("ebnf", {"ebnf": "root ::= 'a'"}),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(feature: str, change: dict[str, Any]) -> None:
    target = engine()
    with pytest.raises(EngineRefusal, match=f"simulator does not support {feature}"):
        target.check(request(**change))
    with pytest.raises(EngineRefusal):
        target.submit(request(**change))
    assert target.info().capabilities[feature] == "refused"
    assert not target.has_work()


def test_a_vocabulary_without_ordinary_ids_and_an_empty_script_are_refused() -> None:
    with pytest.raises(EngineError, match="all 3 ids"):
        engine(vocab_size=3, special_token_ids=(0, 1, 2))
    with pytest.raises(EngineError, match="script"):
        engine(script=[])


def test_the_engine_says_that_it_is_a_simulator() -> None:
    info = engine(max_total_tokens=9).info()
    assert info.is_simulator
    assert (info.name, info.context_length, info.max_total_tokens) == ("simulator", 256, 9)
