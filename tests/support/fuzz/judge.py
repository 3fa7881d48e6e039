"""Whether an answer is one we promise. Pure: (request, answer) → what is wrong with it, or None."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.support.fuzz.client import Answer
from tests.support.fuzz.requests import Request

HANG_S = 2.0
ALLOWED_5XX = frozenset({501, 503, 504})

_LEAK = re.compile(
    r"Traceback|\.py\b|site-packages|\b[A-Z][A-Za-z]+(?:Error|Exception)\b|<class|0x[0-9a-f]{6,}|msgspec"
)


def complaint(request: Request, answer: Answer) -> str | None:
    """None when all is well."""
    if answer.problem is not None:
        return answer.problem
    if answer.took_s > HANG_S:
        return f"took {answer.took_s:.1f} s"
    if answer.status >= 500 and answer.status not in ALLOWED_5XX:
        return f"status {answer.status}"
    if request.method == "HEAD" or answer.status == 204:
        return None
    if answer.status >= 400:
        return _error_shape(request, answer)
    kind = answer.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        return _stream(answer.body.decode())
    if kind == "application/json":
        return None if _json(answer.body) is not None else "the body is not strict JSON"
    return None


def _error_shape(request: Request, answer: Answer) -> str | None:
    if answer.headers.get("content-type") != "application/json":
        return f"error with content type {answer.headers.get('content-type')!r}"
    body = _json(answer.body)
    if not isinstance(body, dict) or not isinstance(body.get("error"), dict):
        return "error without an error object"
    error = body["error"]
    if set(error) != {"message", "type", "param", "code"} or not all(
        isinstance(error[name], str | None) for name in ("param", "code")
    ):
        return f"error object with fields {sorted(error)}"
    if not isinstance(error["message"], str) or not error["message"] or not isinstance(error["type"], str):
        return "error without message or type"
    if request.path.startswith("/v1/") != ("message" not in body):
        return "error in the other API's shape"
    leak = _LEAK.search(error["message"])
    return f"the message tells of our insides: {leak.group()!r}" if leak else None


def _stream(text: str) -> str | None:
    """Events, each choice finished once unless an error event came, then the terminator and nothing else."""
    events = [event for event in text.split("\n\n") if event and not event.startswith(":")]
    if not events or events[-1] != "data: [DONE]":
        return f"stream ends with {events[-1][:60] if events else text[:60]!r}"
    finished: dict[int, int] = {}
    failed = False
    for event in events[:-1]:
        value = _json(event.removeprefix("data: ").encode())
        if not isinstance(value, dict):
            return f"event {event[:60]!r}"
        failed = failed or "error" in value
        for index, reason in _finish_reasons(value):
            finished[index] = finished.get(index, 0) + (reason is not None)
    if not failed and (not finished or any(count != 1 for count in finished.values())):
        return f"finish reasons a choice: {finished}"
    return None


def _finish_reasons(value: dict[str, Any]) -> list[tuple[int, Any]]:
    if "choices" in value:
        return [(choice["index"], choice["finish_reason"]) for choice in value["choices"]]
    if "meta_info" in value:
        return [(value.get("index", 0), value["meta_info"]["finish_reason"])]
    return []


def _json(body: bytes) -> Any:
    def refuse(name: str) -> Any:
        raise ValueError(name)

    try:
        return json.loads(body, parse_constant=refuse)
    except ValueError:
        return None
