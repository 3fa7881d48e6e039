"""LiteLLM: chats, completions, tools and reasoning (streamed and not), embeddings, its own exceptions."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm  # type: ignore[import-not-found]
from script import ARGUMENTS, PROSE, QUESTION, REASONING, TOOLS  # type: ignore[import-not-found]

URLS: dict[str, str] = json.loads(sys.argv[1])
litellm.suppress_debug_info = True


def at(server: str) -> dict[str, Any]:
    return {"model": "openai/default", "api_base": URLS[server] + "/v1", "api_key": "none", "max_retries": 0}


def calls_of(message: Any) -> list[Any]:
    return [json.loads(call.function.arguments) for call in message.tool_calls or []]


messages = [{"role": "user", "content": QUESTION}]
fields = {"messages": messages, "temperature": 0, "max_tokens": 24}
whole = litellm.completion(**at("real"), **fields)
text = whole.choices[0].message.content
assert "Paris" in text, text
chunks = list(litellm.completion(**at("real"), **fields, stream=True, stream_options={"include_usage": True}))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
built = litellm.stream_chunk_builder(chunks, messages=messages)
assert built.usage.completion_tokens == whole.usage.completion_tokens
print("chat: streamed equals whole")

completion: dict[str, Any] = {"prompt": "The sea is", "max_tokens": 5, "temperature": 0}
once = litellm.text_completion(**{**at("real"), "model": "text-completion-openai/default"}, **completion)
parts = litellm.text_completion(**{**at("real"), "model": "text-completion-openai/default"}, **completion, stream=True)
assert "".join(part.choices[0].text or "" for part in parts) == once.choices[0].text != ""
print("completions: streamed equals whole")

asked = {"messages": messages, "tools": TOOLS}
answer = litellm.completion(**at("scripted"), **asked)
message = answer.choices[0].message
assert answer.choices[0].finish_reason == "tool_calls"
assert (message.content, message.reasoning_content) == (PROSE, REASONING), message
assert calls_of(message) == list(ARGUMENTS)
chunks = list(litellm.completion(**at("scripted"), **asked, stream=True))
built = litellm.stream_chunk_builder(chunks, messages=messages)
assert calls_of(built.choices[0].message) == list(ARGUMENTS), built
assert built.choices[0].message.content == PROSE
assert built.choices[0].message.reasoning_content == REASONING
assert built.choices[0].finish_reason == "tool_calls"
print("tools and reasoning: streamed equals whole")

vectors = litellm.embedding(**at("embedding"), input=["a cat", "a kitten", "stock exchange"], encoding_format="float")
rows = [row["embedding"] for row in vectors.data]
dots = [sum(a * b for a, b in zip(rows[0], row, strict=True)) for row in rows]
assert abs(dots[0] - 1) < 1e-3
assert dots[1] > dots[2], dots
print(f"embeddings: {len(rows[0])} numbers")

too_long = wrong = ""
try:
    litellm.completion(**at("real"), messages=[{"role": "user", "content": "a b " * 100_000}])
except litellm.ContextWindowExceededError as error:
    too_long = str(error)
try:
    litellm.completion(**at("real"), messages=messages, temperature=-5)
except litellm.BadRequestError as error:
    wrong = str(error)
assert "8192" in too_long
assert "temperature" in wrong
print("errors: its own exceptions")
