"""The OpenVINO engine with the real default model: answers, ends, continuations, aborts, the conversion cache."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sglmt.engines.base import EngineOutput, EngineRequest
from sglmt.engines.factory import make_engine
from sglmt.errors import ConfigError, EngineError, EngineRefusal, ModelError
from sglmt.messages.sampling import LogprobSpec, SamplingParams
from sglmt.server_args import ServerArgs
from sglmt.tokenizer.default_model import default_model_path
from sglmt.tokenizer.loading import Tokenizer, load_tokenizer
from sglmt.tokenizer.model_info import ModelInfo
from sglmt.tokenizer.resolve import resolve_model

pytest.importorskip("openvino_genai")
from sglmt.engines.openvino import OpenVinoEngine

END = 2  # <|im_end|>
CAPITAL = "What is the capital of France?"
WITHIN_S = 60.0
KEYS = range(8)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine-cache")


@pytest.fixture(scope="module")
def model(cache_dir: Path) -> ModelInfo:
    return resolve_model(default_model_path(), None, None, cache_dir / "tokenizer")


@pytest.fixture(scope="module")
def tokenizer(model: ModelInfo) -> Tokenizer:
    return load_tokenizer(model)


def open_engine(model: ModelInfo, cache_dir: Path, **changes: Any) -> OpenVinoEngine:
    arguments: dict[str, Any] = {
        "model_path": model.model_path,
        "cache_dir": cache_dir,
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "eos_token_ids": model.eos_token_ids,
        "threads": 1,
        "cache_mb": 512,
        "max_running_requests": 64,
    }
    return OpenVinoEngine(**{**arguments, **changes})


@pytest.fixture(scope="module")
def shared(model: ModelInfo, cache_dir: Path) -> Iterator[OpenVinoEngine]:
    engine = open_engine(model, cache_dir)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared: OpenVinoEngine) -> Iterator[OpenVinoEngine]:
    """The shared engine; every test leaves it without work."""
    yield shared
    for key in KEYS:
        shared.abort(key)
    drain(shared)


def request(
    prompt: Sequence[int],
    key: int = 1,
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
        sampling=SamplingParams(**{"max_new_tokens": 40, "temperature": 0.0, **sampling}),
        logprobs=logprobs,
        embedding=embedding,
        lora_name=lora_name,
    )


def chat(tokenizer: Tokenizer, question: str) -> list[int]:
    """Prompt ids of one question in the default model's chat format."""
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    return tokenizer.encode(text, add_special_tokens=False)


def drain(engine: OpenVinoEngine) -> list[EngineOutput]:
    """Step until there is nothing to do; the outputs in their order."""
    outputs = []
    until_s = time.monotonic() + WITHIN_S
    while engine.has_work():
        assert time.monotonic() < until_s, "the engine did not run out of work"
        outputs.extend(engine.step().all_outputs())
    return outputs


def answers(engine: OpenVinoEngine, *requests: EngineRequest) -> dict[int, list[int]]:
    """The ids of each request, all run at once."""
    for one in requests:
        engine.submit(one)
    ids: dict[int, list[int]] = {one.key: [] for one in requests}
    for output in drain(engine):
        ids[output.key].extend(output.token_ids)
    return ids


def test_the_greedy_answer_is_right_and_ends_with_the_eos_id(engine: OpenVinoEngine, tokenizer: Tokenizer) -> None:
    engine.submit(request(chat(tokenizer, CAPITAL)))
    outputs = drain(engine)
    ids = [token_id for output in outputs for token_id in output.token_ids]
    assert "Paris" in tokenizer.decode(ids)
    assert ids[-1] == END
    assert (outputs[-1].finish_kind, outputs[-1].matched_id) == ("stop", END)
    assert all(output.finish_kind is None and len(output.token_ids) == 1 for output in outputs[:-1])


def test_length_ends_a_request_at_exactly_its_limit(engine: OpenVinoEngine, tokenizer: Tokenizer) -> None:
    engine.submit(request(chat(tokenizer, CAPITAL), max_new_tokens=3))
    outputs = drain(engine)
    assert sum(len(output.token_ids) for output in outputs) == 3
    assert (outputs[-1].finish_kind, outputs[-1].matched_id) == ("length", None)


def test_a_used_up_budget_ends_at_once(engine: OpenVinoEngine, tokenizer: Tokenizer) -> None:
    engine.submit(request(chat(tokenizer, CAPITAL), prefix=[504], max_new_tokens=1))
    (output,) = drain(engine)
    assert (output.token_ids, output.finish_kind) == ([], "length")


def test_ignored_eos_still_honours_stop_token_ids(engine: OpenVinoEngine, tokenizer: Tokenizer) -> None:
    prompt = chat(tokenizer, CAPITAL)
    ignoring = answers(engine, request(prompt, ignore_eos=True, max_new_tokens=20))[1]
    assert len(ignoring) == 20
    assert END in ignoring
    stop = ignoring[ignoring.index(END) + 1]
    engine.submit(request(prompt, ignore_eos=True, stop_token_ids=(stop,), max_new_tokens=20))
    outputs = drain(engine)
    assert [output.token_ids[0] for output in outputs] == ignoring[: ignoring.index(stop) + 1]
    assert (outputs[-1].finish_kind, outputs[-1].matched_id) == ("stop", stop)


def test_min_new_tokens_keeps_the_answer_going(engine: OpenVinoEngine, tokenizer: Tokenizer) -> None:
    prompt = chat(tokenizer, CAPITAL)
    whole = answers(engine, request(prompt))[1]
    longer = answers(engine, request(prompt, min_new_tokens=len(whole) + 4))[1]
    assert len(longer) >= len(whole) + 4
    assert longer[: len(whole) - 1] == whole[:-1]


def test_continuing_from_any_prefix_gives_the_same_answer(engine: OpenVinoEngine, tokenizer: Tokenizer) -> None:
    prompt = chat(tokenizer, "Write a short poem about the sea.")
    whole = answers(engine, request(prompt, max_new_tokens=24))[1]
    for cut in (1, 7, 16, len(whole) - 1):
        rest = answers(engine, request(prompt, prefix=whole[:cut], max_new_tokens=24))[1]
        assert whole[:cut] + rest == whole


def test_requests_together_get_the_answers_they_get_alone(engine: OpenVinoEngine, tokenizer: Tokenizer) -> None:
    questions = [CAPITAL, "Name three fruits.", "Why is the sky blue?", "What is two plus two?"]
    requests = [
        request(chat(tokenizer, question), key=key, max_new_tokens=24) for key, question in enumerate(questions)
    ]
    together = answers(engine, *requests)
    assert {one.key: answers(engine, one)[one.key] for one in requests} == together


def test_an_aborted_request_is_gone_at_once_and_the_others_go_on(engine: OpenVinoEngine, tokenizer: Tokenizer) -> None:
    prompt = chat(tokenizer, CAPITAL)
    engine.submit(request(prompt, key=1, ignore_eos=True, max_new_tokens=4000))
    engine.submit(request(prompt, key=2))
    engine.step()
    engine.abort(1)
    engine.abort(7)  # unknown
    outputs = drain(engine)
    assert {output.key for output in outputs} == {2}
    assert outputs[-1].finish_kind == "stop"
    engine.submit(request(prompt, key=1, max_new_tokens=1))
    assert drain(engine)[0].finish_kind == "length"


def test_a_request_the_library_drops_ends_with_an_error_and_keeps_its_ids(
    engine: OpenVinoEngine, tokenizer: Tokenizer
) -> None:
    prompt = chat(tokenizer, CAPITAL)
    engine.submit(request(prompt, key=1, ignore_eos=True, max_new_tokens=500))
    engine.submit(request(prompt, key=2))
    outputs = engine.step().all_outputs()
    engine._running[1].handle.cancel()  # as the library does by itself, behind the engine's back
    outputs += drain(engine)
    mine = [output for output in outputs if output.key == 1]
    assert [output.finish_kind for output in mine] == [None] * (len(mine) - 1) + ["error"]
    assert mine[0].token_ids
    assert "status" in str(mine[-1].error) or "--engine-cache-mb" in str(mine[-1].error)
    assert [output.finish_kind for output in outputs if output.key == 2][-1] == "stop"


def test_a_seed_repeats_and_requests_without_one_differ(engine: OpenVinoEngine, tokenizer: Tokenizer) -> None:
    prompt = chat(tokenizer, "Tell me a story.")

    def sampled(seed: int | None) -> tuple[int, ...]:
        return tuple(answers(engine, request(prompt, temperature=1.5, seed=seed, max_new_tokens=8))[1])

    assert sampled(3) == sampled(3)
    assert sampled(3) != sampled(4)
    assert len({sampled(None) for _ in range(4)}) > 1


def test_logprobs_of_the_chosen_ids_come_one_a_token(engine: OpenVinoEngine, tokenizer: Tokenizer) -> None:
    engine.submit(request(chat(tokenizer, CAPITAL), logprobs=LogprobSpec()))
    for output in drain(engine):
        assert output.logprobs is not None
        assert len(output.logprobs.chosen) == len(output.token_ids)
        assert all(value is not None and -3.0 < value < 0.0 for value in output.logprobs.chosen)


@pytest.mark.parametrize("prompt", [[49152], [5, -1], [], [5] * 9000])
def test_what_the_library_does_not_check_is_refused(engine: OpenVinoEngine, prompt: list[int]) -> None:
    with pytest.raises(EngineError, match="openvino"):
        engine.submit(request(prompt))
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("feature", "change"),
    [
        ("json_schema", {"json_schema": "{}"}),
        ("regex", {"regex": "a"}),
        ("ebnf", {"ebnf": "root ::= 'a'"}),
        ("logit_bias", {"logit_bias": {5: 1.0}}),
        ("lora", {"lora_name": "x"}),
        ("embeddings", {"embedding": True}),
        ("top_logprobs", {"logprobs": LogprobSpec(top_logprobs_num=1)}),
        ("token_ids_logprobs", {"logprobs": LogprobSpec(token_ids=(5,))}),
        ("prompt_logprobs", {"logprobs": LogprobSpec(prompt_from=0)}),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(engine: OpenVinoEngine, feature: str, change: dict[str, Any]) -> None:
    with pytest.raises(EngineRefusal, match=f"openvino does not support {feature}"):
        engine.check(request([5], **change))
    assert engine.info().capabilities[feature] == "refused"


def test_a_value_the_library_refuses_costs_that_request_only(engine: OpenVinoEngine, tokenizer: Tokenizer) -> None:
    with pytest.raises(EngineError, match="frequence_penalty"):
        engine.submit(request([5], frequency_penalty=9.0))
    assert answers(engine, request(chat(tokenizer, CAPITAL)))[1][-1] == END


def test_a_small_cache_shortens_the_context_and_still_serves_more_than_fits(
    model: ModelInfo, cache_dir: Path, tokenizer: Tokenizer
) -> None:
    small = open_engine(model, cache_dir, cache_mb=8)
    try:
        capacity = small.info().context_length
        assert capacity == small.info().max_total_tokens
        assert 100 < capacity < 250
        with pytest.raises(EngineError, match=f"1 to {capacity} are possible"):
            small.submit(request([5] * (capacity + 1)))
        prompt = chat(tokenizer, CAPITAL)
        filling = [request(prompt, key=key, ignore_eos=True, max_new_tokens=10_000) for key in range(2)]
        assert {len(prompt) + len(ids) for ids in answers(small, *filling).values()} == {capacity}
    finally:
        small.close()


def test_the_conversion_is_kept_found_again_and_made_again_when_damaged(
    model: ModelInfo, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    prompt = chat(tokenizer, CAPITAL)

    def first_words() -> list[int]:
        opened = open_engine(model, tmp_path, cache_mb=64)
        try:
            return answers(opened, request(prompt, max_new_tokens=6))[1]
        finally:
            opened.close()

    words = first_words()
    (directory,) = tmp_path.iterdir()
    weights = directory / "openvino_model.bin"
    made_at_ns = weights.stat().st_mtime_ns
    assert not list(directory.glob("*.gguf"))
    assert not list(Path(model.model_path).parent.glob("openvino_model.*"))
    assert first_words() == words
    assert weights.stat().st_mtime_ns == made_at_ns
    (directory / "openvino_model.xml").write_text("<net")
    assert first_words() == words
    assert weights.stat().st_mtime_ns > made_at_ns
    assert [path.name for path in tmp_path.iterdir()] == [directory.name]


def test_flush_drops_the_prefix_cache_only_without_work(engine: OpenVinoEngine, tokenizer: Tokenizer) -> None:
    prompt = chat(tokenizer, CAPITAL)
    engine.submit(request(prompt))
    assert not engine.flush_cache()
    drain(engine)
    assert engine.flush_cache()
    assert answers(engine, request(prompt))[1][-1] == END


def test_models_it_cannot_read_are_refused_by_name(model: ModelInfo, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"")
    for path, said in (
        (broken, "cannot read .*broken.gguf"),
        (other, "reads GGUF files"),
        (tmp_path, "optimum-cli export openvino"),
        (tmp_path / "absent.gguf", "no such file"),
    ):
        with pytest.raises(ModelError, match=said):
            open_engine(model, tmp_path / "cache", model_path=str(path))
    assert not list((tmp_path / "cache").iterdir())


def test_the_factory_refuses_a_context_longer_than_the_models(model: ModelInfo, cache_dir: Path) -> None:
    with pytest.raises(ConfigError, match=f"9000: the model's is {model.context_length}"):
        make_engine(ServerArgs(context_length=9000), model, cache_dir)
