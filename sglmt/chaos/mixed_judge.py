"""Whether an answer is the one the reference gives, or a true beginning of it. Pure.

Every function returns what is wrong in words, None when nothing is.
"""

from __future__ import annotations

import base64
import struct
from typing import Any

import msgspec

from sglmt.chaos.client import HttpAnswer
from sglmt.chaos.mixed_answers import Choice, Received
from sglmt.chaos.mixed_plan import Ask
from sglmt.chaos.mixed_reference import Expected

ERROR_FIELDS = {"message", "type", "param", "code"}


def whole(ask: Ask, expected: list[Expected], received: Received) -> str | None:
    """Of an answer that nobody disturbed."""
    if received.errors or not received.done:
        return f"errors {received.errors}, terminator {received.done}"
    if sorted(received.choices) != list(range(ask.choices)):
        return f"choices {sorted(received.choices)} of {ask.choices}"
    for index, one in enumerate(expected):
        if wrong := _choice(ask, one, received.choices[index]):
            return f"choice {index}: {wrong}"
    return _names(ask, received) or (_usage(ask, expected, received.usage) if ask.kind != "generate" else None)


def beginning(ask: Ask, expected: list[Expected], received: Received) -> str | None:
    """Of an answer that was cut off, or aborted: all that came is the beginning of what was to come."""
    for index, choice in received.choices.items():
        one = expected[index]
        if choice.finish is not None and choice.finish[0] != "abort":
            if wrong := _choice(ask, one, choice):
                return f"choice {index}, which had ended: {wrong}"
            continue
        is_last = choice.finish is not None or bool(received.errors)
        if not one.text.startswith(choice.text) and not (is_last and _ends_in_half(choice.text, one.text)):
            return f"choice {index}: {choice.text[-80:]!r} is no beginning of {one.text[: len(choice.text) + 20]!r}"
        if tuple(choice.ids) != one.ids[: len(choice.ids)]:
            return f"choice {index}: ids {choice.ids[-8:]} at {len(choice.ids)} are not those expected"
        if tuple(choice.chosen) != one.chosen[: len(choice.chosen)]:
            return f"choice {index}: log-probabilities are not those expected"
    return None


def aborted(received: Received) -> int:
    """How many of its choices say that they were aborted."""
    codes = [error["code"] for error in received.errors]
    codes += [choice.finish[1] for choice in received.choices.values() if choice.finish and choice.finish[0] == "abort"]
    return codes.count("aborted")


def error(path: str, answer: HttpAnswer, status: int, code: str | None, param: str | None = None) -> str | None:
    """Of a refusal: its shape, and that it is the one expected. `param` is not looked at when None."""
    if answer.headers.get("content-type") != "application/json":
        return f"error of type {answer.headers.get('content-type')!r}: {answer.body[:200]!r}"
    try:
        body: dict[str, Any] = msgspec.json.decode(answer.body, type=dict[str, Any])
        told: dict[str, Any] = msgspec.convert(body["error"], dict[str, Any])
    except (msgspec.MsgspecError, KeyError):
        return f"an error without an error object: {answer.body[:200]!r}"
    if set(told) != ERROR_FIELDS or not told["message"] or not told["type"]:
        return f"an error object with {told}"
    if path.startswith("/v1/") != ("message" not in body):
        return f"an error in the other API's shape: {answer.body[:200]!r}"
    if (answer.status, told["code"]) != (status, code) or (param is not None and told["param"] != param):
        return f"got {answer.status} {told}, expected {status} {code} {param or ''}"
    return None


def vectors(path: str, as_base64: bool, expected: list[tuple[list[float], int]], answer: HttpAnswer) -> str | None:
    """Of an answer with embeddings."""
    body = msgspec.json.decode(answer.body)
    if path == "/encode":
        rows = body if isinstance(body, list) else [body]
        got = [(row["embedding"], row["meta_info"]["prompt_tokens"]) for row in rows]
    else:
        got = [(each["embedding"], None) for each in body["data"]]
        tokens = sum(count for _, count in expected)
        if body["usage"] != {"prompt_tokens": tokens, "total_tokens": tokens}:
            return f"usage {body['usage']}, expected {tokens} tokens"
    if len(got) != len(expected):
        return f"{len(got)} vectors for {len(expected)} texts"
    for index, ((vector, tokens_told), (right, count)) in enumerate(zip(got, expected, strict=True)):
        numbers = _decoded(vector) if as_base64 else vector
        if tokens_told not in (None, count):
            return f"row {index}: {tokens_told} prompt tokens, expected {count}"
        if len(numbers) != len(right) or any(abs(a - b) > 1e-6 for a, b in zip(numbers, right, strict=True)):
            return f"row {index}: {numbers[:3]}, expected {right[:3]}"
    return None


def _decoded(text: str) -> list[float]:
    data = base64.b64decode(text)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def _choice(ask: Ask, expected: Expected, got: Choice) -> str | None:
    if got.text != expected.text:
        at = next((i for i, pair in enumerate(zip(got.text, expected.text, strict=False)) if pair[0] != pair[1]), -1)
        return (
            f"text of {len(got.text)} characters differs at {at} from the {len(expected.text)} expected: "
            f"{got.text[max(0, at) :][:40]!r}, expected {expected.text[max(0, at) :][:40]!r}"
        )
    if ask.logprobs is not None and (wrong := _logprobs(ask, expected, got)):
        return wrong
    if got.finish is None or got.finish[0] != expected.finish:
        return f"finish {got.finish}, expected {expected.finish}"
    return _native(expected, got) if ask.kind == "generate" else None


def _native(expected: Expected, got: Choice) -> str | None:
    if tuple(got.ids) != expected.ids:
        return f"{len(got.ids)} ids, expected {len(expected.ids)}: {got.ids[-5:]}, expected {expected.ids[-5:]}"
    assert got.finish is not None
    detail = expected.matched if expected.finish == "stop" else len(expected.ids)
    if got.finish[1] != detail:
        return f"finish {got.finish}, expected {detail!r}"
    if got.meta["prompt_tokens"] != expected.prompt_tokens:
        return f"{got.meta['prompt_tokens']} prompt tokens, expected {expected.prompt_tokens}"
    return None


def _logprobs(ask: Ask, expected: Expected, got: Choice) -> str | None:
    if tuple(got.chosen) != expected.chosen:
        return f"{len(got.chosen)} log-probabilities {got.chosen[:3]}, expected {len(expected.chosen)}"
    if ask.kind != "completion" and ask.logprobs:
        wanted = [
            [(top_id if ask.kind == "generate" else None, value) for top_id, value in each] for each in expected.top
        ]
        if got.tops != wanted:
            return f"alternatives {got.tops[:1]}, expected {wanted[:1]}"
    if ask.prompt_logprobs and tuple(got.input_chosen) != expected.input_chosen:
        return f"{len(got.input_chosen)} log-probabilities of the prompt, expected {len(expected.input_chosen)}"
    return None


def _names(ask: Ask, received: Received) -> str | None:
    """The ids an answer has: the client's own where there is one."""
    wanted = ask.choices if ask.kind == "generate" else 1
    if len(received.names) != wanted:
        return f"names {sorted(received.names)}, {wanted} expected"
    if ask.rid is not None and not all(ask.rid in name for name in received.names):
        return f"names {sorted(received.names)} for rid {ask.rid}"
    return None


def _usage(ask: Ask, expected: list[Expected], usage: dict[str, Any] | None) -> str | None:
    prompt = sum(one.prompt_tokens for one in expected[:: ask.n])
    completion = sum(len(one.ids) for one in expected)
    if usage is None or (usage["prompt_tokens"], usage["completion_tokens"]) != (prompt, completion):
        return f"usage {usage}, expected {prompt} and {completion}"
    return None if usage["total_tokens"] == prompt + completion else f"usage does not add up: {usage}"


def _ends_in_half(text: str, expected: str) -> bool:
    """An abort flushes a character that was not complete yet: as U+FFFD."""
    return text.endswith("\ufffd") and expected.startswith(text.rstrip("\ufffd"))
