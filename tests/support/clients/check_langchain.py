"""LangChain: chats, completions, tools and their results (streamed and not), embeddings, structured output refused."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from langchain_core.messages import HumanMessage, ToolMessage  # type: ignore[import-not-found]
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings  # type: ignore[import-not-found]
from script import ARGUMENTS, PROSE, QUESTION, SCHEMA, TOOLS  # type: ignore[import-not-found]

URLS: dict[str, str] = json.loads(sys.argv[1])


def chat(server: str, **fields: Any) -> Any:
    return ChatOpenAI(model="default", base_url=URLS[server] + "/v1", api_key="none", max_retries=0, **fields)


model = chat("real", temperature=0, max_tokens=24, stream_usage=True)
answer = model.invoke(QUESTION)
assert "Paris" in answer.content
assert answer.usage_metadata["output_tokens"] > 0
total = None
for chunk in model.stream(QUESTION):
    total = chunk if total is None else total + chunk
assert total is not None
assert total.content == answer.content
for name in ("input_tokens", "output_tokens", "total_tokens"):
    assert total.usage_metadata[name] == answer.usage_metadata[name]
print("chat: streamed equals whole, usage too")

llm = OpenAI(model="default", base_url=URLS["real"] + "/v1", api_key="none", temperature=0, max_tokens=5, max_retries=0)
assert "".join(llm.stream("The sea is")) == llm.invoke("The sea is") != ""
assert len(llm.batch(["One, two,", "The sea is"])) == 2
print("completions: streamed equals whole")

talker = chat("scripted").bind_tools(TOOLS)
first = talker.invoke(QUESTION)
assert first.content == PROSE
assert [call["args"] for call in first.tool_calls] == list(ARGUMENTS), first
assert first.invalid_tool_calls == []
total = None
for chunk in talker.stream(QUESTION):
    total = chunk if total is None else total + chunk
assert total is not None
assert [call["args"] for call in total.tool_calls] == list(ARGUMENTS), total
assert (total.content, total.response_metadata["finish_reason"]) == (PROSE, "tool_calls")
results = [ToolMessage("21 degrees", tool_call_id=call["id"]) for call in first.tool_calls]
again = talker.invoke([HumanMessage(QUESTION), first, *results])
assert [call["args"] for call in again.tool_calls] == list(ARGUMENTS)
print("tools: streamed equals whole; the turn after")

embeddings = OpenAIEmbeddings(
    model="default", base_url=URLS["embedding"] + "/v1", api_key="none", check_embedding_ctx_length=False
)
rows = embeddings.embed_documents(["a cat", "stock exchange"])
query = embeddings.embed_query("a kitten")
assert sum(a * b for a, b in zip(query, rows[0], strict=True)) > sum(a * b for a, b in zip(query, rows[1], strict=True))
print(f"embeddings: {len(query)} numbers")

refused = ""
try:
    chat("real").with_structured_output({"title": "Weather", **SCHEMA}, method="json_schema").invoke(QUESTION)
except openai.BadRequestError as error:
    refused = str(error)
assert "openvino" in refused, "a schema was taken by an engine that cannot be held to one"
print("structured output: refused by name")
