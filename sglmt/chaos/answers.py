"""From the bytes of an answer to what has to be equal, whichever API and mode it came through. Pure.

An `Answer` holds all that a disturbed run could get wrong: text, ids, log-probabilities, usage, finish. The
times and ids of an answer are left out, for those may differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import msgspec

from sglmt.chaos.client import HttpAnswer

Kind = Literal["chat", "completion", "generate"]
PATHS: dict[Kind, str] = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "generate": "/generate",
}


class AnswerError(Exception):
    """The server answered with an error, or with something that is no answer."""


@dataclass(frozen=True)
class Answer:
    """`token_ids`: only `/generate` has them. `logprobs`: entries as the API writes them, None when not asked for."""

    text: str
    token_ids: tuple[int, ...] | None
    logprobs: tuple[Any, ...] | None
    prompt_tokens: int
    completion_tokens: int
    finish: str
    rid: str

    def difference(self, other: Answer) -> str | None:
        """Where `other` is not the same answer; None when it is."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name != "rid" and mine != theirs:
                return f"{field.name}: {_where(theirs, mine)}"
        return None


def parse(kind: Kind, stream: bool, answer: HttpAnswer) -> Answer:
    """The Answer. Raises AnswerError with the server's own words, or what is missing."""
    if answer.status != 200:
        raise AnswerError(f"status {answer.status}: {answer.body[:300]!r}")
    try:
        if not stream:
            return _WHOLE[kind](msgspec.json.decode(answer.body))
        return _STREAMED[kind](_events(answer.body))
    except (KeyError, IndexError, TypeError, msgspec.MsgspecError) as error:
        raise AnswerError(f"no answer of {kind}: {error!r} in {answer.body[-300:]!r}") from error


def _events(body: bytes) -> list[dict[str, Any]]:
    """The JSON of every event but the terminator. Raises AnswerError without one, or for an error event."""
    events: list[dict[str, Any]] = []
    done = False
    for block in body.split(b"\n\n"):
        data = block.removeprefix(b"data: ")
        if block.startswith(b":") or not block:
            continue
        if data == block:
            raise AnswerError(f"error event: {block[:300]!r}")
        if data == b"[DONE]":
            done = True
            continue
        if done:
            raise AnswerError(f"data after the end: {block[:300]!r}")
        event: dict[str, Any] = msgspec.json.decode(data)
        if "error" in event:
            raise AnswerError(f"error event: {block[:300]!r}")
        events.append(event)
    if not done:
        raise AnswerError(f"the stream has no end: {body[-200:]!r}")
    return events


def _chat_whole(body: dict[str, Any]) -> Answer:
    choice = body["choices"][0]
    logprobs = None if choice["logprobs"] is None else tuple(map(_frozen, choice["logprobs"]["content"]))
    return _openai(body["id"], choice["message"]["content"], logprobs, choice["finish_reason"], body["usage"])


def _completion_whole(body: dict[str, Any]) -> Answer:
    choice = body["choices"][0]
    logprobs = None if choice["logprobs"] is None else tuple(_completion_entries(choice["logprobs"]))
    return _openai(body["id"], choice["text"], logprobs, choice["finish_reason"], body["usage"])


def _openai(rid: str, text: str, logprobs: tuple[Any, ...] | None, finish: str, usage: dict[str, Any]) -> Answer:
    if usage["total_tokens"] != usage["prompt_tokens"] + usage["completion_tokens"]:
        raise AnswerError(f"usage does not add up: {usage}")
    return Answer(text, None, logprobs, usage["prompt_tokens"], usage["completion_tokens"], finish, rid)


def _generate_whole(body: dict[str, Any]) -> Answer:
    meta = body["meta_info"]
    logprobs = meta.get("output_token_logprobs")
    return Answer(
        body["text"], tuple(body["output_ids"]), None if logprobs is None else tuple(map(_frozen, logprobs)),
        meta["prompt_tokens"], meta["completion_tokens"], _native_finish(meta["finish_reason"]), meta["id"],
    )  # fmt: skip


def _native_finish(finish: dict[str, Any]) -> str:
    if finish["type"] == "abort":
        raise AnswerError(f"aborted: {finish}")
    return f"{finish['type']} {finish.get('matched', finish.get('length'))}"


def _openai_stream(
    events: list[dict[str, Any]],
    text_of: Callable[[dict[str, Any]], str],
    entries_of: Callable[[dict[str, Any]], list[Any]],
) -> Answer:
    texts: list[str] = []
    logprobs: list[Any] | None = None
    finishes: list[str] = []
    usages = [event["usage"] for event in events if event["usage"] is not None]
    ids = {event["id"] for event in events}
    if len(usages) != 1 or events[-1]["choices"] or len(ids) != 1:
        raise AnswerError(f"{len(usages)} usages, ids {ids}, last event {events[-1]}")
    for event in events[:-1]:
        choice = event["choices"][0]
        if finishes and text_of(choice):
            raise AnswerError(f"text after the finish reason: {choice}")
        texts.append(text_of(choice))
        if choice["logprobs"] is not None:
            logprobs = [*(logprobs or []), *entries_of(choice["logprobs"])]
        if choice["finish_reason"] is not None:
            finishes.append(choice["finish_reason"])
    if len(finishes) != 1:
        raise AnswerError(f"{len(finishes)} finish reasons in one stream")
    entries = None if logprobs is None else tuple(logprobs)
    return _openai(ids.pop(), "".join(texts), entries, finishes[0], usages[0])


def _chat_stream(events: list[dict[str, Any]]) -> Answer:
    return _openai_stream(
        events,
        lambda choice: choice["delta"].get("content") or "",
        lambda logprobs: [_frozen(entry) for entry in logprobs["content"]],
    )


def _completion_stream(events: list[dict[str, Any]]) -> Answer:
    return _openai_stream(events, lambda choice: choice["text"], _completion_entries)


def _completion_entries(logprobs: dict[str, Any]) -> list[Any]:
    tops = logprobs["top_logprobs"] or [None] * len(logprobs["tokens"])
    columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"], tops)
    return [_frozen(list(entry)) for entry in zip(*columns, strict=True)]


def _generate_stream(events: list[dict[str, Any]]) -> Answer:
    """Events of a stream with `incremental_streaming_output`."""
    texts: list[str] = []
    ids: list[int] = []
    logprobs: list[Any] | None = None
    for event in events:
        meta = event["meta_info"]
        texts.append(event["text"])
        ids.extend(event["output_ids"])
        if meta["completion_tokens"] != len(ids):
            raise AnswerError(f"{len(ids)} ids came, {meta['completion_tokens']} are claimed")
        if "output_token_logprobs" in meta:
            logprobs = [*(logprobs or []), *map(_frozen, meta["output_token_logprobs"])]
    finishes = [event["meta_info"]["finish_reason"] for event in events]
    if any(finishes[:-1]) or not finishes[-1]:
        raise AnswerError(f"finish reason not in the last event, or not only there: {finishes[-3:]}")
    meta = events[-1]["meta_info"]
    return Answer(
        "".join(texts), tuple(ids), None if logprobs is None else tuple(logprobs), meta["prompt_tokens"],
        meta["completion_tokens"], _native_finish(meta["finish_reason"]), meta["id"],
    )  # fmt: skip


def _frozen(value: Any) -> Any:
    """Lists and dicts as tuples, so that answers can be compared and kept."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((name, _frozen(each)) for name, each in value.items())
    return value


def _where(got: Any, expected: Any) -> str:
    """The first place where two values differ, in a few words."""
    if isinstance(got, (str, tuple)) and type(got) is type(expected):
        at = next(
            (i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected))
        )
        return (
            f"differs at {at} of {len(expected)} (got {len(got)}): "
            f"got {got[at : at + 12]!r}, expected {expected[at : at + 12]!r}"
        )
    return f"got {got!r}, expected {expected!r}"


_WHOLE: dict[Kind, Callable[[dict[str, Any]], Answer]] = {
    "chat": _chat_whole,
    "completion": _completion_whole,
    "generate": _generate_whole,
}
_STREAMED: dict[Kind, Callable[[list[dict[str, Any]]], Answer]] = {
    "chat": _chat_stream,
    "completion": _completion_stream,
    "generate": _generate_stream,
}
