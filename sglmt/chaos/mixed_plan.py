"""What the clients of a mixed run ask for: every request drawn from a seed. Pure.

All kinds of generation (chat, completion, `/generate`), batches, several answers a prompt, texts and token ids,
log-probabilities of every sort, stop strings, streamed and whole. The prompts are few, so that what workers remember of
them is complete early; what makes the answers differ is the seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from sglmt.chaos.answers import PATHS, Kind
from sglmt.chaos.plan import PROMPTS

Action = Literal["answer", "abort", "leave", "duplicate", "embed", "refused"]
_SHARES: tuple[tuple[Action, float], ...] = (
    ("answer", 0.64), ("abort", 0.06), ("leave", 0.08), ("duplicate", 0.03), ("embed", 0.09), ("refused", 0.10),
)  # fmt: skip
PROMPT_VARIANTS = 4
IDS_OF_PROMPTS = 1000  # a prompt of ids takes them from the beginning of the vocabulary, behind the special ones
FIRST_ID = 300
LONG_TOKENS = (250, 400)  # of requests that are meant to be ended before they end


@dataclass(frozen=True)
class Ask:
    """One generation request. `logprobs` is the number of alternatives beside the chosen token, None: not asked
    for; `stops_wanted`: its stop strings are to be found in its own text first."""

    number: int
    kind: Kind
    prompts: tuple[str | tuple[int, ...], ...]
    is_batch: bool
    n: int
    max_tokens: int
    stream: bool
    logprobs: int | None = None
    prompt_logprobs: bool = False
    incremental: bool = True
    stops_wanted: bool = False
    stops: tuple[str, ...] = ()
    no_stop_trim: bool = False
    seed: int | None = None
    rid: str | None = None

    @property
    def path(self) -> str:
        """Of the endpoint."""
        return PATHS[self.kind]

    @property
    def choices(self) -> int:
        """How many answers it gets."""
        return len(self.prompts) * self.n

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        common = {"stream": self.stream, **({} if self.rid is None else {"rid": self.rid})}
        if self.kind == "generate":
            return {**common, **self._native()}
        body = {**common, **self._sampling("max_tokens")}
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if self.kind == "chat":
            body["messages"] = [{"role": "user", "content": self.prompts[0]}]
            if self.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": self.logprobs}
        else:
            body["prompt"] = list(self.prompts) if self.is_batch else self.prompts[0]
            if self.logprobs is not None:
                body["logprobs"] = self.logprobs
        return body

    def _native(self) -> dict[str, Any]:
        prompts: Any = list(self.prompts) if self.is_batch else self.prompts[0]
        body: dict[str, Any] = {
            "text" if isinstance(self.prompts[0], str) else "input_ids": prompts,
            "sampling_params": self._sampling("max_new_tokens"),
            "incremental_streaming_output": self.incremental,
        }
        if self.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": self.logprobs}
            body |= {"logprob_start_len": 0} if self.prompt_logprobs else {}
        return body

    def _sampling(self, limit: str) -> dict[str, Any]:
        values: dict[str, Any] = {limit: self.max_tokens, "n": self.n, "seed": self.seed}
        values |= {"stop": list(self.stops) or None, "no_stop_trim": self.no_stop_trim or None}
        return {name: value for name, value in values.items() if value is not None}


def draw_action(dice: random.Random) -> Action:
    """What a request is there for."""
    return dice.choices([action for action, _ in _SHARES], [share for _, share in _SHARES])[0]


def draw_ask(dice: random.Random, number: int) -> Ask:
    """A request whose answer is awaited."""
    kind: Kind = dice.choice(("chat", "completion", "generate"))
    count = 1 if kind == "chat" else dice.choice((1, 1, 1, 2, 3, 4))
    logprobs = dice.choice((None, None, None, 0, 2))
    stops = dice.random() < 0.3
    return Ask(
        number=number,
        kind=kind,
        prompts=draw_prompts(dice, kind, count),
        is_batch=count > 1 or (kind != "chat" and dice.random() < 0.1),
        n=dice.choice((1, 1, 1, 2, 3)),
        max_tokens=dice.choice((1, dice.randint(2, 40), dice.randint(8, 80))),
        stream=dice.random() < 0.5,
        logprobs=logprobs,
        prompt_logprobs=kind == "generate" and dice.random() < 0.3,
        incremental=dice.random() < 0.7,
        stops_wanted=stops,
        no_stop_trim=stops and dice.random() < 0.3,
        seed=dice.randrange(2**31) if dice.random() < 0.8 else None,
        rid=f"ask-{number}" if dice.random() < 0.3 else None,
    )


def draw_long_ask(dice: random.Random, number: int, rid: str | None) -> Ask:
    """A request with one prompt that runs for long; `rid` is its name."""
    kind: Kind = dice.choice(("chat", "completion", "generate"))
    return Ask(
        number=number,
        kind=kind,
        prompts=draw_prompts(dice, kind, 1),
        is_batch=False,
        n=dice.choice((1, 1, 2)),
        max_tokens=dice.randint(*LONG_TOKENS),
        stream=dice.random() < 0.7,
        logprobs=dice.choice((None, None, 0)),
        seed=dice.randrange(2**31),
        rid=rid,
    )


def draw_prompts(dice: random.Random, kind: Kind, count: int) -> tuple[str | tuple[int, ...], ...]:
    """Texts, or rows of ids."""
    if kind != "chat" and dice.random() < 0.3:
        return tuple(_ids(dice) for _ in range(count))
    return tuple(draw_text(dice) for _ in range(count))


def draw_text(dice: random.Random) -> str:
    """One of the prompts."""
    return f"{dice.choice(PROMPTS)} ({dice.randrange(PROMPT_VARIANTS)})"


def _ids(dice: random.Random) -> tuple[int, ...]:
    return tuple(FIRST_ID + dice.randrange(IDS_OF_PROMPTS) for _ in range(dice.randint(1, 12)))
