"""Opens OpenVINO GenAI's pipeline for a model: imports the library, converts if need be, sizes the cache.

Runs in the scheduler process, when the OpenVINO engine is made and when its prefix cache is dropped.
"""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from sglmt.engines.openvino_model import (
    BLOCK_TOKENS,
    cache_bytes_per_token,
    convert,
    find_model,
    first_line,
)
from sglmt.errors import EngineError, ModelError

_LEAST_BATCHED_TOKENS = 256  # of prompts, in one step: a long prompt delays the others by no more than this
_WARM_UP_TOKENS = BLOCK_TOKENS + 8  # more than a block, so that the second time some are in the prefix cache


class Library(NamedTuple):
    """The modules of the engine, imported on demand: `pip install sglmt` does not bring them."""

    genai: Any
    openvino: Any
    numpy: Any

    def tensor(self, ids: list[int]) -> Any:
        """Token ids as the library takes them: int64, [1, len(ids)]."""
        return self.openvino.Tensor(self.numpy.array([ids], dtype=self.numpy.int64))


class Pipeline(NamedTuple):
    """`handle` is the library's pipeline; `capacity` the tokens its cache holds, None where that is unknown."""

    handle: Any
    capacity: int | None


def import_library() -> Library:
    """Raises EngineError saying what to install."""
    try:
        return Library(*map(importlib.import_module, ("openvino_genai", "openvino", "numpy")))
    except ImportError as error:
        raise EngineError(
            f"the openvino engine cannot be imported ({error}): run `pip install 'sglmt[openvino]'`, "
            "or choose --engine simulator"
        ) from error


class PipelineSource:
    """Opens the same model as often as wanted. `cache_mb`: MiB of the key-value cache."""

    def __init__(
        self,
        library: Library,
        *,
        model_path: str,
        cache_dir: Path,
        version: str,
        threads: int,
        cache_mb: int,
        max_running_requests: int,
    ) -> None:
        """Raises ModelError for a path that cannot be a model."""
        self._library = library
        self._model_path = Path(model_path)
        self._directory = find_model(model_path, cache_dir, version)
        self._cache_mb = cache_mb
        self._max_running_requests = max_running_requests
        self._properties = {
            "INFERENCE_NUM_THREADS": threads,
            # See the engine's module text for why the faster defaults are not used.
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
            "KV_CACHE_PRECISION": "f32",
        }

    def open(self) -> Pipeline:
        """The loaded and warmed-up pipeline; takes seconds, more when the model must be converted first.

        Raises ModelError. A damaged conversion is made again once.
        """
        if self._model_path.is_dir():
            return self._load()
        if self._directory.is_dir():
            try:
                return self._load()
            except ModelError:
                shutil.rmtree(self._directory, ignore_errors=True)
        least = self._scheduler_config(num_blocks=1)
        convert(self._model_path, self._directory, self._library.genai, least, self._properties)
        return self._load()

    def _load(self) -> Pipeline:
        genai, directory = self._library.genai, self._directory
        try:
            per_token = cache_bytes_per_token(directory, self._library.openvino)
            blocks = None
            if per_token is not None:
                blocks = max(1, self._cache_mb * 2**20 // (per_token * BLOCK_TOKENS))
            config = self._scheduler_config(blocks)
            handle = genai.ContinuousBatchingPipeline(str(directory), config, "CPU", self._properties)
            self._warm_up(handle)
        except RuntimeError as error:
            raise ModelError(f"OpenVINO cannot load {directory}: {first_line(error)}") from error
        return Pipeline(handle, None if blocks is None else blocks * BLOCK_TOKENS)

    def _scheduler_config(self, num_blocks: int | None) -> Any:
        config = self._library.genai.SchedulerConfig()
        if num_blocks is None:
            config.cache_size = -(-self._cache_mb // 1024)  # whole GiB, rounded up
        else:
            config.cache_size = 0
            config.num_kv_blocks = num_blocks
        config.enable_prefix_caching = True
        config.max_num_seqs = self._max_running_requests
        config.max_num_batched_tokens = max(_LEAST_BATCHED_TOKENS, self._max_running_requests)
        return config

    def _warm_up(self, handle: Any) -> None:
        """Run a short request twice: the library prepares its kernels at first use, for a third of a second."""
        config = self._library.genai.GenerationConfig()
        config.max_new_tokens = 2
        config.ignore_eos = True
        config.set_eos_token_id(0)
        for request_id in range(2):
            request = handle.add_request(request_id, self._library.tensor([0] * _WARM_UP_TOKENS), config)
            while handle.has_non_finished_requests():
                handle.step()
            del request
