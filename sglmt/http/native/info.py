"""`GET /get_model_info` and `GET /get_server_info`: the bodies of the answers. Pure; runs in the tokenizer workers.

Secrets never get here: server arguments come redacted.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglmt.http.formatting import encode_json
from sglmt.http.limits import ModelLimits
from sglmt.server_args import SchedulerInfo, ServerArgs
from sglmt.tokenizer.model_info import ModelInfo


def model_info_body(model: ModelInfo, limits: ModelLimits, weight_version: str = "default") -> bytes:
    """What is served: paths, sizes, special ids, and whether its tokens are simulated."""
    return encode_json(
        {
            "model_path": model.model_path,
            "tokenizer_path": model.tokenizer_file or model.model_path,
            "served_model_name": limits.model_name,
            "is_generation": not model.is_embedding,
            "is_simulator": limits.is_simulator,
            "architecture": model.architecture,
            "context_length": limits.context_length,
            "vocab_size": limits.vocab_size,
            "bos_token_id": model.bos_token_id,
            "eos_token_ids": model.eos_token_ids,
            "has_chat_template": model.chat_template_file is not None,
            "preferred_sampling_params": model.generation_defaults or None,
            "weight_version": weight_version,
        }
    )


def server_info_body(
    server_args: ServerArgs, scheduler_info: SchedulerInfo, version: str, more: dict[str, Any] | None = None
) -> bytes:
    """Options (secrets redacted), what the scheduler says of its engine, and `more`, on one level.

    An option the scheduler had to change keeps its asked-for value here; the effective one is in `scheduler`.
    """
    return encode_json(
        {
            **server_args.redacted(),
            "version": version,
            "mode": server_args.mode,
            "is_simulator": scheduler_info.is_simulator,
            "scheduler": msgspec.to_builtins(scheduler_info),
            **(more or {}),
        }
    )
