"""What each route takes and gives, declared once: the OpenAPI document and its page are made from this. Pure tables.

A test holds this table against the routes that are served.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglmt.http import answer_schemas as answers
from sglmt.http.native.abort import AbortBody
from sglmt.http.native.control import AdapterBody, LoggingBody, PauseBody, WeightsBody
from sglmt.http.native.encode import EncodeBody
from sglmt.http.native.generate import GenerateBody
from sglmt.http.native.tokenize import DetokenizeBody, TokenizeBody
from sglmt.http.openai.chat import ChatBody
from sglmt.http.openai.completions import CompletionBody
from sglmt.http.openai.embeddings import EmbeddingBody

JSON = "application/json"

# status → what it means here; which of them a route can answer follows from its kind
STATUS_TEXTS = {
    400: "A value cannot be used; `param` names the field.",
    401: "No key, or none of ours.",
    403: "An API key where an admin key is needed.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    409: "A process could not apply the change.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    421: "The host name is not answered here.",
    429: "Too many requests wait; `Retry-After` says when to try again.",
    431: "The headers are too large.",
    499: "The request was ended by /abort_request.",
    500: "Our fault.",
    501: "The engine has no such thing.",
    503: "Starting, draining, or the engine is away.",
    504: "The request's own deadline has passed.",
}
_ALWAYS = frozenset({400, 401, 421, 431, 500, 503})
_WITH_BODY = frozenset({408, 413, 415})
_RUNNING = frozenset({404, 429, 499, 501, 504})


@dataclass(frozen=True)
class Operation:
    """One route. `answer` is the type of the 200 (None: no JSON); `body` the type of the request's body."""

    summary: str
    tag: str
    answer: Any = None
    body: type | None = None
    required: tuple[str, ...] = ()  # fields without which the body is refused
    one_of: tuple[str, ...] = ()  # at least one of these is needed
    example: dict[str, Any] | None = None
    streams: bool = False
    answer_type: str = JSON
    statuses: frozenset[int] = _ALWAYS
    is_body_optional: bool = False

    @property
    def failures(self) -> list[int]:
        """The statuses it can fail with."""
        return sorted(self.statuses | (_WITH_BODY if self.body is not None else frozenset()))


_MODEL = _ALWAYS | _RUNNING
_CONTROL = _ALWAYS | {403, 408, 409, 413, 415, 501}
_CHANGED = answers.ControlAnswer


def operations() -> dict[tuple[str, str], Operation]:
    """(method, path) → what it is, in the order of the document."""
    return {**_openai(), **_native(), **_control(), **_told()}


def _openai() -> dict[tuple[str, str], Operation]:
    tag = "OpenAI"
    return {
        ("POST", "/v1/completions"): Operation(
            "Complete a prompt", tag, answers.CompletionAnswer, CompletionBody, ("prompt",),
            example={"prompt": "Once upon a time", "max_tokens": 16}, streams=True, statuses=_MODEL,
        ),
        ("POST", "/v1/chat/completions"): Operation(
            "Answer a chat", tag, answers.ChatAnswer, ChatBody, ("messages",),
            example={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16},
            streams=True, statuses=_MODEL,
        ),
        ("POST", "/v1/embeddings"): Operation(
            "Embed texts", tag, answers.EmbeddingsAnswer, EmbeddingBody, ("input",),
            example={"input": "Hello"}, statuses=_MODEL,
        ),
        ("GET", "/v1/models"): Operation("The served models", tag, answers.ModelsAnswer),
        ("GET", "/v1/models/{model}"): Operation(
            "One served model", tag, answers.ModelAnswer, statuses=_ALWAYS | {404}
        ),
    }  # fmt: skip


def _native() -> dict[tuple[str, str], Operation]:
    tag = "SGLang-native"
    return {
        ("POST", "/generate"): Operation(
            "Generate after a text or token ids", tag, answers.GenerateAnswer | list[answers.GenerateAnswer],
            GenerateBody, one_of=("text", "input_ids"),
            example={"text": "Once upon a time", "sampling_params": {"max_new_tokens": 16}},
            streams=True, statuses=_MODEL,
        ),
        ("POST", "/encode"): Operation(
            "Embed texts or token ids", tag, answers.EncodeAnswer | list[answers.EncodeAnswer], EncodeBody,
            one_of=("text", "input_ids"), example={"text": "Hello"}, statuses=_MODEL,
        ),
        ("POST", "/tokenize"): Operation(
            "Text to token ids", tag, answers.TokenizeAnswer, TokenizeBody, one_of=("prompt", "text"),
            example={"prompt": "Hello"}, statuses=_ALWAYS | {404},
        ),
        ("POST", "/detokenize"): Operation(
            "Token ids to text", tag, answers.DetokenizeAnswer, DetokenizeBody, ("tokens",),
            example={"tokens": [1, 2]}, statuses=_ALWAYS | {404},
        ),
    }  # fmt: skip


def _control() -> dict[tuple[str, str], Operation]:
    tag = "Control"
    return {
        ("POST", "/abort_request"): Operation(
            "End one request, or all",
            tag,
            answers.StatusAnswer,
            AbortBody,
            one_of=("rid", "abort_all"),
            example={"rid": "my-request"},
            statuses=_ALWAYS | {403},
        ),
        ("POST", "/pause_generation"): Operation(
            "Pause", tag, _CHANGED, PauseBody, is_body_optional=True, statuses=_CONTROL
        ),
        ("POST", "/continue_generation"): Operation("Go on after a pause", tag, _CHANGED, statuses=_CONTROL),
        ("POST", "/flush_cache"): Operation("Empty the engine's cache", tag, _CHANGED, statuses=_CONTROL),
        ("POST", "/configure_logging"): Operation(
            "Change the log level", tag, _CHANGED, LoggingBody, statuses=_CONTROL
        ),
        ("POST", "/load_lora_adapter"): Operation(
            "Load an adapter", tag, _CHANGED, AdapterBody, ("lora_path",), statuses=_CONTROL
        ),
        ("POST", "/unload_lora_adapter"): Operation("Unload an adapter", tag, _CHANGED, AdapterBody, statuses=_CONTROL),
        ("POST", "/update_weights_from_disk"): Operation(
            "Load new weights", tag, _CHANGED, WeightsBody, statuses=_CONTROL
        ),
        ("GET", "/get_internal_state"): Operation(
            "Every process, and the control state", tag, dict[str, Any], statuses=_ALWAYS | {403}
        ),
        ("POST", "/open_session"): Operation("Not served: 501", tag, statuses=_ALWAYS | {403, 501}),
        ("POST", "/close_session"): Operation("Not served: 501", tag, statuses=_ALWAYS | {403, 501}),
    }


def _told() -> dict[tuple[str, str], Operation]:
    tag = "Information"
    return {
        ("GET", "/health"): Operation("This worker's loop runs", tag, answers.StatusAnswer),
        ("GET", "/ready"): Operation("Requests can be served", tag, answers.StatusAnswer),
        ("GET", "/health_generate"): Operation("One token came through every process", tag, answers.StatusAnswer),
        ("GET", "/get_model_info"): Operation("What is served", tag, dict[str, Any]),
        ("GET", "/get_server_info"): Operation("With which options", tag, dict[str, Any]),
        ("GET", "/metrics"): Operation("Counters and latencies of the whole instance", tag, answer_type="text/plain"),
        ("GET", "/openapi.json"): Operation("This document", tag, dict[str, Any]),
        ("GET", "/docs"): Operation("This document as a page", tag, answer_type="text/html"),
    }
