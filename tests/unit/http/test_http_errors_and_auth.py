"""Error objects, API keys, and the bodies of the information routes."""

from __future__ import annotations

import json

import pytest
from openai.types import Model

from sglmt.http import errors
from sglmt.http.auth import ApiKeys, presented_key
from sglmt.http.errors import ApiError, error_body, from_finish
from sglmt.http.limits import ModelLimits
from sglmt.http.native.info import model_info_body, server_info_body
from sglmt.http.openai.models import model_body, models_body
from sglmt.messages.sampling import FinishReason
from sglmt.server_args import SchedulerInfo, ServerArgs
from sglmt.tokenizer.model_info import ModelInfo


@pytest.mark.parametrize(
    ("error", "status", "error_type", "code"),
    [
        (errors.bad_field("n", "bad"), 400, "invalid_request_error", None),
        (errors.unauthorized(), 401, "authentication_error", "invalid_api_key"),
        (errors.unknown_model("x", "smol"), 404, "not_found_error", "model_not_found"),
        (errors.unknown_route("/x"), 404, "not_found_error", "unknown_url"),
        (errors.method_not_allowed("PUT", "/x", "POST"), 405, "method_not_allowed_error", "method_not_allowed"),
        (errors.slow_request(5), 408, "timeout_error", "request_timeout"),
        (errors.body_too_large(10), 413, "request_too_large_error", "request_too_large"),
        (errors.unsupported_media_type("text/x"), 415, "unsupported_media_type_error", "unsupported_media_type"),
        (errors.queue_full(), 429, "rate_limit_error", "queue_full"),
        (errors.internal_error(), 500, "internal_error", "internal_error"),
        (errors.not_implemented("no"), 501, "not_implemented_error", "not_implemented"),
        (errors.unavailable("starting"), 503, "service_unavailable_error", "unavailable"),
    ],
)
def test_error_objects(error: ApiError, status: int, error_type: str, code: str | None) -> None:
    assert error.status == status
    body = json.loads(error_body(error, "openai"))
    assert body == {"error": {"message": error.message, "type": error_type, "param": error.param, "code": code}}
    assert json.loads(error_body(error, "native")) == {**body, "message": error.message}


def test_error_text_from_outside_is_cut_and_always_encodable() -> None:
    error = errors.bad_field("x\ud83d", "y\udc00" + "z" * 10_000)
    body = json.loads(error_body(error, "native"))
    assert body["error"]["param"] == "x?"
    assert len(body["message"]) <= errors.MAX_MESSAGE_CHARS + 1
    assert errors.unknown_route("/a\x1b[31m\n").message == "there is no '/a?[31m?'"
    assert len(errors.unknown_model("x" * 5000, "m").message) < 200


@pytest.mark.parametrize(
    ("finish", "status", "code", "retry_after_s"),
    [
        (
            FinishReason(kind="abort", status=429, code="queue_full", message="full", retry_after_s=2),
            429,
            "queue_full",
            2,
        ),
        (FinishReason(kind="abort"), 503, "aborted", None),
        (FinishReason(kind="error"), 500, "internal_error", None),
        (FinishReason(kind="error", status=501, code="x"), 501, "x", None),
        (FinishReason(kind="error", status=200), 500, "internal_error", None),
    ],
)
def test_finishes_become_errors(finish: FinishReason, status: int, code: str, retry_after_s: int | None) -> None:
    error = from_finish(finish)
    assert (error.status, error.code, error.retry_after_s) == (status, code, retry_after_s)
    assert error.message


BEARER = b"authorization"
KEYS = ApiKeys(["k-1", "schlüssel"])


@pytest.mark.parametrize(
    "headers",
    [
        [(BEARER, b"Bearer k-1")],
        [(BEARER, b"bearer  k-1 ")],
        [(b"x-api-key", b"k-1")],
        [(b"accept", b"*/*"), (BEARER, "Bearer schlüssel".encode())],
        [(BEARER, b"Bearer k-1"), (b"x-api-key", b"other")],
        [(BEARER, b"Bearer k-1"), (BEARER, b"Bearer k-1")],
    ],
)
def test_right_keys(headers: list[tuple[bytes, bytes]]) -> None:
    KEYS.authorize("POST", "/v1/completions", headers)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(BEARER, b"Bearer k-2")],
        [(BEARER, b"Bearer k-1x")],
        [(BEARER, b"Bearer k-")],
        [(BEARER, b"Bearer ")],
        [(BEARER, b"Bearer")],
        [(BEARER, b"k-1")],
        [(BEARER, b"Basic k-1")],
        [(BEARER, b"Bearer \xff\xfe")],
        [(b"x-api-key", b"")],
        [(BEARER, b"Bearer k-1"), (BEARER, b"Bearer k-2")],
        [(BEARER, b"Bearer k-2"), (b"x-api-key", b"k-1")],
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/metrics", "/get_server_info", "/health/", "/nowhere", ""])
def test_wrong_keys(headers: list[tuple[bytes, bytes]], path: str) -> None:
    with pytest.raises(ApiError) as caught:
        KEYS.authorize("GET", path, headers)
    assert caught.value.status == 401
    assert "k-1" not in caught.value.message


def test_open_routes_and_open_servers() -> None:
    KEYS.authorize("GET", "/health", [])
    KEYS.authorize("GET", "/ready", [])
    KEYS.authorize("OPTIONS", "/v1/completions", [])
    assert not ApiKeys().required
    ApiKeys().authorize("POST", "/v1/completions", [])
    assert presented_key([]) is None


def test_an_empty_key_is_not_accepted_even_if_it_were_configured() -> None:
    assert not ApiKeys(["k"]).accepts(None)
    assert not ApiKeys(["k"]).accepts(b"")


def test_models(limits: ModelLimits) -> None:
    listed = json.loads(models_body(limits, 1700))
    assert listed["object"] == "list"
    assert [Model.model_validate(entry).id for entry in listed["data"]] == ["smol"]
    assert json.loads(model_body("default", limits, 1700)) == listed["data"][0]
    with pytest.raises(ApiError) as caught:
        model_body("gpt-9", limits, 1700)
    assert caught.value.status == 404


def test_information_shows_what_it_is_and_no_secret(limits: ModelLimits) -> None:
    model = ModelInfo(
        model_path="/models/a.gguf",
        model_kind="gguf",
        architecture="llama",
        context_length=4096,
        vocab_size=1000,
        bos_token_id=1,
        eos_token_ids=[2],
        pad_token_id=None,
        add_bos=False,
        add_eos=False,
        special_token_ids=[1, 2],
        generation_defaults={},
        is_embedding=False,
        tokenizer_file=None,
        chat_template_file=None,
        fingerprint="f",
    )
    shown = json.loads(model_info_body(model, limits))
    assert (shown["model_path"], shown["is_generation"], shown["has_chat_template"]) == ("/models/a.gguf", True, False)
    info = SchedulerInfo(
        engine="simulator",
        engine_version="1",
        model_path="/models/a.gguf",
        context_length=4096,
        vocab_size=1000,
        max_running_requests=8,
        max_total_tokens=None,
        capabilities={},
        is_simulator=True,
    )
    body = server_info_body(ServerArgs(api_key=("secret-key",)), info, "0.1.0", {"worker": 3})
    told = json.loads(body)
    assert b"secret-key" not in body
    assert (told["is_simulator"], told["worker"], told["scheduler"]["engine"]) == (True, 3, "simulator")
