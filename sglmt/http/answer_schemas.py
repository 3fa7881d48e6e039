"""What answers look like, as types for the OpenAPI document. Never instantiated: the formatters write bytes.

A test compares served answers with these; fields that are always there have no default.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ErrorObject(msgspec.Struct, kw_only=True):
    """What went wrong, for people (`message`) and programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAIError(msgspec.Struct, kw_only=True):
    """The body of every error under /v1."""

    error: ErrorObject


class NativeError(msgspec.Struct, kw_only=True):
    """The body of every other error."""

    error: ErrorObject
    message: str


class StatusAnswer(msgspec.Struct, kw_only=True):
    """It worked."""

    status: Literal["ok", "ready"]


class CachedTokens(msgspec.Struct, kw_only=True):
    """Part of the usage."""

    cached_tokens: int


class ReasoningTokens(msgspec.Struct, kw_only=True):
    """Part of the usage of models that reason."""

    reasoning_tokens: int


class UsageAnswer(msgspec.Struct, kw_only=True):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """One entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class CompletionAnswer(msgspec.Struct, kw_only=True):
    """All completions of a request."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer


class CalledFunction(msgspec.Struct, kw_only=True):
    """Which function, with which arguments (a JSON object as text)."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """One call the model made."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer of a chat."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatAnswer(msgspec.Struct, kw_only=True):
    """All answers of a chat request."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer


class ModelAnswer(msgspec.Struct, kw_only=True):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelsAnswer(msgspec.Struct, kw_only=True):
    """All served models."""

    object: Literal["list"]
    data: list[ModelAnswer]


class EmbeddingAnswerRow(msgspec.Struct, kw_only=True):
    """One vector, as numbers or base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsAnswer(msgspec.Struct, kw_only=True):
    """All vectors of a request."""

    object: Literal["list"]
    model: str
    data: list[EmbeddingAnswerRow]
    usage: dict[str, Any]


class GenerateAnswer(msgspec.Struct, kw_only=True):
    """One answer of /generate; `meta_info` has id, finish_reason, token counts and log-probabilities."""

    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


class EncodeAnswer(msgspec.Struct, kw_only=True):
    """One vector of /encode, or why there is none."""

    embedding: list[float] | None
    meta_info: dict[str, Any]


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """Ids and counts; lists of them when a list was sent."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """Text, or a list of texts."""

    text: str | list[str]


class ControlAnswer(msgspec.Struct, kw_only=True):
    """What became of a change, process by process."""

    success: bool
    message: str
    version: int
    confirmed: list[str]
    errors: dict[str, str]
