"""Hostile requests, drawn from a grammar by a seeded generator. Pure: the same seed gives the same requests.

Bodies are written as text, not through a JSON library: most of what hurts (NaN, half a surrogate pair, numbers of
400 digits, names given twice) is nothing a library would write.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

LITERALS = (
    "null", "true", "false", "0", "1", "-1", "2", "16", "1.5", "-0", "0.0", "1e999", "-1e999", "NaN", "Infinity",
    "-Infinity", "9" * 20, "-" + "9" * 20, "9" * 400, "1e-400", "2147483648", "9223372036854775807",
    "9223372036854775808", '""', '"x"', '"1"', '"\\ud83d"', '"\\udc00z"', '"\\ud83d\\ude00"', '"\\u0000"', '"\\u2028"',
    '"' + "a" * 5000 + '"', '"🦜 naïve \u0085"', "[]", "{}", "[[]]", "[{}]", "[null]", '[""]', '["a",""]', "[1,2,3]",
    "[-1]", "[99999999]", "[true]", "[1.5]", '[1,"a"]', "[[1,2],[3]]", "[[1],[]]", '["a","b"]', '{"a":1}',
    '{"-1":1}', '{"1":5}', '{"99999999":1}', '{"type":"json_object"}', '{"type":"x"}', '{"role":"user"}',
    '[{"role":"user","content":"a"}]', '[{"role":"alien","content":"a"}]', '[{"role":"user","content":[]}]',
    '[{"role":"user","content":[{"type":"image_url"}]}]', '[{"type":"function","function":{"name":"f"}}]',
    "[" * 60 + "]" * 60, '{"a":' * 200 + "1" + "}" * 200, "[" + ",".join(["1"] * 3000) + "]",
    '{"include_usage":true}', '{"include_usage":"x"}', '{"max_new_tokens":3}', '{"max_new_tokens":-1}',
    '{"temperature":NaN}', '{"n":4,"max_new_tokens":2}', '"auto"', '"none"', '"required"', '"debug"', '"base64"',
)  # fmt: skip

SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
    "logit_bias", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
    "no_stop_trim", "json_schema", "regex", "ebnf", "n", "seed", "min_tokens", "max_tokens",
)  # fmt: skip
COMMON = ("model", "stream", "stream_options", "response_format", "rid", "priority", "timeout_s", "user", "best_of")

# path → (fields of a good body, fields that may be made hostile)
ROUTES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "/v1/completions": (
        {"prompt": '"hello"', "max_tokens": "3"},
        ("prompt", "echo", "logprobs", "suffix", "add_special_tokens", *SAMPLING, *COMMON),
    ),
    "/v1/chat/completions": (
        {"messages": '[{"role":"user","content":"hi"}]', "max_tokens": "3"},
        (
            "messages", "logprobs", "top_logprobs", "tools", "tool_choice", "max_completion_tokens", "modalities",
            "chat_template_kwargs", "documents", "continue_final_message", "functions", *SAMPLING, *COMMON,
        ),
    ),
    "/generate": (
        {"text": '"hello"', "sampling_params": '{"max_new_tokens":3}'},
        (
            "text", "input_ids", "sampling_params", "stream", "rid", "return_logprob", "logprob_start_len",
            "top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs", "incremental_streaming_output",
            "priority", "timeout_s", "image_data", "session_params",
        ),
    ),
    "/v1/embeddings": ({"input": '"hello"'}, ("input", "encoding_format", "dimensions", "model", "rid", "timeout_s")),
    "/encode": ({"text": '"hello"'}, ("text", "input_ids", "rid", "priority")),
    "/tokenize": ({"prompt": '"hello"'}, ("prompt", "text", "model", "add_special_tokens")),
    "/detokenize": ({"tokens": "[5,6]"}, ("tokens", "model", "skip_special_tokens")),
}  # fmt: skip

CONTROL_ROUTES: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "/abort_request": ({"rid": '"nobody"'}, ("rid", "abort_all")),
    "/pause_generation": ({"mode": '"in_place"'}, ("mode",)),
    "/continue_generation": ({}, ("x",)),
    "/flush_cache": ({}, ("x",)),
    "/configure_logging": ({"log_level": '"info"'}, ("log_level",)),
    "/load_lora_adapter": ({"lora_name": '"a"', "lora_path": '"/nowhere"'}, ("lora_name", "lora_path")),
    "/unload_lora_adapter": ({"lora_name": '"a"'}, ("lora_name",)),
    "/update_weights_from_disk": ({"model_path": '"/nowhere"'}, ("model_path", "weight_version")),
    "/open_session": ({}, ("x",)),
    "/close_session": ({}, ("x",)),
}

GET_PATHS = (
    "/health", "/ready", "/v1/models", "/v1/models/default", "/v1/models/x", "/get_model_info", "/get_server_info",
    "/metrics", "/openapi.json", "/docs", "/", "/nowhere", "/v1", "/v1/", "//", "/v1/models/", "/%00", "/%ff",
    "/health?x=%ff", "/../etc/passwd", "/v1/models/%F0%9F%A6%9C", "/v1/models/{model}",
)  # fmt: skip
METHODS = ("GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "POST")


@dataclass(frozen=True)
class Request:
    """One request as it goes over the wire; `chunked`: its body in pieces without a length."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    chunked: bool = False

    def encode(self) -> bytes:
        """The bytes of it."""
        lines = [f"{self.method} {self.path} HTTP/1.1", "host: fuzz"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.chunked:
            half = len(self.body) // 2
            pieces = [piece for piece in (self.body[:half], self.body[half:]) if piece]
            body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
            lines.append("transfer-encoding: chunked")
        else:
            body = self.body
            if body or self.method == "POST":
                lines.append(f"content-length: {len(body)}")
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def draw(rng: random.Random, control: bool) -> Request:
    """The next request. Control routes are drawn from a table of their own."""
    kind = rng.random()
    if kind < 0.06:
        path = rng.choice(tuple(CONTROL_ROUTES) if control else GET_PATHS)
        return Request(rng.choice(METHODS[:-1]), path, (), b"")
    if not control and kind < 0.15:
        return Request("GET", rng.choice(GET_PATHS), (), b"")
    routes = CONTROL_ROUTES if control else ROUTES
    path = rng.choice(tuple(routes))
    return _post(rng, path, *routes[path])


def _post(rng: random.Random, path: str, good: dict[str, str], fields: tuple[str, ...]) -> Request:
    values = dict(good)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        values[rng.choice(fields)] = rng.choice(LITERALS)
    if "stream" in fields and rng.random() < 0.5:
        values["stream"] = "true"
    for name in rng.sample(sorted(values), k=len(values) if rng.random() < 0.05 else 0):
        del values[name]
    text = "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in values.items()) + "}"
    body = text.encode("utf-8", "surrogatepass")
    content_type = "application/json"
    trick = rng.random()
    if trick < 0.12:
        body = _broken(rng, body)
    elif trick < 0.16:
        content_type = rng.choice(("text/plain", "application/x-www-form-urlencoded", "", "x", "application/json;x"))
    headers = (("content-type", content_type),) if content_type or rng.random() < 0.5 else ()
    return Request("POST", path, headers, body, chunked=rng.random() < 0.1)


def _broken(rng: random.Random, body: bytes) -> bytes:
    """Not a JSON object in UTF-8 any more, in one of many ways."""
    at = rng.randrange(len(body) + 1)
    return rng.choice(
        (
            body[:at],
            body[:at] + b"\xff\xfe" + body[at:],
            body[:at] + bytes([rng.randrange(256)]) + body[at + 1 :],
            b"\xef\xbb\xbf" + body,
            body + b"garbage",
            b"",
            b" ",
            b"null",
            b"[]",
            b'"text"',
            b"\x80\x04\x95\x1f",
            b"[" * 100_000,
            b'{"a":' * 20_000,
            body.replace(b"{", b'{"model":"default","model":1,', 1),
            body[:-1] + b',"pad":"' + b"x" * 70_000 + b'"}',
        )
    )
