"""A sentence-embedding model on OpenVINO: token ids of several texts in, one vector a text out.

Runs in the scheduler process, inside the embedding engine. The encoder comes from the first of these that the
directory has: OpenVINO's own format, an ONNX file, BERT weights as safetensors. Pickled weights are never read.
Numbers are computed in 32-bit floats without dynamic quantization, so that a text's vector does not depend on what
else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino

from sglmt.engines.bert_graph import build_bert
from sglmt.engines.openvino_model import MODEL_FILE, first_line
from sglmt.engines.sentence_pooling import Array, pool, read_pooling
from sglmt.errors import ModelError

_ONNX_FILES = ("onnx/model.onnx", "model.onnx")
_INPUTS = frozenset(("input_ids", "attention_mask", "token_type_ids"))
_OUTPUTS = ("last_hidden_state", "token_embeddings")
_WARM_UP_TOKENS = 8


class SentenceModel:
    """A loaded model. `dimensions`: numbers in a vector."""

    def __init__(self, directory: Path, threads: int) -> None:
        """Loads and warms up. Raises ModelError saying what the directory lacks."""
        self._pooling = read_pooling(directory)
        try:
            model = _read(directory)
            compiled = openvino.Core().compile_model(
                model,
                "CPU",
                {
                    "INFERENCE_NUM_THREADS": threads,
                    "INFERENCE_PRECISION_HINT": "f32",
                    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
                    "PERFORMANCE_HINT": "LATENCY",
                },
            )
            self._inputs = _input_types(directory, compiled)
            self._output = _token_output(directory, compiled)
            self._request = compiled.create_infer_request()
            self.dimensions = len(self.embed([[0] * _WARM_UP_TOKENS])[0])
        except RuntimeError as error:
            raise ModelError(f"OpenVINO cannot load {directory}: {first_line(error)}") from error

    def embed(self, rows: Sequence[Sequence[int]]) -> Array:
        """One vector a row, float32 [rows, dimensions]. Rows are padded to the longest. Raises RuntimeError."""
        longest = max(map(len, rows))
        ids = np.zeros((len(rows), longest), dtype=np.int64)
        mask = np.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = row
            mask[index, : len(row)] = 1
        values = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        feed = {name: values[name].astype(dtype, copy=False) for name, dtype in self._inputs.items()}
        hidden = self._request.infer(feed)[self._output]
        return pool(np.asarray(hidden, dtype=np.float32), mask, self._pooling)


def _read(directory: Path) -> Any:
    """The encoder's graph. Raises ModelError, or RuntimeError for a file the library cannot read."""
    for name in (MODEL_FILE, *_ONNX_FILES):
        if (directory / name).is_file():
            return openvino.Core().read_model(str(directory / name))
    if any(directory.glob("*.safetensors")):
        return build_bert(directory)
    raise ModelError(
        f"{directory} holds no {MODEL_FILE}, no {_ONNX_FILES[0]} and no safetensors file; the openvino engine reads "
        f"embedding models in one of these (`optimum-cli export openvino --model {directory} OUTPUT` makes the first)"
    )


def _input_types(directory: Path, compiled: Any) -> dict[str, Any]:
    """Input name → numpy type. Raises ModelError for an input that nobody could fill."""
    types: dict[str, Any] = {}
    for port in compiled.inputs:
        name = next((known for known in _INPUTS if known in port.get_names()), None)
        if name is None:
            raise ModelError(f"{directory}: the model has an input {sorted(port.get_names())} that is not known here")
        types[name] = port.get_element_type().to_dtype()
    if "input_ids" not in types:
        raise ModelError(f"{directory}: the model has no input named input_ids")
    return types


def _token_output(directory: Path, compiled: Any) -> Any:
    """The output with one vector a token."""
    for name in _OUTPUTS:
        for port in compiled.outputs:
            if name in port.get_names():
                return port
    for port in compiled.outputs:
        if port.get_partial_shape().rank.get_length() == 3:
            return port
    raise ModelError(f"{directory}: the model has no output with one vector a token ({' or '.join(_OUTPUTS)})")
