"""What the clients ask for: a fixed set of requests, from a seed. Pure.

Chats, completions and `/generate` in turn; a quarter with log-probabilities; lengths that end before, during and
after any one outage; prompts of many scripts. Some get a stop string that is known to occur in their text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from sglmt.chaos.answers import PATHS, Answer, Kind

PROMPTS = (
    "Tell me about the sea.",
    "鑫龘 是什么意思？",
    "Почему небо голубое?",
    "कृपया एक कहानी सुनाओ",
    "🔥👩‍👩‍👧‍👦🇫🇷 emoji please",
    "สวัสดีชาวโลก",
    "¿Qué hora es?",
    "Zażółć gęślą jaźń",
    "cafe\u0301 and naïve",
    "مرحبا بالعالم",
    "日本語で話してください。",
    "def f(x):\n    return",
)
STOP_CHARS = 3


@dataclass(frozen=True)
class Wanted:
    """One request, without the mode it is sent in."""

    number: int
    kind: Kind
    prompt: str
    max_tokens: int
    logprobs: bool
    seed: int | None
    stop: str | None = None
    ignore_eos: bool = False

    @property
    def path(self) -> str:
        """Of the endpoint."""
        return PATHS[self.kind]

    def body(self, stream: bool) -> dict[str, Any]:
        """The JSON body."""
        if self.kind == "generate":
            return self._native_body(stream)
        body: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": 0, "stream": stream}
        if self.kind == "chat":
            body["messages"] = [{"role": "user", "content": self.prompt}]
            body.update({"logprobs": True} if self.logprobs else {})
        else:
            body["prompt"] = self.prompt
            body.update({"logprobs": 0} if self.logprobs else {})
        if stream:
            body["stream_options"] = {"include_usage": True}
        return {**body, **self._optional()}

    def _native_body(self, stream: bool) -> dict[str, Any]:
        params = {"max_new_tokens": self.max_tokens, "temperature": 0, **self._optional()}
        body = {"text": self.prompt, "sampling_params": params, "stream": stream, "incremental_streaming_output": True}
        return {**body, "return_logprob": True} if self.logprobs else body

    def _optional(self) -> dict[str, Any]:
        values = {"seed": self.seed, "stop": self.stop, "ignore_eos": self.ignore_eos or None}
        return {name: value for name, value in values.items() if value is not None}


def make_plan(count: int, seed: int, tokens: tuple[int, int], ignore_eos: bool) -> list[Wanted]:
    """`count` different requests for `tokens[0]` to `tokens[1]` new tokens each."""
    dice = random.Random(seed)
    kinds: tuple[Kind, ...] = ("chat", "completion", "generate")
    return [
        Wanted(
            number=number,
            kind=kinds[number % 3],
            prompt=f"{PROMPTS[number % len(PROMPTS)]} ({number})",
            max_tokens=dice.randint(*tokens),
            logprobs=number % 4 == 0,
            seed=dice.randrange(2**31) if number % 2 else None,
            ignore_eos=ignore_eos,
        )
        for number in range(count)
    ]


def with_stop(wanted: Wanted, answer: Answer) -> Wanted:
    """The same request ending at a stop string from its own text, two thirds in; itself when it has none there."""
    at = len(answer.text) * 2 // 3
    stop = answer.text[at : at + STOP_CHARS]
    if len(stop) < STOP_CHARS or not stop.strip() or "\ufffd" in stop:
        return wanted
    return replace(wanted, stop=stop)
