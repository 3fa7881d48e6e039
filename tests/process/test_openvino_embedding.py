"""The embedding engine with a real model: the published numbers, whatever else is in the batch and the file format.

The expected similarities are those that the model's own documentation prints for these three sentences.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglmt.engines.base import EngineRequest
from sglmt.engines.factory import make_engine
from sglmt.errors import EngineError, ModelError
from sglmt.messages.sampling import SamplingParams
from sglmt.server_args import ServerArgs
from sglmt.tokenizer.loading import Tokenizer, load_tokenizer
from sglmt.tokenizer.model_info import ModelInfo
from sglmt.tokenizer.resolve import resolve_model
from tests.support.embedding_model import embedding_model_dir, onnx_model_file

pytest.importorskip("openvino_genai")
import numpy as np
import openvino

from sglmt.engines.bert_graph import build_bert
from sglmt.engines.openvino_embedding import OpenVinoEmbeddingEngine
from sglmt.engines.sentence_model import SentenceModel

SENTENCES = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
PUBLISHED = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return resolve_model(str(embedding_model_dir()), None, None, tmp_path_factory.mktemp("resolved"))


@pytest.fixture(scope="module")
def tokenizer(model: ModelInfo) -> Tokenizer:
    return load_tokenizer(model, "auto")


@pytest.fixture(scope="module")
def engine(model: ModelInfo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenVinoEmbeddingEngine]:
    made = make_engine(ServerArgs(engine_threads=1), model, tmp_path_factory.mktemp("cache"))
    assert isinstance(made, OpenVinoEmbeddingEngine)
    yield made
    made.close()


def vectors(engine: OpenVinoEmbeddingEngine, rows: list[list[int]]) -> np.ndarray:
    """All rows submitted at once; run to the end."""
    for key, ids in enumerate(rows):
        sampling = SamplingParams(max_new_tokens=0)
        engine.submit(EngineRequest(key=key, prompt_ids=ids, prefix_ids=[], sampling=sampling, embedding=True))
    outputs = {}
    while engine.has_work():
        outputs.update({output.key: output for output in engine.step().outputs})
    assert {output.finish_kind for output in outputs.values()} == {"stop"}
    return np.array([outputs[key].embedding for key in range(len(rows))])


def test_the_directory_is_known_for_what_it_is(model: ModelInfo, tokenizer: Tokenizer) -> None:
    assert (model.is_embedding, model.architecture, model.context_length) == (True, "BertModel", 256)
    ids = tokenizer.encode("word " * 300)
    assert (ids[0], ids[-1], len(ids)) == (101, 102, 302)  # neither cut nor padded, though the file says both


def test_similarities_are_the_published_ones(engine: OpenVinoEmbeddingEngine, tokenizer: Tokenizer) -> None:
    made = vectors(engine, [tokenizer.encode(text) for text in SENTENCES])
    np.testing.assert_allclose(made @ made.T, PUBLISHED, atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(made, axis=1), 1.0, atol=1e-6)
    assert engine.info().embedding_dimensions == made.shape[1] == 384


def test_a_vector_does_not_depend_on_the_batch(engine: OpenVinoEmbeddingEngine, model: ModelInfo) -> None:
    draw = random.Random(7)
    lengths = [1, 2, 3, 200, 40, 41, 39, 8, 256, 5, 17, 100]
    rows = [[draw.randrange(1000, model.vocab_size) for _ in range(length)] for length in lengths]
    together = vectors(engine, rows)
    alone = np.concatenate([vectors(engine, [row]) for row in rows])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_a_longer_text_than_the_models_is_refused(engine: OpenVinoEmbeddingEngine) -> None:
    with pytest.raises(EngineError, match="257 tokens was given; 1 to 256"):
        vectors(engine, [[1000] * 257])


def copied(directory: Path) -> Path:
    """The model's directory without its weights."""
    shutil.copytree(embedding_model_dir(), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    return directory


def test_other_formats_of_the_same_model(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [tokenizer.encode(text) for text in SENTENCES]
    expected = SentenceModel(embedding_model_dir(), 1).embed(rows)
    native = copied(tmp_path / "native")
    openvino.save_model(build_bert(embedding_model_dir()), str(native / "openvino_model.xml"), compress_to_fp16=False)
    np.testing.assert_allclose(SentenceModel(native, 1).embed(rows), expected, atol=1e-5)
    onnx = copied(tmp_path / "onnx")
    shutil.copy(onnx_model_file(), onnx / "model.onnx")
    agreement = (SentenceModel(onnx, 1).embed(rows) * expected).sum(axis=1)
    assert agreement.min() > 0.97  # its weights have 8 bits


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    directory = copied(tmp_path / "damaged")
    (directory / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ModelError, match=r"cannot read the weights in .*damaged"):
        SentenceModel(directory, 1)
    (directory / "model.onnx").write_bytes(b"no such thing")
    with pytest.raises(ModelError, match=r"OpenVINO cannot load .*damaged"):
        SentenceModel(directory, 1)
