"""From the bytes of an answer, whole or cut off, to what came of each choice. Pure.

Everything is joined here, so that the judge compares one thing whichever API and mode it came through. A stream of
`/generate` that repeats everything must only ever grow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sglmt.chaos.answers import AnswerError
from sglmt.chaos.client import HttpAnswer
from sglmt.chaos.mixed_plan import Ask

Finish = tuple[str, Any]  # (stop, length or abort; what matched, the length, or the code)


@dataclass
class Choice:
    """One answer so far. `tops`: (id or None, log-probability) of each token's alternatives."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    chosen: list[float | None] = field(default_factory=list)
    tops: list[list[tuple[int | None, float]]] = field(default_factory=list)
    input_chosen: list[float | None] = field(default_factory=list)
    finish: Finish | None = None
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass
class Received:
    """All of an answer. `errors` are error events; `done`: the terminator was there (or the answer is no stream)."""

    choices: dict[int, Choice] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    usage: dict[str, Any] | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    def choice(self, index: int) -> Choice:
        """That choice, made when it is first seen."""
        return self.choices.setdefault(index, Choice())


def read(ask: Ask, answer: HttpAnswer) -> Received:
    """What a 200 says, as far as it goes. Raises AnswerError for what is no answer of this API."""
    received = Received()
    try:
        if not ask.stream:
            _READ[ask.kind](ask, received, msgspec.json.decode(answer.body))
            received.done = True
        else:
            _read_stream(ask, received, answer.body)
    except (KeyError, IndexError, TypeError, msgspec.MsgspecError) as error:
        raise AnswerError(f"no answer of {ask.kind}: {error!r} in {answer.body[-300:]!r}") from error
    return received


def _read_stream(ask: Ask, received: Received, body: bytes) -> None:
    *blocks, rest = body.split(b"\n\n")  # what follows the last separator is an event that was cut off
    for block in blocks:
        if received.done:
            raise AnswerError(f"data after the end: {block[:200]!r}")
        if block.startswith(b":"):
            continue
        data = block.removeprefix(b"data: ")
        if data == block:
            raise AnswerError(f"no event: {block[:200]!r}")
        if data == b"[DONE]":
            received.done = True
            continue
        event = msgspec.json.decode(data)
        if "error" in event:
            received.errors.append(event["error"])
        else:
            _READ[ask.kind](ask, received, event)
    if received.done and rest:
        raise AnswerError(f"data after the end: {rest[:200]!r}")


def _read_openai(received: Received, body: dict[str, Any], take: Callable[[Choice, dict[str, Any]], None]) -> None:
    received.names.add(body["id"])
    if body.get("usage") is not None:
        if received.usage is not None:
            raise AnswerError("two usages in one answer")
        received.usage = body["usage"]
    for each in body["choices"]:
        choice = received.choice(each["index"])
        if choice.finish is not None:
            raise AnswerError(f"choice {each['index']} goes on after its finish reason")
        take(choice, each)
        if each["finish_reason"] is not None:
            choice.finish = (each["finish_reason"], None)


def _read_chat(ask: Ask, received: Received, body: dict[str, Any]) -> None:
    def take(choice: Choice, each: dict[str, Any]) -> None:
        choice.text += each["delta" if ask.stream else "message"].get("content") or ""
        for entry in (each["logprobs"] or {}).get("content") or ():
            choice.chosen.append(entry["logprob"])
            choice.tops.append([(None, top["logprob"]) for top in entry["top_logprobs"]])

    _read_openai(received, body, take)


def _read_completion(ask: Ask, received: Received, body: dict[str, Any]) -> None:
    def take(choice: Choice, each: dict[str, Any]) -> None:
        choice.text += each["text"]
        logprobs = each["logprobs"]
        if logprobs is not None:
            choice.chosen += logprobs["token_logprobs"]
            lengths = {len(column) for column in logprobs.values() if column is not None}
            if len(lengths) != 1:
                raise AnswerError(f"columns of log-probabilities of different lengths: {lengths}")

    _read_openai(received, body, take)


def _read_generate(ask: Ask, received: Received, body: Any) -> None:
    """One event, or the whole body: an object or a list of them."""
    several = ask.is_batch or ask.n > 1
    for index, each in enumerate(body) if isinstance(body, list) else ((body["index"] if several else 0, body),):
        choice, meta = received.choice(index), each["meta_info"]
        if choice.finish is not None:
            raise AnswerError(f"choice {index} goes on after its finish reason")
        received.names.add(meta["id"])
        if ask.stream and ask.incremental:
            choice.text += each["text"]
            choice.ids += each["output_ids"]
        else:
            if not each["text"].startswith(choice.text) or each["output_ids"][: len(choice.ids)] != choice.ids:
                raise AnswerError(f"choice {index} does not only grow: {each['text'][:200]!r}")
            choice.text, choice.ids = each["text"], each["output_ids"]
            choice.chosen, choice.tops, choice.input_chosen = [], [], []
        choice.chosen += [entry[0] for entry in meta.get("output_token_logprobs", ())]
        choice.tops += [[(e[1], e[0]) for e in entries or ()] for entries in meta.get("output_top_logprobs", ())]
        choice.input_chosen += [entry[0] for entry in meta.get("input_token_logprobs", ())]
        if meta["completion_tokens"] != len(choice.ids):
            raise AnswerError(f"{len(choice.ids)} ids, completion_tokens says {meta['completion_tokens']}")
        choice.meta = meta
        reason = meta["finish_reason"]
        if reason is not None:
            detail = reason.get("matched", reason.get("length", reason.get("code")))
            choice.finish = (reason["type"], detail)


_READ: dict[str, Callable[[Ask, Received, Any], None]] = {
    "chat": _read_chat,
    "completion": _read_completion,
    "generate": _read_generate,
}
