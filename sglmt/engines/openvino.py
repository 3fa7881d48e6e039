"""The OpenVINO engine: continuous batching on this machine's CPU. Runs in the scheduler process.

An adapter around OpenVINO GenAI's `ContinuousBatchingPipeline`, which takes and gives token ids. The library is
imported when the engine is made, nowhere else. Numbers are computed in 32-bit floats without dynamic
quantization: with the library's faster defaults the greedy answer depends on what else is in the batch, and a
request continued after a crash mostly ended differently. What the library does not check (ids outside the
vocabulary, prompts that are too long) is checked here.

An exception out of the library's `step` leaves its scheduler unusable for every request, so it is passed on: the
process ends and the supervisor restarts it. For this reason grammars are refused: the library compiles them
inside `step`, and one it does not understand would end the engine.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglmt.engines.base import Capability, EngineInfo, EngineOutput, EngineRequest, EngineStep, FixedEngine
from sglmt.engines.openvino_model import first_line
from sglmt.engines.openvino_pipeline import PipelineSource, import_library
from sglmt.engines.openvino_sampling import generation_config
from sglmt.errors import EngineError, EngineRefusal
from sglmt.messages.sampling import TokenLogprobs

_NAME = "openvino"

_EXACT = (
    "generation",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "penalties",
    "stop_token_ids",
    "min_new_tokens",
    "chosen_logprobs",
    "continue.sampled",
)
# seed: other requests in the batch disturb the draw. continue.greedy and continue.logprobs: the same but for
# rounding, which decides between ids that are equally likely to seven digits (1 of 240 continuations differed).
# continue.penalties: the part before the crash counts as prompt, which presence and frequency leave out.
_APPROXIMATE = ("seed", "continue.greedy", "continue.seed", "continue.penalties", "continue.logprobs")
_REFUSED = (
    "logit_bias",
    "json_schema",
    "regex",
    "ebnf",
    "top_logprobs",
    "token_ids_logprobs",
    "prompt_logprobs",
    "embeddings",
    "lora",
    "update_weights",
    "continue.grammar",
)
CAPABILITIES = {
    **dict.fromkeys(_EXACT, Capability.EXACT),
    **dict.fromkeys(_APPROXIMATE, Capability.APPROXIMATE),
    **dict.fromkeys(_REFUSED, Capability.REFUSED),
}


class _Running:
    """One request inside the library."""

    __slots__ = ("ends", "handle", "wants_logprobs")

    def __init__(self, handle: Any, ends: frozenset[int], wants_logprobs: bool) -> None:
        self.handle = handle
        self.ends = ends
        self.wants_logprobs = wants_logprobs


class OpenVinoEngine(FixedEngine):
    """An `Engine` on OpenVINO GenAI. Loads the model when made, which takes seconds.

    `model_path`: a GGUF file, converted on first use under `cache_dir`, or a directory in OpenVINO's format.
    `cache_mb`: MiB of the key-value cache; its capacity bounds the context length that `info` tells.
    """

    def __init__(
        self,
        *,
        model_path: str,
        cache_dir: Path,
        vocab_size: int,
        context_length: int,
        eos_token_ids: Sequence[int],
        threads: int,
        cache_mb: int,
        max_running_requests: int,
    ) -> None:
        """Raises EngineError when the library is missing, ModelError when the model cannot be read."""
        self._library = import_library()
        self._genai = self._library.genai
        version = importlib.metadata.version("openvino-genai")
        self._eos = tuple(eos_token_ids)
        self._cache_mb = cache_mb
        self._source = PipelineSource(
            self._library,
            model_path=model_path,
            cache_dir=cache_dir,
            version=version,
            threads=threads,
            cache_mb=cache_mb,
            max_running_requests=max_running_requests,
        )
        self._pipeline, capacity = self._source.open()
        self._running: dict[int, _Running] = {}
        self._at_next_step: dict[int, EngineOutput] = {}
        self._next_id = 0
        self._info = EngineInfo(
            name=_NAME,
            version=version,
            context_length=context_length if capacity is None else min(context_length, capacity),
            vocab_size=vocab_size,
            max_total_tokens=capacity,
            capabilities=dict(CAPABILITIES),
        )

    def info(self) -> EngineInfo:
        """Constant."""
        return self._info

    def check(self, request: EngineRequest) -> None:
        """Raise EngineRefusal for the features this engine does not have."""
        sampling, logprobs = request.sampling, request.logprobs
        asked = {
            "logit_bias": bool(sampling.logit_bias),
            "json_schema": sampling.json_schema is not None,
            "regex": sampling.regex is not None,
            "ebnf": sampling.ebnf is not None,
            "embeddings": request.embedding,
            "lora": request.lora_name is not None,
            "top_logprobs": logprobs is not None and logprobs.top_logprobs_num > 0,
            "token_ids_logprobs": logprobs is not None and bool(logprobs.token_ids),
            "prompt_logprobs": logprobs is not None and logprobs.prompt_from is not None,
        }
        for feature, is_asked in asked.items():
            if is_asked:
                raise EngineRefusal(f"engine {_NAME} does not support {feature}; leave it out of the request")

    def submit(self, request: EngineRequest) -> None:
        """Hand a request to the library. Raises EngineRefusal or EngineError; costs that request only."""
        self.check(request)
        key = request.key
        if key in self._running or key in self._at_next_step:
            raise EngineError(f"{_NAME}: request {key} is already running")
        ids = [*request.prompt_ids, *request.prefix_ids]
        self._check_ids(ids)
        room = self._info.context_length - len(request.prompt_ids)
        if not request.prompt_ids or room < 0:
            raise EngineError(
                f"{_NAME}: a prompt of {len(request.prompt_ids)} tokens was given; "
                f"1 to {self._info.context_length} are possible"
            )
        limit = min(request.sampling.max_new_tokens, room)
        if limit <= len(request.prefix_ids):
            self._at_next_step[key] = EngineOutput(key, [], "length")
            return
        # The library's own ids are ours alone: one that is used twice at a time breaks it.
        self._next_id += 1
        try:
            config, ends = generation_config(self._genai, request, limit, self._eos)
            handle = self._pipeline.add_request(self._next_id, self._library.tensor(ids), config)
        except (RuntimeError, TypeError, ValueError) as error:
            raise EngineError(f"{_NAME}: the request was not taken: {first_line(error)}") from error
        self._running[key] = _Running(handle, ends, request.logprobs is not None)

    def step(self) -> EngineStep:
        """One forward pass, and everything it brought. What the library raises ends the process."""
        keys: list[int] = []
        token_ids: list[int] = []
        outputs = list(self._at_next_step.values())
        self._at_next_step.clear()
        if self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        statuses = self._genai.GenerationStatus
        finished = []
        for key, run in self._running.items():
            # The status first: what is read afterwards is then complete if the status is final.
            status = run.handle.get_status()
            output = self._read(key, run)
            if status != statuses.RUNNING:
                finished.append(key)
                if output is None:
                    output = EngineOutput(key, [])
                if output.finish_kind is None:
                    output.finish_kind = "error"
                    output.error = self._why_ended(status, statuses)
            if output is None:
                continue
            if len(output.token_ids) == 1 and output.finish_kind is None and output.logprobs is None:
                keys.append(key)
                token_ids.append(output.token_ids[0])
            else:
                outputs.append(output)
        for key in finished:
            del self._running[key]
        return EngineStep(keys, token_ids, outputs)

    def abort(self, key: int) -> None:
        """Forget a request; the library frees its cache blocks at the next step."""
        self._at_next_step.pop(key, None)
        run = self._running.pop(key, None)
        if run is not None:
            run.handle.cancel()

    def has_work(self) -> bool:
        """Whether `step` has something to do, if only to free what was aborted."""
        return bool(self._at_next_step or self._running) or self._pipeline.has_non_finished_requests()

    def next_step_at_s(self) -> float | None:
        """None: there is never a reason to wait."""
        return None

    def flush_cache(self) -> bool:
        """Load the model again, which takes seconds: the library has no other way to drop its prefix cache."""
        if self.has_work():
            return False
        self._pipeline = None  # frees the old one first
        self._pipeline = self._source.open().handle
        return True

    def close(self) -> None:
        """Free the model and the cache."""
        for key in list(self._running):
            self.abort(key)
        self._pipeline = None

    def _check_ids(self, ids: list[int]) -> None:
        size = self._info.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= size):
            bad = next(token_id for token_id in ids if not 0 <= token_id < size)
            raise EngineError(f"{_NAME}: token id {bad} is outside the vocabulary of {size}")

    def _read(self, key: int, run: _Running) -> EngineOutput | None:
        """All that is there for one request; `read` gives one entry a call, so it is called until dry."""
        ids: list[int] = []
        logprobs: list[float | None] = []
        reason = None
        handle = run.handle
        while handle.can_read():
            for part in handle.read().values():
                ids.extend(part.generated_ids)
                logprobs.extend(part.generated_log_probs)
                reason = part.finish_reason
        if not ids:
            return None
        output = EngineOutput(key, ids)
        if run.wants_logprobs:
            output.logprobs = TokenLogprobs(chosen=logprobs)
        reasons = self._genai.GenerationFinishReason
        if reason == reasons.STOP:
            # The end id is part of the output, as its last.
            output.finish_kind = "stop"
            output.matched_id = ids[-1] if ids[-1] in run.ends else None
        elif reason == reasons.LENGTH:
            output.finish_kind = "length"
        return output

    def _why_ended(self, status: Any, statuses: Any) -> str:
        if status == statuses.IGNORED:
            return (
                f"the request does not fit into the engine's key-value cache of {self._cache_mb} MiB; "
                "raise --engine-cache-mb or shorten the request"
            )
        return f"the engine ended the request with status {status.name}"
