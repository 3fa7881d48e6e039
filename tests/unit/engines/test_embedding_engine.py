"""The embedding engine without a model: which rows run together, what fails alone, how tokens become one vector."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglmt.engines.base import NOTHING, EngineOutput, EngineRequest
from sglmt.engines.factory import make_engine
from sglmt.errors import EngineError, EngineRefusal, ModelError
from sglmt.messages.sampling import SamplingParams
from sglmt.server_args import ServerArgs

pytest.importorskip("openvino")
import numpy as np

from sglmt.engines.bert_graph import read_config
from sglmt.engines.openvino_embedding import (
    MAX_BATCH_ROWS,
    MAX_BATCH_TOKENS,
    OpenVinoEmbeddingEngine,
    choose_batch,
)
from sglmt.engines.sentence_pooling import Pooling, pool, read_pooling

POISON = 13


class Doubler:
    """A model whose vector is (number of ids, their sum); fails on rows with the poison id."""

    dimensions = 2

    def __init__(self) -> None:
        self.batches: list[int] = []

    def embed(self, rows: Sequence[Sequence[int]]) -> Any:
        self.batches.append(len(rows))
        if any(POISON in row for row in rows):
            raise RuntimeError("Check 'x' failed\nthe poison id")
        return np.array([[len(row), sum(row) if 14 not in row else np.nan] for row in rows], dtype=np.float32)


@pytest.fixture
def model() -> Doubler:
    return Doubler()


@pytest.fixture
def engine(model: Doubler) -> OpenVinoEmbeddingEngine:
    return OpenVinoEmbeddingEngine(model, model_name="tiny", vocab_size=100, context_length=MAX_BATCH_TOKENS)


def request(key: int, ids: list[int], embedding: bool = True) -> EngineRequest:
    sampling = SamplingParams(max_new_tokens=0)
    return EngineRequest(key=key, prompt_ids=ids, prefix_ids=[], sampling=sampling, embedding=embedding)


def drain(engine: OpenVinoEmbeddingEngine) -> dict[int, EngineOutput]:
    outputs: dict[int, EngineOutput] = {}
    while engine.has_work():
        for output in engine.step().outputs:
            assert output.key not in outputs
            outputs[output.key] = output
    return outputs


def test_every_request_gets_its_own_vector_in_few_steps(engine: OpenVinoEmbeddingEngine, model: Doubler) -> None:
    for key in range(40):
        engine.submit(request(key, [1] * (key + 1)))
    outputs = drain(engine)
    assert {key: output.embedding for key, output in outputs.items()} == {
        key: [key + 1.0, key + 1.0] for key in range(40)
    }
    assert {output.finish_kind for output in outputs.values()} == {"stop"}
    assert len(model.batches) < 5


def test_what_fails_costs_itself_only(engine: OpenVinoEmbeddingEngine) -> None:
    for key, ids in enumerate([[1], [POISON], [2], [14]]):
        engine.submit(request(key, ids))
    outputs = drain(engine)
    assert [outputs[key].finish_kind for key in range(4)] == ["stop", "error", "stop", "error"]
    assert outputs[1].error == "openvino: the poison id"
    assert "not finite" in (outputs[3].error or "")
    assert outputs[2].embedding == [1.0, 2.0]


def test_an_aborted_request_is_not_run(engine: OpenVinoEmbeddingEngine, model: Doubler) -> None:
    engine.submit(request(1, [1]))
    engine.submit(request(2, [2]))
    assert not engine.flush_cache()
    engine.abort(1)
    engine.abort(77)
    assert set(drain(engine)) == {2}
    assert model.batches == [1]
    assert engine.flush_cache()
    assert engine.step() == NOTHING


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [([], "0 tokens"), ([1] * (MAX_BATCH_TOKENS + 1), "1025 tokens"), ([5, 100], "id 100 is outside"), ([-1], "id -1")],
)
def test_ids_are_checked_here_too(engine: OpenVinoEmbeddingEngine, ids: list[int], complaint: str) -> None:
    with pytest.raises(EngineError, match=complaint):
        engine.submit(request(1, ids))
    assert not engine.has_work()


def test_generation_is_refused_naming_engine_and_model(engine: OpenVinoEmbeddingEngine) -> None:
    with pytest.raises(EngineRefusal, match="engine openvino: the model tiny makes embeddings"):
        engine.submit(request(1, [1], embedding=False))
    assert engine.info().capabilities["generation"] == "refused"
    assert engine.info().embedding_dimensions == 2


@given(st.lists(st.integers(1, 600), min_size=1, max_size=200))
def test_a_batch_has_the_oldest_and_stays_within_bounds(lengths: list[int]) -> None:
    chosen = choose_batch(lengths, MAX_BATCH_TOKENS, MAX_BATCH_ROWS)
    assert chosen[0] == 0
    assert len(set(chosen)) == len(chosen) <= MAX_BATCH_ROWS
    assert len(chosen) == 1 or len(chosen) * max(lengths[i] for i in chosen) <= MAX_BATCH_TOKENS
    farthest = max(abs(lengths[i] - lengths[0]) for i in chosen)
    assert all(abs(lengths[i] - lengths[0]) >= farthest for i in range(len(lengths)) if i not in chosen)


HIDDEN = [[[1.0, 2.0], [3.0, 6.0], [50.0, 60.0]], [[4.0, 0.0], [9.0, 9.0], [9.0, 9.0]]]
MASK = [[1, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        (("mean",), [[2.0, 4.0], [4.0, 0.0]]),
        (("cls",), [[1.0, 2.0], [4.0, 0.0]]),
        (("max",), [[3.0, 6.0], [4.0, 0.0]]),
        (("lasttoken",), [[3.0, 6.0], [4.0, 0.0]]),
        (("mean_sqrt_len",), [[4.0 / 2**0.5, 8.0 / 2**0.5], [4.0, 0.0]]),
        (("cls", "max"), [[1.0, 2.0, 3.0, 6.0], [4.0, 0.0, 4.0, 0.0]]),
    ],
)
def test_padding_has_no_part_in_a_vector(modes: tuple[str, ...], expected: list[list[float]]) -> None:
    hidden, mask = np.array(HIDDEN, dtype=np.float32), np.array(MASK)
    np.testing.assert_allclose(pool(hidden, mask, Pooling(modes, False)), expected, rtol=1e-6)
    lengths = np.linalg.norm(pool(hidden, mask, Pooling(modes, True)), axis=1)
    np.testing.assert_allclose(lengths, 1.0, rtol=1e-6)


def test_a_vector_of_zeros_stays_finite() -> None:
    hidden = np.zeros((1, 2, 3), dtype=np.float32)
    assert not pool(hidden, np.ones((1, 2), dtype=np.int64), Pooling()).any()


def sentence_files(directory: Path, stages: Sequence[str], pooling: dict[str, Any] | None = None) -> Path:
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [{"type": f"sentence_transformers.models.{stage}", "path": paths.get(stage, stage)} for stage in stages]
    (directory / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


def test_pooling_is_what_the_model_says(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == Pooling(("mean",), True)
    sentence_files(tmp_path, ["Transformer", "Pooling"], {"pooling_mode_cls_token": True})
    assert read_pooling(tmp_path) == Pooling(("cls",), False)
    sentence_files(tmp_path, ["Transformer", "Pooling", "Normalize"])
    assert read_pooling(tmp_path) == Pooling(("cls",), True)


@pytest.mark.parametrize(
    ("stages", "pooling", "complaint"),
    [
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_cls_token": True}, "the stage 'Dense' is not supported"),
        (["Transformer", "Pooling"], None, r"1_Pooling.config\.json is missing"),
        (["Transformer", "Pooling"], {"pooling_mode_weightedmean_tokens": True}, "got weightedmean"),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": False}, "got none"),
    ],
)
def test_pooling_that_cannot_be_done_is_named(
    tmp_path: Path, stages: list[str], pooling: dict[str, Any] | None, complaint: str
) -> None:
    with pytest.raises(ModelError, match=complaint):
        read_pooling(sentence_files(tmp_path, stages, pooling))


CONFIG = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"architectures": ["T5EncoderModel"]}, "architectures is .*T5EncoderModel"),
        ({"hidden_act": "swish"}, "hidden_act is 'swish'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"is_decoder": True}, "is_decoder is True"),
        ({"hidden_size": "wide"}, "does not describe a BERT encoder"),
    ],
)
def test_weights_of_another_kind_are_refused_with_a_way_out(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ModelError, match=f"{complaint}.*optimum-cli export"):
        read_config(tmp_path)


class EmbeddingModel:
    """What the factory reads of an embedding model."""

    context_length, vocab_size, eos_token_ids, special_token_ids, is_embedding = 64, 100, (), (), True

    def __init__(self, model_path: Path) -> None:
        self.model_path = str(model_path)


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_a_path_without_weights_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "bert.gguf"
    path.mkdir() if kind == "directory" else path.touch()
    with pytest.raises(ModelError, match=r"Hugging Face directory|no safetensors file"):
        make_engine(ServerArgs(), EmbeddingModel(path), tmp_path)
