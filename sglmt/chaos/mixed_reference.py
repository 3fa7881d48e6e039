"""What a server must answer, computed without one: the simulator in this process, the model's template, and the
tokenizer's decoding of all ids at once.

Nothing of the way an answer takes through the processes is used: no incremental decoding, no matching in a stream.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path

from sglmt.chaos.mixed_plan import Ask
from sglmt.engines.base import EngineRequest
from sglmt.engines.simulator import SimulatorEngine
from sglmt.engines.token_source import embedding_of
from sglmt.errors import SglmtError
from sglmt.messages.sampling import LogprobSpec, SamplingParams
from sglmt.server_args import ServerArgs
from sglmt.tokenizer.default_model import default_model_path
from sglmt.tokenizer.loading import load_chat_template, load_tokenizer
from sglmt.tokenizer.resolve import resolve_model

STOP_CHARS = (1, 4)
NEVER = "@@never in any text@@"


@dataclass(frozen=True)
class Expected:
    """One answer. `top` and `input_top`: (id, log-probability) alternatives of each token."""

    text: str
    ids: tuple[int, ...]
    finish: str
    matched: str | None
    prompt_tokens: int
    chosen: tuple[float | None, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    input_chosen: tuple[float | None, ...] = ()


class Reference:
    """An engine of the same seed, and the default model's tokenizer and template."""

    def __init__(self, cache_dir: Path) -> None:
        info = resolve_model(default_model_path(), None, None, cache_dir)
        self.tokenizer = load_tokenizer(info)
        template = load_chat_template(info)
        if template is None:
            raise SglmtError(f"model {info.model_path} has no chat template; a mixed run needs one")
        self._template = template
        self.vocab_size = info.vocab_size
        self.context_length = info.context_length
        self._engine = SimulatorEngine(
            vocab_size=info.vocab_size,
            context_length=info.context_length,
            eos_token_ids=info.eos_token_ids,
            special_token_ids=info.special_token_ids,
            step_s=0.0,
            seed=ServerArgs().simulator_seed,
            script=None,
        )

    def embedding(self, prompt: str | tuple[int, ...]) -> tuple[list[float], int]:
        """(vector, prompt tokens)."""
        ids = list(prompt) if isinstance(prompt, tuple) else self.tokenizer.encode(prompt)
        return embedding_of(ids), len(ids)

    def expected(self, ask: Ask) -> list[Expected]:
        """Every choice, prompt by prompt."""
        answers: list[Expected] = []
        for prompt in ask.prompts:
            prompt_ids = self._prompt_ids(ask, prompt)
            for k in range(ask.n):
                if k and ask.seed is None:
                    answers.append(answers[-1])
                else:
                    answers.append(self._choice(ask, prompt_ids, k))
        return answers

    def with_stops(self, ask: Ask, at: float) -> Ask:
        """The same request ending at text from its first answer (from the part `at` of it on), if that is text."""
        text = self._choice(replace(ask, stops=()), self._prompt_ids(ask, ask.prompts[0]), 0).text
        start = int(len(text) * at)
        stop = text[start : start + STOP_CHARS[0] + ask.number % STOP_CHARS[1]]
        if not stop.strip() or "\ufffd" in stop:
            return replace(ask, stops=(NEVER,))
        return replace(ask, stops=(NEVER, stop) if ask.number % 2 else (stop,))

    def _prompt_ids(self, ask: Ask, prompt: str | tuple[int, ...]) -> list[int]:
        if isinstance(prompt, tuple):
            return list(prompt)
        if ask.kind != "chat":
            return self.tokenizer.encode(prompt)
        rendered = self._template.render([{"role": "user", "content": prompt}])
        return self.tokenizer.encode(rendered, add_special_tokens=False)

    def _choice(self, ask: Ask, prompt_ids: list[int], k: int) -> Expected:
        seed = None if ask.seed is None else ask.seed + k
        spec = None
        if ask.logprobs is not None:
            spec = LogprobSpec(top_logprobs_num=ask.logprobs, prompt_from=0 if ask.prompt_logprobs else None)
        sampling = SamplingParams(max_new_tokens=ask.max_tokens, seed=seed)
        request = EngineRequest(key=1, prompt_ids=prompt_ids, prefix_ids=[], sampling=sampling, logprobs=spec)
        self._engine.submit(request)
        ids: list[int] = []
        chosen: list[float | None] = []
        top: list[tuple[tuple[int, float], ...]] = []
        input_chosen: list[float | None] = []
        finish: str | None = None
        while finish is None:
            (output,) = self._engine.step().all_outputs()
            ids += output.token_ids
            finish = output.finish_kind
            if output.logprobs is not None:
                chosen += output.logprobs.chosen
                top += [tuple(each) for each in output.logprobs.top or ()]
            if output.input_logprobs is not None:
                input_chosen += output.input_logprobs.chosen
        count, text, matched = self._cut(ids, ask)
        return Expected(
            text=text,
            ids=tuple(ids[:count]),
            finish=finish if matched is None else "stop",
            matched=matched,
            prompt_tokens=len(prompt_ids),
            chosen=tuple(chosen[:count]),
            top=tuple(top[:count]),
            input_chosen=tuple(input_chosen),
        )

    def _cut(self, ids: list[int], ask: Ask) -> tuple[int, str, str | None]:
        """(ids, text, stop string) up to where the first stop string is complete; of several the first to end."""
        decode = self.tokenizer.decode
        text = decode(ids)
        if not any(stop in text for stop in ask.stops):
            return len(ids), text, None
        # Stop strings hold no U+FFFD, so once one is in the text it stays there: that can be searched by halves.
        count = bisect_left(
            range(1, len(ids) + 1), True, key=lambda k: any(stop in decode(ids[:k]) for stop in ask.stops)
        )
        text = decode(ids[: count + 1])
        ends = [(text.index(stop) + len(stop), -len(stop), stop) for stop in ask.stops if stop in text]
        end, _, stop = min(ends)
        return count + 1, text[:end] if ask.no_stop_trim else text[: end - len(stop)], stop
