"""Makes the engine the operator asked for. Runs in the scheduler process, once, before it serves.

Only the chosen engine's module is imported.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sglmt.engines.base import Engine
from sglmt.errors import ConfigError
from sglmt.server_args import ServerArgs


class EngineModel(Protocol):
    """What an engine needs to know of a model; `sglmt.tokenizer.model_info.ModelInfo` has it."""

    @property
    def model_path(self) -> str: ...
    @property
    def context_length(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> Sequence[int]: ...
    @property
    def special_token_ids(self) -> Sequence[int]: ...
    @property
    def is_embedding(self) -> bool: ...


def make_engine(args: ServerArgs, model: EngineModel, cache_dir: Path) -> Engine:
    """The engine of `--engine`, loaded and ready.

    Raises ConfigError for an engine that is not installed or a context longer than the model's, ModelError when
    the engine cannot read the model, EngineError when it cannot start.
    """
    require_installed(args.engine)
    if args.engine == "simulator":
        from sglmt.engines.simulator import SimulatorEngine

        return SimulatorEngine(
            vocab_size=model.vocab_size,
            context_length=args.context_length or model.context_length,
            eos_token_ids=model.eos_token_ids,
            special_token_ids=model.special_token_ids,
            step_s=args.simulator_step_ms / 1000.0,
            seed=args.simulator_seed,
            script=args.simulator_script(),
            poison_id=args.simulator_poison,
            continuing=args.simulator_continuing,
        )
    if model.is_embedding:
        from sglmt.engines.openvino_embedding import open_embedding_engine

        return open_embedding_engine(
            model.model_path,
            vocab_size=model.vocab_size,
            context_length=effective_context_length(args, model),
            threads=args.engine_threads or default_threads(),
        )
    from sglmt.engines.openvino import OpenVinoEngine

    return OpenVinoEngine(
        model_path=model.model_path,
        cache_dir=cache_dir,
        vocab_size=model.vocab_size,
        context_length=effective_context_length(args, model),
        eos_token_ids=model.eos_token_ids,
        threads=args.engine_threads or default_threads(),
        cache_mb=args.engine_cache_mb,
        max_running_requests=args.max_running_requests,
    )


def require_installed(engine: str) -> None:
    """Raise ConfigError, saying what to install, when the library of an engine is missing. Imports nothing."""
    if engine == "openvino" and importlib.util.find_spec("openvino_genai") is None:
        raise ConfigError(
            "--engine openvino: the openvino-genai library is not installed; run `pip install 'sglmt[openvino]'`, "
            "or choose --engine simulator"
        )


def effective_context_length(args: ServerArgs, model: EngineModel) -> int:
    """Tokens of prompt and output together. Raises ConfigError when more is asked than the model was made for."""
    if args.context_length is None:
        return model.context_length
    if args.context_length > model.context_length:
        raise ConfigError(
            f"--context-length {args.context_length}: the model's is {model.context_length}; "
            "pass that or less, or leave the flag out"
        )
    return args.context_length


def default_threads() -> int:
    """All cores this process may use but one, which the front end needs."""
    return max(1, len(os.sched_getaffinity(0)) - 1)
