"""The BERT encoder as an OpenVINO graph, made from a Hugging Face directory's configuration and weights.

Runs in the scheduler process when the embedding engine is made, for directories that hold safetensors and neither an
ONNX nor an OpenVINO file. The graph follows "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding" (Devlin et al., 2018): inputs `input_ids` and `attention_mask`, int64 [rows, tokens]; output
`last_hidden_state`, float32 [rows, tokens, size].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino
import openvino.opset13 as ops
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from sglmt.errors import ModelError

Node = Any
Weight = NDArray[np.float32]

_PREFIX = "bert."  # of the tensors' names in checkpoints with a head
_ACTIVATIONS: dict[str, Callable[[Node], Node]] = {
    "gelu": lambda x: ops.gelu(x, "ERF"),
    "gelu_new": lambda x: ops.gelu(x, "TANH"),
    "gelu_pytorch_tanh": lambda x: ops.gelu(x, "TANH"),
    "relu": ops.relu,
}


class BertConfig(msgspec.Struct, frozen=True):
    """The fields of `config.json` that the graph follows from."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    architectures: list[str] = []
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"
    position_embedding_type: str = "absolute"
    is_decoder: bool = False


def read_config(directory: Path) -> BertConfig:
    """Raises ModelError for a model that is no BERT encoder, naming what differs."""
    path = directory / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=BertConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{path} does not describe a BERT encoder: {error}; {_other_way(directory)}") from error
    for name, value, known in (
        ("architectures", config.architectures, not config.architectures or config.architectures[0].startswith("Bert")),
        ("hidden_act", config.hidden_act, config.hidden_act in _ACTIVATIONS),
        ("position_embedding_type", config.position_embedding_type, config.position_embedding_type == "absolute"),
        ("is_decoder", config.is_decoder, not config.is_decoder),
    ):
        if not known:
            raise ModelError(f"{path}: {name} is {value!r}, which is no BERT encoder; {_other_way(directory)}")
    return config


def build_bert(directory: Path) -> openvino.Model:
    """The graph with its weights. Raises ModelError naming a file, field or tensor that is missing."""
    config = read_config(directory)
    weights = _Weights(directory)
    ids = ops.parameter([-1, -1], np.int64, name="input_ids")
    mask = ops.parameter([-1, -1], np.int64, name="attention_mask")
    state = _embedded(ids, weights, config)
    visible = ops.unsqueeze(ops.convert(mask, "boolean"), _int64([1, 2]))  # [rows, 1, 1, tokens]
    for index in range(config.num_hidden_layers):
        state = _layer(state, visible, weights, f"encoder.layer.{index}.", config)
    for parameter in (ids, mask):
        parameter.output(0).get_tensor().set_names({parameter.get_friendly_name()})
    state.output(0).get_tensor().set_names({"last_hidden_state"})
    return openvino.Model([ops.result(state)], [ids, mask], "bert")


def _embedded(ids: Node, weights: _Weights, config: BertConfig) -> Node:
    """Words and positions, plus token type 0, which is every token's."""
    tokens = ops.gather(ops.shape_of(ids), _int64(1), _int64(0))
    positions = ops.range(_int64(0), tokens, _int64(1), "i64")
    words = ops.gather(weights["embeddings.word_embeddings.weight"], ids, _int64(0))
    places = ops.gather(weights["embeddings.position_embeddings.weight"], positions, _int64(0))
    types = ops.gather(weights["embeddings.token_type_embeddings.weight"], _int64(0), _int64(0))
    return _normalized(ops.add(ops.add(words, types), places), weights, "embeddings.LayerNorm", config)


def _layer(state: Node, visible: Node, weights: _Weights, prefix: str, config: BertConfig) -> Node:
    heads = _int64([0, 0, config.num_attention_heads, config.hidden_size // config.num_attention_heads])
    swap = _int64([0, 2, 1, 3])
    query, key, value = (
        ops.transpose(ops.reshape(_dense(state, weights, f"{prefix}attention.self.{name}"), heads, True), swap)
        for name in ("query", "key", "value")
    )
    attended = ops.transpose(ops.scaled_dot_product_attention(query, key, value, visible), swap)
    attended = ops.reshape(attended, _int64([0, 0, config.hidden_size]), True)
    attended = ops.add(_dense(attended, weights, f"{prefix}attention.output.dense"), state)
    state = _normalized(attended, weights, f"{prefix}attention.output.LayerNorm", config)
    inner = _ACTIVATIONS[config.hidden_act](_dense(state, weights, f"{prefix}intermediate.dense"))
    outer = ops.add(_dense(inner, weights, f"{prefix}output.dense"), state)
    return _normalized(outer, weights, f"{prefix}output.LayerNorm", config)


def _dense(state: Node, weights: _Weights, name: str) -> Node:
    return ops.add(ops.matmul(state, weights[f"{name}.weight"], False, True), weights[f"{name}.bias"])


def _normalized(state: Node, weights: _Weights, name: str, config: BertConfig) -> Node:
    scaled = ops.mvn(state, _int64([-1]), True, config.layer_norm_eps, "INSIDE_SQRT")
    return ops.add(ops.multiply(scaled, weights[f"{name}.weight"]), weights[f"{name}.bias"])


def _int64(value: int | list[int]) -> Node:
    return ops.constant(np.array(value, dtype=np.int64))


def _other_way(directory: Path) -> str:
    return f"export it to ONNX or OpenVINO (`optimum-cli export openvino --model {directory} OUTPUT`)"


class _Weights:
    """The tensors of a directory as constants of the graph, 32-bit."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tensors: dict[str, Weight] = {}
        try:
            for name, tensor in _tensors(directory):
                self._tensors[name.removeprefix(_PREFIX)] = tensor
        except (OSError, SafetensorError, TypeError) as error:
            raise ModelError(f"cannot read the weights in {directory}: {error}; {_other_way(directory)}") from error

    def __getitem__(self, name: str) -> Node:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(
                f"{self._directory} has no tensor {name!r} in its safetensors files; download the model again"
            )
        return ops.constant(tensor)


def _tensors(directory: Path) -> Iterator[tuple[str, Weight]]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(str(path), framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(name)
                if np.issubdtype(tensor.dtype, np.floating):
                    yield name, tensor.astype(np.float32, copy=False)
