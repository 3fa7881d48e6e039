"""What of a changed configuration can be applied to a running instance. Pure; used by the supervisor.

Every option is in one of three groups: what the instance is (refused, by name), what its workers are started with
(a rolling restart applies it), and what the supervisor itself goes by (applied at once).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sglmt.errors import ConfigError
from sglmt.server_args import ServerArgs, flag_name, flags

# What an instance is: its name and address, its engine and model, the processes that exist once.
FIXED = frozenset(
    {
        "detokenizers", "router", "name", "host", "port", "uds", "uds_mode", "model_path", "tokenizer_path",
        "context_length", "trust_remote_code", "engine", "engine_threads", "engine_cache_mb",
        "disaggregation_mode", "simulator_step_ms", "simulator_tokens", "simulator_seed", "simulator_poison",
        "simulator_continuing",
        "max_running_requests", "max_queued_requests", "runtime_dir", "log_format", "log_dir",
        "log_max_bytes", "log_keep",
    }
)  # fmt: skip
# What workers are started with: new ones go by it.
OF_WORKERS = frozenset(
    {
        "ssl_certfile", "ssl_keyfile", "keep_alive_timeout", "receive_timeout", "served_model_name", "chat_template",
        "tool_call_parser", "reasoning_parser", "tokenizer_backend", "tokenizer_cache_mb", "max_request_bytes",
        "max_prompts_per_request", "engine_wait", "max_resubmits", "api_key", "api_key_file", "admin_key",
        "admin_key_file", "cors_origin", "allowed_host",
    }
)  # fmt: skip
# What the supervisor goes by, and tells everybody where they need it.
OF_SUPERVISOR = frozenset(
    {
        "workers", "start_timeout", "heartbeat_timeout", "engine_step_timeout", "drain_timeout", "max_restarts",
        "restart_window", "restart_backoff_max", "max_worker_rss", "max_worker_lifetime", "log_level",
    }
)  # fmt: skip
# Facts of the model that running requests depend on, in every process that has them loaded.
FIXED_OF_MODEL = (
    "model_path", "vocab_size", "context_length", "is_embedding", "eos_token_ids", "special_token_ids",
)  # fmt: skip


@dataclass(frozen=True)
class ReloadPlan:
    """The arguments from now on, and which options differ from before. `workers`: how many are wanted now."""

    args: ServerArgs
    changed: tuple[str, ...]
    workers: int


def plan_reload(before: ServerArgs, fresh: ServerArgs, scaled_to: int | None) -> ReloadPlan:
    """What a reload does. `scaled_to`: the number of workers that was set live, which stays.

    Raises ConfigError, naming each option that cannot change in a running instance.
    """
    changed = tuple(field for field, _flag in flags() if getattr(before, field) != getattr(fresh, field))
    fixed = [field for field in changed if field in FIXED]
    if (before.ssl_certfile is None) != (fresh.ssl_certfile is None):
        fixed.append("ssl_certfile")
    if fixed:
        shown = "; ".join(_shown(before, fresh, field) for field in fixed)
        raise ConfigError(f"not reloaded, a running instance cannot change {shown}; launch it anew for that")
    if before.mode != fresh.mode:
        raise ConfigError(
            f"not reloaded, --workers {before.workers} → {fresh.workers}: would change {before.mode} mode to "
            f"{fresh.mode} mode; launch with `--router always` to have both numbers in multi mode"
        )
    workers = scaled_to if scaled_to is not None else fresh.workers
    return ReloadPlan(fresh, changed, workers)


def check_model(before: Mapping[str, Any], fresh: Mapping[str, Any], same_tokenizer: bool) -> None:
    """Raise ConfigError when the model or tokenizer on disk is not the one that is running: running requests have
    been tokenized with that."""
    other = [fact for fact in FIXED_OF_MODEL if before.get(fact) != fresh.get(fact)]
    if not same_tokenizer:
        other.append("the tokenizer")
    if other:
        raise ConfigError(
            f"not reloaded, the model on disk is another one now (not the same: {', '.join(other)}); "
            "launch the instance anew for that"
        )


def for_children(plan: ReloadPlan, before: ServerArgs) -> ServerArgs:
    """The arguments children read: the mode follows from the number of workers at launch, not from the live one."""
    return msgspec.structs.replace(plan.args, workers=before.workers)


def _shown(before: ServerArgs, fresh: ServerArgs, field: str) -> str:
    return f"{flag_name(field)} ({getattr(before, field)!r} → {getattr(fresh, field)!r})"
