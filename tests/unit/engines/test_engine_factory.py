"""Which engine is made, and what is refused before it loads anything."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

import pytest

from sglmt.engines.base import EngineRequest
from sglmt.engines.factory import default_threads, effective_context_length, make_engine
from sglmt.errors import ConfigError
from sglmt.messages.sampling import SamplingParams
from sglmt.server_args import ServerArgs


class Model(NamedTuple):
    """What the factory reads of a model."""

    model_path: str = "/no/such/model.gguf"
    context_length: int = 100
    vocab_size: int = 20
    eos_token_ids: tuple[int, ...] = (2,)
    special_token_ids: tuple[int, ...] = (0, 1, 2)
    is_embedding: bool = False


def test_the_simulator_gets_its_flags_and_needs_no_model_file(tmp_path: Path) -> None:
    args = ServerArgs(
        engine="simulator", context_length=500, simulator_step_ms=0.0, simulator_tokens="7,-1", simulator_seed=3
    )
    engine = make_engine(args, Model(), tmp_path)
    assert engine.info().is_simulator
    assert engine.info().context_length == 500  # longer than the model's: there is no model to be exceeded
    sampling = SamplingParams(max_new_tokens=2)
    engine.submit(EngineRequest(key=1, prompt_ids=[5], prefix_ids=[], sampling=sampling))
    ids = [token_id for _ in range(2) for output in engine.step().all_outputs() for token_id in output.token_ids]
    assert ids == [7, 2**32 - 1]


@pytest.mark.parametrize(("asked", "effective"), [(None, 100), (50, 50), (100, 100)])
def test_the_context_length_is_the_models_or_less(asked: int | None, effective: int) -> None:
    assert effective_context_length(ServerArgs(context_length=asked), Model()) == effective


def test_a_longer_context_than_the_models_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="--context-length 101: the model's is 100"):
        effective_context_length(ServerArgs(context_length=101), Model())


def test_a_missing_library_is_named_with_the_two_ways_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "openvino_genai" else find_spec(name))
    with pytest.raises(ConfigError) as refused:
        make_engine(ServerArgs(), Model(), tmp_path)
    assert "pip install 'sglmt[openvino]'" in str(refused.value)
    assert "--engine simulator" in str(refused.value)


def test_threads_leave_a_core_to_the_front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert default_threads() == 3
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert default_threads() == 1
