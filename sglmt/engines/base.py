"""The Engine protocol: token ids in, token ids out. Runs in the scheduler process, on its one thread.

The scheduler calls `submit`, then `step` while `has_work`, and reads what each step brought; `abort` frees a
request's slot at once. Engines are synchronous: `step` may take long (the scheduler has told the state page
that it is inside one). Nothing here knows of workers, keys' meaning, text or HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from sglmt.errors import EngineRefusal
from sglmt.messages.sampling import LogprobSpec, SamplingParams, TokenLogprobs


class EngineRequest(msgspec.Struct, kw_only=True):
    """One request as the engine sees it. `max_new_tokens` of `sampling` counts `prefix_ids` too.

    The ids are the caller's: an engine that keeps them copies them.
    """

    key: int
    prompt_ids: Sequence[int]
    prefix_ids: Sequence[int]  # output an earlier life of the engine already gave: continue after it
    sampling: SamplingParams
    logprobs: LogprobSpec | None = None
    embedding: bool = False
    lora_name: str | None = None


class EngineOutput(msgspec.Struct):
    """What one step brought for one request.

    `token_ids` are the new ids since the last output (prefix not repeated); `finish_kind` is None while the
    request goes on, else stop, length or error; `matched_id` the stop token id, which is the last of
    `token_ids` when it was EOS or a stop id. `input_logprobs` (prompt positions from `prompt_from`) comes with
    the first output of a submission. After a finish the engine has forgotten the key.
    """

    key: int
    token_ids: list[int]
    finish_kind: str | None = None
    matched_id: int | None = None
    error: str | None = None
    logprobs: TokenLogprobs | None = None
    cached_tokens: int | None = None
    embedding: list[float] | None = None
    input_logprobs: TokenLogprobs | None = None


class EngineStep(msgspec.Struct, frozen=True):
    """What one step brought, of requests that have neither ended nor been aborted; each is in one place at most.

    Nearly every output is one more id and nothing else. Those are two columns, `token_ids[i]` being the new id of
    `keys[i]`: no object is made for them. All others are `outputs`. The columns belong to the engine and are good
    until it is called again.
    """

    keys: Sequence[int]
    token_ids: Sequence[int]
    outputs: Sequence[EngineOutput]

    def all_outputs(self) -> list[EngineOutput]:
        """Everything as outputs, for readers that are in no hurry."""
        plain = [EngineOutput(key, [token_id]) for key, token_id in zip(self.keys, self.token_ids, strict=True)]
        return [*plain, *self.outputs]


NOTHING = EngineStep((), (), ())


class Capability:
    """How an engine treats a feature; values of `EngineInfo.capabilities`."""

    EXACT = "exact"
    APPROXIMATE = "approximate"
    REFUSED = "refused"


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself. `capabilities` maps a feature to exact, approximate or refused:

    features: generation embeddings temperature top_p top_k min_p penalties seed stop_token_ids min_new_tokens
    logit_bias json_schema regex ebnf chosen_logprobs top_logprobs token_ids_logprobs prompt_logprobs lora
    update_weights; and `continue.<feature>` for continuing after a crash: greedy, sampled, seed,
    penalties, grammar, logprobs.
    """

    name: str
    version: str
    context_length: int
    vocab_size: int
    max_total_tokens: int | None
    capabilities: dict[str, str]
    is_simulator: bool = False
    embedding_dimensions: int | None = None  # numbers in a vector; None: no embeddings


class Engine(Protocol):
    """An engine on this machine."""

    def info(self) -> EngineInfo:
        """Constant once constructed."""
        ...

    def check(self, request: EngineRequest) -> None:
        """Raise EngineRefusal, naming engine and feature, for what it cannot do. Cheap, no side effects; looks at
        everything but the ids, which need not be there."""
        ...

    def submit(self, request: EngineRequest) -> None:
        """Take a request. Raises EngineError when it cannot be taken; costs that request only."""
        ...

    def step(self) -> EngineStep:
        """Advance all requests by one step."""
        ...

    def abort(self, key: int) -> None:
        """Forget a request at once; unknown keys are ignored."""
        ...

    def has_work(self) -> bool:
        """Whether `step` has something to do now."""
        ...

    def next_step_at_s(self) -> float | None:
        """Monotonic time before which `step` would bring nothing; None: now, if it has work. An engine that says a
        time is paced: it computes nothing worth speaking of, and its steps are short."""
        ...

    def flush_cache(self) -> bool:
        """Drop the prefix cache; False when requests are running and it was not dropped."""
        ...

    def load_adapter(self, name: str, path: str) -> None:
        """Serve requests with `lora_name` = `name`. Raises EngineRefusal (cannot) or EngineError (this one)."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; an unknown name is ignored. Running requests of it go on."""
        ...

    def update_weights(self, path: str) -> None:
        """Replace the weights for requests submitted from now on. Raises EngineRefusal or EngineError."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class FixedEngine:
    """What an engine whose model never changes answers to adapters and new weights."""

    def info(self) -> EngineInfo:
        """The engine's own."""
        raise NotImplementedError

    def load_adapter(self, name: str, path: str) -> None:
        """Refused."""
        raise EngineRefusal(f"engine {self.info().name} does not support adapters ({name!r} was asked for)")

    def unload_adapter(self, name: str) -> None:
        """Nothing was ever loaded."""

    def update_weights(self, path: str) -> None:
        """Refused."""
        raise EngineRefusal(f"engine {self.info().name} does not support new weights while it runs ({path!r})")
