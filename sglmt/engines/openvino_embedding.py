"""The OpenVINO engine for embedding models: one vector a request. Runs in the scheduler process.

Each step takes the oldest waiting request and those nearest to it in length, as many as fit into a bounded number
of padded tokens, runs them through the model at once, and ends them all. So nobody starves, little is padded, and a
step stays short enough for aborts and newcomers. What fails in a batch is tried alone: it costs that request only.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from sglmt.engines.base import (
    NOTHING,
    Capability,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStep,
    FixedEngine,
)
from sglmt.engines.openvino_model import first_line
from sglmt.engines.sentence_pooling import Array
from sglmt.errors import EngineError, EngineRefusal, ModelError

_NAME = "openvino"
MAX_BATCH_TOKENS = 1024  # padded, in one step: about a quarter of a second of one core for a small model
MAX_BATCH_ROWS = 64

_REFUSED = (
    *("generation", "temperature", "top_p", "top_k", "min_p", "penalties", "seed", "stop_token_ids", "min_new_tokens"),
    *("logit_bias", "json_schema", "regex", "ebnf", "lora", "update_weights"),
    *("chosen_logprobs", "top_logprobs", "token_ids_logprobs", "prompt_logprobs"),
    *("continue.greedy", "continue.sampled", "continue.seed", "continue.penalties"),
    *("continue.grammar", "continue.logprobs"),
)
CAPABILITIES = {**dict.fromkeys(_REFUSED, Capability.REFUSED), "embeddings": Capability.EXACT}


class VectorModel(Protocol):
    """What the engine drives; `sglmt.engines.sentence_model.SentenceModel` is one."""

    @property
    def dimensions(self) -> int:
        """Numbers in a vector."""
        ...

    def embed(self, rows: Sequence[Sequence[int]]) -> Array:
        """One vector a row. Raises RuntimeError."""
        ...


class OpenVinoEmbeddingEngine(FixedEngine):
    """An `Engine` that only embeds. `model_name` is for messages."""

    def __init__(self, model: VectorModel, *, model_name: str, vocab_size: int, context_length: int) -> None:
        self._model = model
        self._model_name = model_name
        self._waiting: dict[int, list[int]] = {}  # key → ids, oldest first
        self._info = EngineInfo(
            name=_NAME,
            version=importlib.metadata.version("openvino"),
            context_length=context_length,
            vocab_size=vocab_size,
            max_total_tokens=None,
            capabilities=dict(CAPABILITIES),
            embedding_dimensions=model.dimensions,
        )

    def info(self) -> EngineInfo:
        """Constant."""
        return self._info

    def check(self, request: EngineRequest) -> None:
        """Raise EngineRefusal for anything but an embedding."""
        if not request.embedding:
            raise EngineRefusal(
                f"engine {_NAME}: the model {self._model_name} makes embeddings and generates no text; "
                "use an embeddings endpoint, or a server with a generating model"
            )
        if request.lora_name is not None:
            raise EngineRefusal(f"engine {_NAME} does not support lora; leave it out of the request")

    def submit(self, request: EngineRequest) -> None:
        """Take a request. Raises EngineRefusal or EngineError; costs that request only."""
        self.check(request)
        ids, info = list(request.prompt_ids), self._info
        if request.key in self._waiting:
            raise EngineError(f"{_NAME}: request {request.key} is already running")
        if not 0 < len(ids) <= info.context_length:
            raise EngineError(
                f"{_NAME}: a text of {len(ids)} tokens was given; 1 to {info.context_length} are possible"
            )
        if min(ids) < 0 or max(ids) >= info.vocab_size:
            bad = next(token_id for token_id in ids if not 0 <= token_id < info.vocab_size)
            raise EngineError(f"{_NAME}: token id {bad} is outside the vocabulary of {info.vocab_size}")
        self._waiting[request.key] = ids

    def step(self) -> EngineStep:
        """Run one batch; every request in it ends."""
        if not self._waiting:
            return NOTHING
        keys = list(self._waiting)
        chosen = choose_batch([len(ids) for ids in self._waiting.values()], MAX_BATCH_TOKENS, MAX_BATCH_ROWS)
        batch = {keys[index]: self._waiting[keys[index]] for index in chosen}
        outputs = self._run(batch)
        for key in batch:
            del self._waiting[key]
        return EngineStep((), (), outputs)

    def abort(self, key: int) -> None:
        """Forget a request; unknown keys are ignored."""
        self._waiting.pop(key, None)

    def has_work(self) -> bool:
        """Whether any request waits."""
        return bool(self._waiting)

    def next_step_at_s(self) -> float | None:
        """None: there is never a reason to wait."""
        return None

    def flush_cache(self) -> bool:
        """There is no prefix cache; answers as an engine with one would."""
        return not self._waiting

    def close(self) -> None:
        """Forget everything."""
        self._waiting.clear()

    def _run(self, batch: dict[int, list[int]]) -> list[EngineOutput]:
        try:
            vectors = self._model.embed(list(batch.values()))
        except RuntimeError as error:
            if len(batch) > 1:
                return [output for key, ids in batch.items() for output in self._run({key: ids})]
            return [EngineOutput(key, [], "error", error=f"{_NAME}: {first_line(error)}") for key in batch]
        return [_output(key, vector) for key, vector in zip(batch, vectors, strict=True)]


def _output(key: int, vector: Array) -> EngineOutput:
    if not np.isfinite(vector).all():
        return EngineOutput(key, [], "error", error=f"{_NAME}: the model gave numbers that are not finite")
    return EngineOutput(key, [], "stop", cached_tokens=0, embedding=vector.tolist())


def choose_batch(lengths: Sequence[int], max_tokens: int, max_rows: int) -> list[int]:
    """Which of the waiting rows to run together, `lengths` in tokens, oldest first.

    The oldest row is always among them; the others are those nearest to it in length, as long as rows x longest
    stays within `max_tokens`.
    """
    oldest = lengths[0]
    nearest = sorted(range(len(lengths)), key=lambda index: (abs(lengths[index] - oldest), index))
    chosen: list[int] = []
    longest = 0
    for index in nearest[:max_rows]:
        longest = max(longest, lengths[index])
        if chosen and longest * (len(chosen) + 1) > max_tokens:
            break
        chosen.append(index)
    return chosen


def open_embedding_engine(
    model_path: str, *, vocab_size: int, context_length: int, threads: int
) -> OpenVinoEmbeddingEngine:
    """The engine for a model directory, loaded and warmed up. Raises ModelError when it cannot be read."""
    from sglmt.engines.sentence_model import SentenceModel

    directory = Path(model_path)
    if not directory.is_dir():
        raise ModelError(
            f"{model_path}: the openvino engine reads embedding models from a Hugging Face directory, not from this "
            "file; pass the directory as --model-path"
        )
    return OpenVinoEmbeddingEngine(
        SentenceModel(directory, threads),
        model_name=directory.name,
        vocab_size=vocab_size,
        context_length=context_length,
    )
