"""How a sentence-embedding model turns one vector a token into one a text: read from its directory, then applied.

Runs in the scheduler process, inside the embedding engine. The files are those of the sentence-transformers
library: `modules.json` lists the stages, `1_Pooling/config.json` says how tokens are pooled. A directory without
them gets the mean of its tokens, scaled to length 1, which is what most models of this kind were trained for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglmt.errors import ModelError

Array = NDArray[Any]

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # in the order in which several of them are joined
_LEAST_NORM = 1e-12


class Pooling(NamedTuple):
    """`modes` are joined in this order; `normalize` scales the result to length 1."""

    modes: tuple[str, ...] = ("mean",)
    normalize: bool = True


def read_pooling(directory: Path) -> Pooling:
    """What the model's directory says. Raises ModelError naming a stage or mode this build cannot carry out."""
    stages = _json(directory / "modules.json", list[dict[str, Any]])
    if stages is None:
        return Pooling()
    modes: tuple[str, ...] = ()
    normalize = False
    for stage in stages:
        kind = str(stage.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            modes = _pooling_modes(directory / str(stage.get("path", "")) / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelError(
                f"{directory / 'modules.json'}: the stage {kind!r} is not supported; export the model as a whole to "
                "ONNX or OpenVINO without it, or choose another model"
            )
    return Pooling(modes or ("mean",), normalize)


def _pooling_modes(path: Path) -> tuple[str, ...]:
    config = _json(path, dict[str, Any])
    if config is None:
        raise ModelError(f"{path} is missing: it says how the model pools its tokens; download the model again")
    modes = tuple(mode for key, mode in _MODES.items() if config.get(key) is True)
    if not modes or "weightedmean" in modes:
        raise ModelError(
            f"{path}: one of the pooling modes cls, max, mean, mean_sqrt_len, lasttoken is expected, got "
            f"{', '.join(modes) or 'none'}"
        )
    return modes


def _json(path: Path, kind: Any) -> Any:
    """The content of a JSON file, None when there is no such file. Raises ModelError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"cannot read {path}: {error}; download the model again") from error


def pool(hidden: Array, mask: Array, pooling: Pooling) -> Array:
    """[rows, tokens, size] and the mask [rows, tokens] (1: token, 0: padding on the right) to [rows, size x modes].

    Padding has no part in the result: a row's vector does not depend on how long its neighbours are.
    """
    vectors = np.concatenate([_pooled(hidden, mask, mode) for mode in pooling.modes], axis=1)
    if pooling.normalize:
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.maximum(norms, _LEAST_NORM)
    return vectors


def _pooled(hidden: Array, mask: Array, mode: str) -> Array:
    counts = mask.sum(axis=1, keepdims=True).astype(hidden.dtype)
    if mode == "cls":
        return np.asarray(hidden[:, 0])
    if mode == "lasttoken":
        return np.asarray(hidden[np.arange(len(hidden)), mask.sum(axis=1) - 1])
    weights = mask[:, :, None].astype(hidden.dtype)
    if mode == "max":
        return np.asarray(np.where(weights > 0, hidden, -np.inf).max(axis=1))
    total = np.asarray((hidden * weights).sum(axis=1))
    return np.asarray(total / (counts if mode == "mean" else np.sqrt(counts)))
