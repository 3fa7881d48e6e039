"""`GET /v1/models` and `GET /v1/models/{id}`: the body of the answer. Pure; runs in the tokenizer workers."""

from __future__ import annotations

from typing import Any

from sglmt.http.errors import unknown_model
from sglmt.http.formatting import encode_json
from sglmt.http.limits import ModelLimits

OWNER = "sglmt"


def models_body(limits: ModelLimits, created_unix_s: int) -> bytes:
    """The list of served models: the model, and every adapter as a model of its own."""
    names = (limits.model_name, *limits.adapters)
    return encode_json({"object": "list", "data": [_model(name, limits, created_unix_s) for name in names]})


def model_body(name: str, limits: ModelLimits, created_unix_s: int) -> bytes:
    """One model, by any of the names it is served under. Raises ApiError (404) for others."""
    if not limits.accepts(name):
        raise unknown_model(name, limits.model_name)
    served = name if name in limits.adapters else limits.model_name
    return encode_json(_model(served, limits, created_unix_s))


def _model(name: str, limits: ModelLimits, created_unix_s: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created_unix_s,
        "owned_by": OWNER,
        "root": limits.model_name,
        "max_model_len": limits.context_length,
    }
