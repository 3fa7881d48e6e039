"""The simulator engine: deterministic tokens at a set pace. Runs in the scheduler process; talks to nobody.

For load tests and demonstrations, never the default: clients are told (`is_simulator`). The next id depends
only on the seed and the ids so far, so a request continued after a crash ends up with the ids it would have had.
All running requests advance by one token at every tick of one shared clock; a late loop gets one token, not a
burst.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from zlib import crc32

from sglmt import __version__
from sglmt.engines.base import NOTHING, Capability, EngineInfo, EngineOutput, EngineRequest, EngineStep
from sglmt.engines.simulator_runs import PlainRuns
from sglmt.engines.token_source import (
    EMBEDDING_DIMENSIONS,
    INCREMENT,
    MASK,
    MULTIPLIER,
    NUMBER_SHIFT,
    chosen_logprob,
    embedding_of,
    fold,
    initial_state,
    logprob_of,
    seed_of,
    top_logprobs,
)
from sglmt.errors import EngineError, EngineRefusal
from sglmt.messages.sampling import LogprobSpec, TokenLogprobs

_NAME = "simulator"
_LARGEST_ID = 2**32 - 1  # what a message column can carry

# What sampling settings would change has no meaning without a model: accepted and without effect.
_CAPABILITIES = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "penalties", "logit_bias"), Capability.APPROXIMATE),
    **dict.fromkeys(("chosen_logprobs", "top_logprobs", "token_ids_logprobs", "prompt_logprobs"), Capability.EXACT),
    **dict.fromkeys(
        ("generation", "seed", "stop_token_ids", "min_new_tokens", "embeddings", "lora", "update_weights"),
        Capability.EXACT,
    ),
    **dict.fromkeys(("json_schema", "regex", "ebnf"), Capability.REFUSED),
    "continue.grammar": Capability.REFUSED,
}
_CONTINUING = ("continue.greedy", "continue.sampled", "continue.seed", "continue.penalties", "continue.logprobs")


class _Running:
    """One request that may end by an id or wants log-probabilities: hash state, output position, where it ends."""

    __slots__ = ("ends", "input_logprobs", "key", "limit", "logprobs", "min_new", "position", "state")

    def __init__(self, request: EngineRequest, state: int, limit: int, ends: frozenset[int]) -> None:
        self.key = request.key
        self.state = state
        self.position = len(request.prefix_ids)  # output ids so far
        self.limit = limit
        self.min_new = request.sampling.min_new_tokens
        self.ends = ends
        self.logprobs = request.logprobs
        self.input_logprobs: TokenLogprobs | None = None


class SimulatorEngine:
    """An `Engine` without a model.

    `step_s`: seconds between ticks, 0: every `step` is a tick. `script`: ids to emit instead of seeded ones, by
    output position, from the beginning again when used up; they may be ids no tokenizer knows (a negative one
    is sent as the largest a message can carry). Seeded ids are never special or EOS ids, so only the token
    limit, a stop token id, or an EOS id in the script ends a request. A prompt that holds `poison_id` kills the
    process inside `step`, and `continuing` is what is declared of requests that continue, for tests of what follows.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        context_length: int,
        eos_token_ids: Iterable[int],
        special_token_ids: Iterable[int],
        step_s: float,
        seed: int,
        script: Sequence[int] | None,
        poison_id: int | None = None,
        max_total_tokens: int | None = None,
        continuing: str = Capability.EXACT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises EngineError when the vocabulary has no id that may be emitted or the script is empty."""
        self._eos = frozenset(eos_token_ids)
        excluded = self._eos.union(special_token_ids)
        self._ids = [token_id for token_id in range(vocab_size) if token_id not in excluded]
        if not self._ids:
            raise EngineError(f"simulator: all {vocab_size} ids of the vocabulary are special")
        if script is not None and not script:
            raise EngineError("simulator: the script of token ids is empty")
        self._script = None if script is None else [_sendable(token_id) for token_id in script]
        self._poison_id = poison_id
        self._step_s = step_s
        self._seed = seed
        self._clock = clock
        self._adapters: dict[str, int] = {}  # name → what it adds to the seed
        self._plain = PlainRuns(self._ids)
        self._running: dict[int, _Running] = {}  # all others
        self._poisoned: set[int] = set()
        self._at_next_step: dict[int, EngineOutput] = {}  # whole answers that need no tick
        self._next_tick_s: float | None = None
        self._info = EngineInfo(
            name=_NAME,
            version=__version__,
            context_length=context_length,
            vocab_size=vocab_size,
            max_total_tokens=max_total_tokens,
            capabilities=_CAPABILITIES | dict.fromkeys(_CONTINUING, continuing),
            is_simulator=True,
            embedding_dimensions=EMBEDDING_DIMENSIONS,
        )

    def info(self) -> EngineInfo:
        """Constant."""
        return self._info

    def check(self, request: EngineRequest) -> None:
        """Raise EngineRefusal for grammars (there is no model they could act on) and unknown adapters."""
        sampling = request.sampling
        for feature, value in (
            ("json_schema", sampling.json_schema),
            ("regex", sampling.regex),
            ("ebnf", sampling.ebnf),
        ):
            if value is not None:
                raise EngineRefusal(f"engine {_NAME} does not support {feature}; use an engine with a model")
        if request.lora_name is not None and request.lora_name not in self._adapters:
            raise EngineRefusal(f"engine {_NAME} has no adapter {request.lora_name!r} loaded")

    def submit(self, request: EngineRequest) -> None:
        """Take a request; its first id comes at the next tick. Raises EngineRefusal or EngineError."""
        self.check(request)
        key = request.key
        if key in self._plain or key in self._running or key in self._at_next_step:
            raise EngineError(f"simulator: request {key} is already running")
        room = self._info.context_length - len(request.prompt_ids)
        if room < 0:
            raise EngineError(
                f"simulator: a prompt of {len(request.prompt_ids)} tokens is longer than the context of "
                f"{self._info.context_length}"
            )
        if request.embedding:
            vector = embedding_of(request.prompt_ids)
            self._at_next_step[key] = EngineOutput(key, [], "stop", embedding=vector, cached_tokens=0)
            return
        self._start(request, min(request.sampling.max_new_tokens, room))

    def step(self) -> EngineStep:
        """One id for every running request when the tick is due; answers that need no tick at once."""
        if self._poisoned:
            os.kill(os.getpid(), signal.SIGKILL)  # as an engine dies: without a word
        outputs: list[EngineOutput] = []
        if self._at_next_step:
            outputs.extend(self._at_next_step.values())
            self._at_next_step.clear()
        if not (self._plain.keys or self._running) or not self._tick_is_due():
            return EngineStep((), (), outputs) if outputs else NOTHING
        step = self._plain.advance()
        if self._running:
            self._advance(outputs)
        return EngineStep(step.keys, step.token_ids, [*outputs, *step.outputs]) if outputs else step

    def abort(self, key: int) -> None:
        """Forget a request; unknown keys are ignored."""
        self._plain.discard(key)
        self._running.pop(key, None)
        self._poisoned.discard(key)
        self._at_next_step.pop(key, None)

    def has_work(self) -> bool:
        """Whether any request is running."""
        return bool(self._plain.keys or self._running or self._at_next_step)

    def next_step_at_s(self) -> float | None:
        """Time of the next tick; None when `step` brings something now, or nothing is running."""
        if self._at_next_step or self._step_s == 0 or not (self._plain.keys or self._running):
            return None
        return self._next_tick_s

    def flush_cache(self) -> bool:
        """There is no prefix cache; answers as an engine with one would."""
        return not self.has_work()

    def load_adapter(self, name: str, path: str) -> None:
        """An adapter is a seed of its own, made from name and path; no file is read."""
        self._adapters[name] = seed_of(f"{name}\0{path}")

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        self._adapters.pop(name, None)

    def update_weights(self, path: str) -> None:
        """New weights are a new seed, made from the path; no file is read."""
        self._seed = seed_of(path)

    def close(self) -> None:
        """Forget everything."""
        self._plain.clear()
        self._running.clear()
        self._poisoned.clear()
        self._at_next_step.clear()

    def _is_running(self) -> bool:
        """Whether any request waits for the next tick."""
        return bool(self._plain.keys or self._running)

    def _start(self, request: EngineRequest, limit: int) -> None:
        key, sampling, spec = request.key, request.sampling, request.logprobs
        adapter = 0 if request.lora_name is None else self._adapters[request.lora_name]
        before_prompt = initial_state(self._seed ^ adapter, sampling.seed)
        input_logprobs = None
        if spec is not None and spec.prompt_from is not None:
            input_logprobs = self._prompt_logprobs(before_prompt, request.prompt_ids, spec, spec.prompt_from)
        tokens = limit - len(request.prefix_ids)
        if tokens <= 0:
            self._at_next_step[key] = EngineOutput(key, [], "length", input_logprobs=input_logprobs, cached_tokens=0)
            return
        state = fold(fold(before_prompt, request.prompt_ids), request.prefix_ids)
        if not self._is_running():
            self._next_tick_s = self._clock() + self._step_s
        if self._poison_id is not None and self._poison_id in request.prompt_ids:
            self._poisoned.add(key)
        if spec is None and self._script is None and not sampling.stop_token_ids:  # seeded ids are never EOS
            self._plain.add(key, state, tokens)
            return
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos)
        run = self._running[key] = _Running(request, state, limit, ends)
        run.input_logprobs = input_logprobs

    def _tick_is_due(self) -> bool:
        """Whether a tick is due. If so the next one is set: on the grid, or afresh when a whole step late."""
        if self._step_s == 0:
            return True
        now, due = self._clock(), self._next_tick_s
        if due is not None and now < due:
            return False
        following = now if due is None else due
        following += self._step_s
        self._next_tick_s = following if following > now else now + self._step_s
        return True

    def _advance(self, outputs: list[EngineOutput]) -> None:
        """Append one output for each request that is not plain; take out those that end."""
        ids, count, script = self._ids, len(self._ids), self._script
        finished: list[int] = []
        for run in self._running.values():
            state, position = run.state, run.position
            if script is None:
                token_id = ids[(((state * MULTIPLIER + INCREMENT) & MASK) >> NUMBER_SHIFT) % count]
            else:
                token_id = script[position % len(script)]
            run.state = crc32(token_id.to_bytes(4, "little"), state)
            run.position = position = position + 1
            output = EngineOutput(run.key, [token_id])
            if token_id in run.ends and position >= run.min_new:
                output.finish_kind, output.matched_id = "stop", token_id
                finished.append(run.key)
            elif position >= run.limit:
                output.finish_kind = "length"
                finished.append(run.key)
            if run.logprobs is not None:
                output.logprobs = self._logprobs([state], [token_id], run.logprobs)
                output.input_logprobs, run.input_logprobs = run.input_logprobs, None
            outputs.append(output)
        for key in finished:
            del self._running[key]

    def _prompt_logprobs(self, state: int, prompt: Sequence[int], spec: LogprobSpec, first: int) -> TokenLogprobs:
        """One entry for every prompt position from `first`; that of position 0 is empty: it has no context."""
        states: list[int | None] = []
        for position, token_id in enumerate(prompt):
            if position >= first:
                states.append(None if position == 0 else state)
            state = fold(state, (token_id,))
        return self._logprobs(states, prompt[first:], spec)

    def _logprobs(self, states: Sequence[int | None], ids: Sequence[int], spec: LogprobSpec) -> TokenLogprobs:
        vocab_size = self._info.vocab_size
        pairs = list(zip(states, ids, strict=True))
        top = requested = None
        if spec.top_logprobs_num:
            top = [
                [] if state is None else top_logprobs(state, chosen, spec.top_logprobs_num, vocab_size)
                for state, chosen in pairs
            ]
        if spec.token_ids:
            requested = [
                []
                if state is None
                else [(wanted, logprob_of(state, chosen, wanted, vocab_size)) for wanted in spec.token_ids]
                for state, chosen in pairs
            ]
        chosen_values = [None if state is None else chosen_logprob(state) for state, _ in pairs]
        return TokenLogprobs(chosen=chosen_values, top=top, requested=requested)


def _sendable(token_id: int) -> int:
    """Ids travel as unsigned 32-bit numbers; one outside becomes the largest, which no vocabulary has."""
    return token_id if 0 <= token_id <= _LARGEST_ID else _LARGEST_ID
