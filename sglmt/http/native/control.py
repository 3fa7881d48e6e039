"""Bodies of the control endpoints: what to change. Pure; runs in the tokenizer workers."""

from __future__ import annotations

from typing import Literal

import msgspec

from sglmt.control.state import NO_ANSWER, ControlChange, ControlOutcome
from sglmt.http.errors import ApiError, bad_field, error_object
from sglmt.http.formatting import encode_json
from sglmt.http.json_body import BodyDecoder
from sglmt.http.limits import ModelLimits

MAX_NAME_CHARS = 128


class PauseBody(msgspec.Struct, kw_only=True):
    """`mode`: end running requests, put them back into the queue, or stop them where they are."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class LoggingBody(msgspec.Struct, kw_only=True):
    """`log_level` of every process."""

    log_level: Literal["debug", "info", "warning", "error"]


class AdapterBody(msgspec.Struct, kw_only=True):
    """A LoRA adapter; the path is the engine's to read."""

    lora_name: str
    lora_path: str | None = None


class WeightsBody(msgspec.Struct, kw_only=True):
    """New weights; `weight_version` names them."""

    model_path: str
    weight_version: str | None = None


_PAUSE = BodyDecoder(PauseBody)
_LOGGING = BodyDecoder(LoggingBody)
_ADAPTER = BodyDecoder(AdapterBody)
_WEIGHTS = BodyDecoder(WeightsBody)


def parse_pause(body: bytes, limits: ModelLimits) -> ControlChange:
    """`/pause_generation`; an empty body means mode `abort`."""
    return ControlChange(pause=_PAUSE.decode(body or b"{}").mode)


def parse_continue(body: bytes, limits: ModelLimits) -> ControlChange:
    """`/continue_generation`."""
    return ControlChange(resume=True)


def parse_flush(body: bytes, limits: ModelLimits) -> ControlChange:
    """`/flush_cache`."""
    return ControlChange(flush=True)


def parse_logging(body: bytes, limits: ModelLimits) -> ControlChange:
    """`/configure_logging`."""
    return ControlChange(log_level=_LOGGING.decode(body).log_level)


def parse_load_adapter(body: bytes, limits: ModelLimits) -> ControlChange:
    """`/load_lora_adapter`. Raises ApiError 501 when the engine has no adapters."""
    fields = _ADAPTER.decode(body)
    require_engine(limits, "lora", "adapters")
    if not fields.lora_path:
        raise bad_field("lora_path", "the path of the adapter is expected")
    if not fields.lora_name or len(fields.lora_name) > MAX_NAME_CHARS:
        raise bad_field("lora_name", f"a name of 1 to {MAX_NAME_CHARS} characters is expected")
    if limits.accepts(fields.lora_name) and fields.lora_name not in limits.adapters:
        raise bad_field("lora_name", "this name is the model's own")
    return ControlChange(load_adapter=(fields.lora_name, fields.lora_path))


def parse_unload_adapter(body: bytes, limits: ModelLimits) -> ControlChange:
    """`/unload_lora_adapter`. Raises ApiError 501 when the engine has no adapters, 400 for an unknown one."""
    name = _ADAPTER.decode(body).lora_name
    require_engine(limits, "lora", "adapters")
    if name not in limits.adapters:
        raise bad_field("lora_name", "no adapter of that name is loaded")
    return ControlChange(unload_adapter=name)


def parse_weights(body: bytes, limits: ModelLimits) -> ControlChange:
    """`/update_weights_from_disk`. Raises ApiError 501 when the engine cannot."""
    fields = _WEIGHTS.decode(body)
    require_engine(limits, "update_weights", "new weights while it runs")
    if not fields.model_path:
        raise bad_field("model_path", "the path of the weights is expected")
    return ControlChange(weights=(fields.model_path, fields.weight_version or fields.model_path))


def require_engine(limits: ModelLimits, feature: str, in_words: str) -> None:
    """Raise ApiError 501, naming the engine, for what it cannot do."""
    if limits.refuses(feature):
        raise ApiError(501, f"the {limits.engine} engine does not support {in_words}", None, "unsupported_by_engine")


def outcome_answer(outcome: ControlOutcome) -> tuple[int, bytes]:
    """(status, body) of a change: 200, every process has applied it; 409, one could not; 503, one did not confirm
    in time. The body names them; with 409 and 503 it is an error like any other, too."""
    facts = {
        "success": not outcome.errors,
        "message": "applied by every process",
        "version": outcome.version,
        "confirmed": outcome.confirmed,
        "errors": outcome.errors,
    }
    if not outcome.errors:
        return 200, encode_json(facts)
    silent = NO_ANSWER in outcome.errors.values()
    told = "; ".join(f"{name}: {reason}" for name, reason in sorted(outcome.errors.items()))
    status, code = (503, "not_confirmed") if silent else (409, "not_applied")
    error = ApiError(status, f"not applied by every process: {told}", None, code)
    return status, encode_json({**facts, **error_object(error, "native")})
