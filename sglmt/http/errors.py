"""Errors of the HTTP API: one exception type, and its JSON in the shape each API's clients read. Pure.

Runs in the tokenizer workers. Whatever refuses a request, or ends it without a normal finish, becomes an `ApiError`;
the app loop writes its status and `error_body`. Messages are for the people who sent the request: they name the
field and the value, never a type, module or path of this program.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sglmt.errors import SglmtError
from sglmt.messages.sampling import FinishReason

ApiName = Literal["openai", "native"]

MAX_MESSAGE_CHARS = 2000
MAX_SHOWN_CHARS = 100

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "method_not_allowed_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large_error",
    415: "unsupported_media_type_error",
    421: "misdirected_request_error",
    429: "rate_limit_error",
    431: "request_too_large_error",
    499: "request_aborted_error",
    500: "internal_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(SglmtError):
    """A request is refused or has failed: `status` is the HTTP status, the rest fills the error object.

    `param` names the field of the body, `code` is for programs, `retry_after_s` becomes the Retry-After header.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        error_type: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.error_type = error_type or type_of_status(status)
        self.retry_after_s = retry_after_s


def type_of_status(status: int) -> str:
    """The `type` of the error object for an HTTP status."""
    return ERROR_TYPES.get(status) or ("invalid_request_error" if 400 <= status < 500 else "internal_error")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: a value of the request cannot be used."""
    return ApiError(400, message, param, code)


def bad_field(param: str, problem: str, code: str | None = None) -> ApiError:
    """400 about one field: the message is `field: problem`."""
    return ApiError(400, f"{param}: {problem}", param, code)


def context_too_long(context_length: int, problem: str) -> ApiError:
    """400 `context_length_exceeded`; `problem` has the number that was asked for. Lengths are tokens."""
    message = f"This model's maximum context length is {context_length} tokens, but {problem}."
    return ApiError(400, message, code="context_length_exceeded")


def unauthorized(admin: bool = False) -> ApiError:
    """401: no key, or not one of ours."""
    kind = "admin" if admin else "API"
    message = f"a valid {kind} key is required: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
    return ApiError(401, message, code="invalid_api_key")


def forbidden() -> ApiError:
    """403: an API key where an admin key is needed."""
    return ApiError(403, "this route needs an admin key; an API key is not enough", code="admin_key_required")


def wrong_host(name: str) -> ApiError:
    """421: the Host header has a name that is not answered here."""
    message = f"host {shown(name)} is not answered here; the operator allows names with --allowed-host"
    return ApiError(421, message, code="host_not_allowed")


def websocket_refused() -> ApiError:
    """400: a request to become a websocket."""
    message = "websockets are not served; streams are server-sent events (`stream: true`)"
    return ApiError(400, message, code="websocket_not_supported")


def unknown_route(path: str) -> ApiError:
    """404: no such path."""
    return ApiError(404, f"there is no {shown(path)}", code="unknown_url")


def unknown_model(name: str, served: str) -> ApiError:
    """404: the request names a model that is not served here."""
    message = f"model: {shown(name)} is not served here; use {shown(served)}"
    return ApiError(404, message, "model", "model_not_found")


def method_not_allowed(method: str, path: str, allowed: str) -> ApiError:
    """405: the path exists, with other methods."""
    return ApiError(405, f"{shown(path)} does not take {shown(method)}; use {allowed}", code="method_not_allowed")


def slow_request(limit_s: float, part: str = "body") -> ApiError:
    """408: the body (or the headers) did not arrive in time."""
    return ApiError(408, f"the request's {part} did not arrive within {limit_s:g} s", code="request_timeout")


def headers_too_large(limit_bytes: int) -> ApiError:
    """431: more bytes of headers than any client needs."""
    return ApiError(431, f"the request's headers have more than {limit_bytes} bytes", code="headers_too_large")


def body_too_large(limit_bytes: int) -> ApiError:
    """413: the body exceeds the limit."""
    return ApiError(413, f"the request body is larger than {limit_bytes} bytes", code="request_too_large")


def unsupported_media_type(content_type: str) -> ApiError:
    """415: the body is not declared as JSON."""
    message = f"content type {shown(content_type)}: send application/json"
    return ApiError(415, message, code="unsupported_media_type")


def queue_full(retry_after_s: int = 1) -> ApiError:
    """429: as many requests wait as may."""
    message = "too many requests are waiting; try again later"
    return ApiError(429, message, code="queue_full", retry_after_s=retry_after_s)


def internal_error() -> ApiError:
    """500: our fault, told without details."""
    return ApiError(500, "the server failed to handle this request", code="internal_error")


def not_implemented(message: str, param: str | None = None) -> ApiError:
    """501: a known part of the API that is not served."""
    return ApiError(501, message, param, "not_implemented")


def unavailable(message: str, retry_after_s: int = 1, code: str = "unavailable") -> ApiError:
    """503: starting, draining, or the engine is away."""
    return ApiError(503, message, code=code, retry_after_s=retry_after_s)


def from_finish(finish: FinishReason) -> ApiError:
    """What an abort or error finish means to the client. An abort without a status is a 503, an error a 500."""
    status = finish.status
    if status is None or not 400 <= status <= 599:
        status = 503 if finish.kind == "abort" else 500
    default = "the request was aborted" if finish.kind == "abort" else "the request failed"
    code = finish.code or ("aborted" if finish.kind == "abort" else "internal_error")
    return ApiError(status, finish.message or default, code=code, retry_after_s=finish.retry_after_s)


def error_body(error: ApiError, api: ApiName) -> bytes:
    """The JSON body of an error. Both APIs: `{"error": {message, type, param, code}}`; native adds `message`."""
    return msgspec.json.encode(error_object(error, api))


def error_object(error: ApiError, api: ApiName) -> dict[str, Any]:
    """`error_body` before encoding; every string in it can be encoded."""
    message = encodable(error.message)
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "…"
    inner = {
        "message": message,
        "type": error.error_type,
        "param": None if error.param is None else encodable(error.param),
        "code": error.code,
    }
    return {"error": inner} if api == "openai" else {"error": inner, "message": message}


def encodable(text: str) -> str:
    """The same text, or with `?` for what UTF-8 cannot hold (unpaired surrogates)."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def shown(value: object) -> str:
    """A value of the request as it appears in a message: quoted when text, cut when long."""
    text = encodable(value) if isinstance(value, str) else str(value)
    text = text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"
    if not isinstance(value, str):
        return text
    return "'" + "".join(char if char.isprintable() else "?" for char in text) + "'"
