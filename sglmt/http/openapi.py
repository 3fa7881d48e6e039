"""The OpenAPI document of a worker, and the same as a page. Pure: made from the declared operations and body types.

Schemas say types and required fields; ranges that depend on the model or the engine are in docs/http-api.md.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import msgspec

from sglmt.http.answer_schemas import NativeError, OpenAIError
from sglmt.http.auth import ADMIN_PATHS, OPEN_PATHS
from sglmt.http.operations import JSON, STATUS_TEXTS, Operation

Json = dict[str, Any]

_REF = "#/components/schemas/{name}"
_STREAM = {
    "description": "One of the server-sent events: `data` is an object as JSON, that of the last one is `[DONE]`.",
    "type": "object",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


def openapi_document(
    operations: Mapping[tuple[str, str], Operation], version: str, needs_key: bool, needs_admin_key: bool
) -> Json:
    """The document. `needs_key`, `needs_admin_key`: whether the instance has keys of that kind."""
    types: list[Any] = [OpenAIError, NativeError]
    for operation in operations.values():
        types += [each for each in (operation.body, operation.answer) if each is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = dict(zip(map(str, types), schemas, strict=True))
    paths: dict[str, Json] = {}
    for (method, path), operation in operations.items():
        described = _operation(method, path, operation, by_type)
        if path not in OPEN_PATHS and (needs_admin_key if path in ADMIN_PATHS and needs_admin_key else needs_key):
            described["security"] = [{"bearer": []}, {"header": []}]
        paths.setdefault(path, {})[method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "sglmt",
            "version": version,
            "description": "OpenAI and SGLang-native APIs of one served model. Unknown fields are ignored.",
        },
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(method: str, path: str, operation: Operation, by_type: Mapping[str, Json]) -> Json:
    described: Json = {
        "summary": operation.summary,
        "operationId": f"{method.lower()}_{path.strip('/').replace('/', '_').replace('.', '_').strip('{}')}",
        "tags": [operation.tag],
        "responses": _responses(path, operation, by_type),
    }
    if "{" in path:
        name = path.partition("{")[2].rstrip("}")
        schema = {"type": "string", "minLength": 1}
        described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    if operation.body is not None:
        content: Json = {"schema": _body_schema(operation, by_type[str(operation.body)])}
        if operation.example is not None:
            content["example"] = operation.example
        described["requestBody"] = {"required": not operation.is_body_optional, "content": {JSON: content}}
    return described


def _body_schema(operation: Operation, schema: Json) -> Json:
    """The body's type, and which of its fields it cannot do without (null counts as absent)."""
    needed: list[Json] = [_given(name) for name in operation.required]
    if operation.one_of:
        needed.append({"anyOf": [_given(name) for name in operation.one_of]})
    return {"allOf": [schema, *needed]} if needed else schema


def _given(name: str) -> Json:
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def _responses(path: str, operation: Operation, by_type: Mapping[str, Json]) -> Json:
    error = OpenAIError if path.startswith("/v1/") else NativeError
    failed = {"content": {JSON: {"schema": by_type[str(error)]}}}
    responses: Json = {str(status): {"description": STATUS_TEXTS[status], **failed} for status in operation.failures}
    content: Json = {}
    if operation.answer is not None:
        content[operation.answer_type] = {"schema": by_type[str(operation.answer)]}
    elif operation.answer_type != JSON:
        content[operation.answer_type] = {"schema": {"type": "string"}}
    if operation.streams:
        content["text/event-stream"] = {"schema": _STREAM}
    if content:
        responses = {"200": {"description": "Done.", "content": content}, **responses}
    return responses


def docs_page(document: Json) -> bytes:
    """The document as one page of HTML that needs nothing else."""
    parts = [_HEAD % html.escape(document["info"]["version"])]
    tag = ""
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            if described["tags"][0] != tag:
                tag = described["tags"][0]
                parts.append(f"<h2>{html.escape(tag)}</h2>")
            parts.append(_section(method.upper(), path, described, document["components"]["schemas"]))
    parts.append("</main></body></html>\n")
    return "".join(parts).encode()


_HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>sglmt API</title><style>
body{font:16px/1.5 system-ui,sans-serif;margin:0;color:#1b1f24;background:#fff}
main{max-width:60rem;margin:0 auto;padding:1rem}
section{border-top:1px solid #d0d7de;padding:.5rem 0}h3{margin:.5rem 0}
code,pre{font-family:ui-monospace,monospace;font-size:.9em;background:#f3f5f7;border-radius:4px}
code{padding:.1em .3em}pre{padding:.6em;overflow:auto}td,th{text-align:left;padding:.15rem 1rem .15rem 0}
@media(prefers-color-scheme:dark){body{background:#15181c;color:#dde3ea}code,pre{background:#23282e}}
</style></head><body><main><h1>sglmt %s</h1>
<p>Machine-readable: <a href="openapi.json">openapi.json</a></p>
"""


def _section(method: str, path: str, described: Json, schemas: Json) -> str:
    parts = [
        f"<section><h3><code>{method} {html.escape(path)}</code></h3>",
        f"<p>{html.escape(described['summary'])}</p>",
    ]
    body = described.get("requestBody")
    if body is not None:
        content = body["content"][JSON]
        if "example" in content:
            parts.append(f"<pre>{html.escape(msgspec.json.encode(content['example']).decode())}</pre>")
        parts.append(_fields_table(content["schema"], schemas))
    codes = ", ".join(f"<code>{status}</code>" for status in described["responses"])
    parts.append(f"<p>Answers: {codes}</p></section>")
    return "".join(parts)


def _fields_table(schema: Json, schemas: Json) -> str:
    reference = schema.get("$ref") or schema["allOf"][0]["$ref"]
    properties = schemas[reference.rpartition("/")[2]]["properties"]
    rows = "".join(
        f"<tr><td><code>{html.escape(name)}</code></td><td>{html.escape(_type_words(value))}</td></tr>"
        for name, value in properties.items()
    )
    return f"<details><summary>Fields</summary><table>{rows}</table></details>"


def _type_words(schema: Json) -> str:
    """A schema in a few words: `string or array`."""
    options = schema.get("anyOf", [schema])
    words: list[str] = []
    for option in options:
        if "enum" in option:
            words.append(" | ".join(map(str, option["enum"])))
        else:
            words.append("object" if "$ref" in option else str(option.get("type", "any")))
    return " or ".join(word for word in words if word != "null")
