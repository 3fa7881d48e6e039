"""What requests are checked against: the served model's names and sizes, and what its engine can do. Pure.

Runs in the tokenizer workers; made once from the model's facts and the scheduler's info, again when those change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sglmt.http.errors import ApiError
from sglmt.http.output.rules import OutputRules

REFUSED = "refused"

_NEUTRAL: dict[str, tuple[float, float, float, str]] = {  # name → lowest, highest, neutral value, engine feature
    "temperature": (0.0, 100.0, 1.0, "temperature"),
    "top_p": (0.0, 1.0, 1.0, "top_p"),
    "top_k": (-1, 2**31 - 1, -1, "top_k"),
    "min_p": (0.0, 1.0, 0.0, "min_p"),
    "repetition_penalty": (0.01, 10.0, 1.0, "penalties"),
}


@dataclass(frozen=True)
class SamplingDefaults:
    """Values for sampling fields a request leaves out."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


@dataclass(frozen=True)
class ModelLimits:
    """One served model. Lengths are tokens; `capabilities` maps a feature to exact, approximate or refused.

    A request may call the model `model_name`, `default`, or any of `aliases`. `generation_defaults` come from the
    model (temperature, top_p, top_k, min_p, repetition_penalty); values out of range are not used.
    """

    model_name: str
    context_length: int
    vocab_size: int
    max_prompts_per_request: int
    engine: str
    capabilities: dict[str, str]
    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()  # names of loaded adapters, each served as a model of its own
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    is_simulator: bool = False
    embedding_dimensions: int | None = None  # numbers in a vector, None when not known
    output: OutputRules = field(default_factory=OutputRules)  # how answers of chats are taken apart

    def accepts(self, name: str) -> bool:
        """Whether a request for this model name is for us."""
        return name == self.model_name or name == "default" or name in self.aliases or name in self.adapters

    def refuses(self, feature: str) -> bool:
        """Whether the engine cannot do this; what it does not declare it cannot do."""
        return self.capabilities.get(feature, REFUSED) == REFUSED

    def require(self, feature: str, param: str) -> None:
        """Raise ApiError (400, naming field and engine) when the engine cannot do `feature`."""
        if self.refuses(feature):
            message = f"{param}: the {self.engine} engine cannot do this; leave the field out"
            raise ApiError(400, message, param, "unsupported_by_engine")

    def require_generation(self) -> None:
        """Raise ApiError (400, naming model and engine) when the engine says that it makes no text."""
        if self.capabilities.get("generation") == REFUSED:
            message = (
                f"the {self.engine} engine makes only embeddings with the model {self.model_name!r}; "
                "use /v1/embeddings or /encode"
            )
            raise ApiError(400, message, code="unsupported_by_engine")

    def require_embeddings(self) -> None:
        """Raise ApiError (400, naming model and engine) when the engine says that it makes no embeddings."""
        if self.capabilities.get("embeddings") == REFUSED:
            message = (
                f"the {self.engine} engine makes no embeddings with the model {self.model_name!r}; "
                "send this to a server that was started with an embedding model"
            )
            raise ApiError(400, message, code="unsupported_by_engine")

    @cached_property
    def sampling_defaults(self) -> SamplingDefaults:
        """The model's own defaults, where they are in range and the engine can honour them."""
        values = {name: self._default(name) for name in _NEUTRAL}
        return SamplingDefaults(
            temperature=float(values["temperature"]),
            top_p=float(values["top_p"]) or 1.0,
            top_k=int(values["top_k"]) if 0 < values["top_k"] < self.vocab_size else -1,
            min_p=float(values["min_p"]),
            repetition_penalty=float(values["repetition_penalty"]),
        )

    def _default(self, name: str) -> float:
        low, high, neutral, feature = _NEUTRAL[name]
        value = self.generation_defaults.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or self.refuses(feature):
            return neutral
        return value if math.isfinite(value) and low <= value <= high else neutral
