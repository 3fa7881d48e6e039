"""Requests that must be refused, and how: bad ids, bad values, bodies that are no JSON. Pure.

Each comes with the status, the code and the field its error must name.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

TOO_LONG = 10**6  # tokens; no model here has such a context
NO_TOKEN = 2**31


@dataclass(frozen=True)
class Refused:
    """One request. `param` None: the error may name any field."""

    path: str
    payload: bytes
    status: int
    code: str | None = None
    param: str | None = None
    method: str = "POST"
    content_type: str = "application/json"


def refused_requests(vocab_size: int) -> list[Refused]:
    """All of them, for a model of this vocabulary."""
    return [*_bad_ids(vocab_size), *_bad_values(), *_bad_bodies(), *_bad_rids()]


def _json(body: object) -> bytes:
    return msgspec.json.encode(body)


def _bad_ids(vocab_size: int) -> list[Refused]:
    """Token ids that no vocabulary of this size has, wherever they may stand."""
    requests: list[Refused] = []
    for token_id in (-1, vocab_size, NO_TOKEN, 2**63, 1.5):
        bad = [5, token_id, 6]
        requests += [
            Refused("/generate", _json({"input_ids": bad}), 400, None, "input_ids[1]"),
            Refused("/generate", _json({"input_ids": [[5], bad]}), 400, None, "input_ids[1][1]"),
            Refused("/generate", _json({"text": "a", "sampling_params": {"stop_token_ids": bad}}), 400, None,
                    "sampling_params.stop_token_ids[1]"),
            Refused("/generate", _json({"text": "a", "return_logprob": True, "token_ids_logprob": bad}), 400, None,
                    "token_ids_logprob[1]"),
            Refused("/v1/completions", _json({"prompt": bad, "stream": True}), 400, None, "prompt[1]"),
            Refused("/v1/embeddings", _json({"input": [bad]}), 400, None, "input[0][1]"),
            Refused("/detokenize", _json({"tokens": bad}), 400, None, "tokens[1]"),
        ]  # fmt: skip
    return requests


def _bad_values() -> list[Refused]:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    return [
        Refused("/generate", _json({"text": "a", "sampling_params": {"temperature": -1}}), 400, None,
                "sampling_params.temperature"),
        Refused("/v1/completions", _json({"prompt": "a", "top_p": 7}), 400, None, "top_p"),
        Refused("/v1/completions", _json({"prompt": "a", "n": 0}), 400, None, "n"),
        Refused("/v1/completions", _json({"prompt": [], "n": 1}), 400, None, "prompt"),
        Refused("/v1/completions", _json({"prompt": ["a"] * 300}), 400),
        Refused("/v1/completions", _json({"prompt": "a", "max_tokens": TOO_LONG}), 400, "context_length_exceeded"),
        Refused("/v1/completions", _json({"prompt": "a", "stop": [""]}), 400),
        Refused("/v1/completions", _json({"prompt": "a", "model": "nobody"}), 404, "model_not_found", "model"),
        Refused("/v1/chat/completions", _json({**chat, "logprobs": True, "top_logprobs": 21}), 400, None,
                "top_logprobs"),
        Refused("/v1/chat/completions", _json({"messages": []}), 400, None, "messages"),
        Refused("/v1/chat/completions", _json({**chat, "functions": [{}]}), 400, "unsupported_parameter", "functions"),
        Refused("/generate", _json({"text": "a", "sampling_params": {"regex": "a+"}}), 400, "unsupported_by_engine"),
        Refused("/generate", _json({"text": "a", "input_ids": [5]}), 400),
        Refused("/generate", _json({"text": ""}), 400, None, "text"),
        Refused("/v1/embeddings", _json({"input": "a", "dimensions": 65}), 400, None, "dimensions"),
        Refused("/encode", _json({"text": []}), 400, None, "text"),
        Refused("/open_session", b"{}", 501, "not_implemented"),
    ]  # fmt: skip


def _bad_bodies() -> list[Refused]:
    paths = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/embeddings")
    bodies = (
        b"", b"{", b"[1]", b"null", b'{"text":', b"\xff\xfe", b'{"text":"a\xff"}', b'{"text":"a"} x', b"[" * 50_000,
        b'{"n":' + b"9" * 4000 + b"}x", b"\x80\x04\x95\x10",
    )  # fmt: skip
    requests = [Refused(path, body, 400, "invalid_json") for path in paths for body in bodies]
    surrogate = b'{"text":"\\ud83d","prompt":"\\ud83d","input":"\\ud83d"}'
    requests += [Refused(path, surrogate, 400) for path in ("/generate", "/v1/completions", "/v1/embeddings")]
    return [
        *requests,
        Refused("/generate", b'{"text":"a"}', 415, "unsupported_media_type", None, "POST", "text/plain"),
        Refused("/v1/nothing", b"{}", 404, "unknown_url"),
        Refused("/v1/completions", b"", 405, "method_not_allowed", None, "PUT"),
    ]


def _bad_rids() -> list[Refused]:
    rids = ("", "x" * 129, "a\nb", ["x"], 7)
    requests = [Refused("/generate", _json({"text": ["a", "b"], "rid": ["x", "x"]}), 400, "duplicate_rid", "rid")]
    requests += [Refused("/generate", _json({"text": ["a", "b"], "rid": rid}), 400, None, "rid") for rid in rids]
    bodies: tuple[dict[str, object], ...] = ({"rid": ""}, {}, {"rid": "x", "abort_all": True}, {"rid": 5})
    return requests + [Refused("/abort_request", _json(body), 400) for body in bodies]
