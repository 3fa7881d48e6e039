"""Values that must be refused at the edge: each gives a 400 that names the field, in strict JSON, without internals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglmt.http.errors import ApiError, error_body
from sglmt.http.limits import ModelLimits
from sglmt.http.native.abort import parse_abort
from sglmt.http.native.generate import parse_generate
from sglmt.http.native.tokenize import parse_detokenize, parse_tokenize
from sglmt.http.openai.chat import ChatBody, parse_chat
from sglmt.http.openai.completions import CompletionBody, parse_completion
from tests.unit.http.hostile_bodies import BODIES, CHAT, COMPLETION, GENERATE, SAMPLING

Parser = Callable[[bytes, ModelLimits], Any]

INTERNALS = re.compile(
    r"Traceback|msgspec|Error\b|Exception|NoneType|<class|\bdict\b|\bstr\b|\bint\b|struct|sglmt|\.py|/home|\$"
)


def refused(parse: Parser, body: bytes, limits: ModelLimits) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body, limits)
    error = caught.value
    for api in ("openai", "native"):
        text = error_body(error, api).decode("utf-8")
        assert json.loads(text, parse_constant=pytest.fail)["error"]["message"]
    assert not INTERNALS.search(error.message), error.message
    return error


def completion(fields: str) -> bytes:
    return b'{"model":"m","prompt":"hi",' + fields.encode("utf-8", "surrogatepass") + b"}"


def chat(fields: str) -> bytes:
    message = b'{"role":"user","content":"hi"}'
    return b'{"model":"m","messages":[' + message + b"]," + fields.encode("utf-8", "surrogatepass") + b"}"


def generate(fields: str) -> bytes:
    return b'{"text":"hi","sampling_params":{' + fields.encode("utf-8", "surrogatepass") + b"}}"


ENDPOINTS: dict[str, tuple[Parser, Callable[[str], bytes], str]] = {
    "completion": (parse_completion, completion, ""),
    "chat": (parse_chat, chat, ""),
    "generate": (parse_generate, generate, "sampling_params."),
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(("field", "value"), SAMPLING, ids=lambda value: value[:24])
@pytest.mark.parametrize("stream", ["true", "false"])
def test_a_bad_sampling_value_is_a_400_that_names_its_field(
    endpoint: str, field: str, value: str, stream: str, limits: ModelLimits
) -> None:
    parse, body, prefix = ENDPOINTS[endpoint]
    error = refused(parse, body(f'"stream":{stream},"{field}":{value}'), limits)
    assert error.status == 400
    assert error.error_type == "invalid_request_error"
    assert error.param is not None
    assert error.param.startswith(prefix + field), error.message
    assert error.param in error.message


@pytest.mark.parametrize(("body", "param"), COMPLETION, ids=lambda value: value[:48])
def test_completion_refusals_name_the_field(body: str, param: str, limits: ModelLimits) -> None:
    error = refused(parse_completion, body.encode(), limits)
    assert (error.status, error.param) == (400, param), error.message


@pytest.mark.parametrize(("body", "param"), CHAT, ids=lambda value: value[-60:])
def test_chat_refusals_name_the_field(body: str, param: str, limits: ModelLimits) -> None:
    error = refused(parse_chat, body.encode(), limits)
    assert (error.status, error.param) == (400, param), error.message


@pytest.mark.parametrize(("body", "param"), GENERATE, ids=lambda value: value[:60])
def test_generate_refusals_name_the_field(body: str, param: str, limits: ModelLimits) -> None:
    error = refused(parse_generate, body.encode(), limits)
    assert (error.status, error.param) == (400, param), error.message


OTHERS: list[tuple[Parser, str, str]] = [
    (parse_detokenize, '{"tokens":[4294967295]}', "tokens[0]"),
    (parse_detokenize, '{"tokens":[-1]}', "tokens[0]"),
    (parse_detokenize, '{"tokens":["1"]}', "tokens[0]"),
    (parse_detokenize, '{"tokens":[[1],2]}', "tokens[1]"),
    (parse_detokenize, '{"tokens":[[1],[5000]]}', "tokens[1][0]"),
    (parse_detokenize, "{}", "tokens"),
    (parse_tokenize, "{}", "prompt"),
    (parse_tokenize, '{"prompt":[]}', "prompt"),
    (parse_tokenize, '{"prompt":5}', "prompt"),
    (parse_tokenize, '{"prompt":"a","text":"b"}', "text"),
    (parse_tokenize, json.dumps({"prompt": ["a"] * 17}), "prompt"),
    (lambda body, _: parse_abort(body), '{"rid":""}', "rid"),
    (lambda body, _: parse_abort(body), "{}", "rid"),
    (lambda body, _: parse_abort(body), '{"rid":null,"abort_all":false}', "rid"),
    (lambda body, _: parse_abort(body), '{"rid":["x"]}', "rid"),
    (lambda body, _: parse_abort(body), '{"rid":"x","abort_all":true}', "abort_all"),
    (lambda body, _: parse_abort(body), json.dumps({"rid": "x" * 129}), "rid"),
    (lambda body, _: parse_abort(body), '{"abort_all":"yes"}', "abort_all"),
]


@pytest.mark.parametrize(("parse", "body", "param"), OTHERS, ids=lambda value: getattr(value, "__name__", value)[:40])
def test_other_refusals_name_the_field(parse: Parser, body: str, param: str, limits: ModelLimits) -> None:
    error = refused(parse, body.encode(), limits)
    assert (error.status, error.param) == (400, param), error.message


@pytest.mark.parametrize("parse", [parse_completion, parse_chat, parse_generate])
@pytest.mark.parametrize(("body", "problem"), BODIES, ids=lambda value: str(value)[:32])
def test_bodies_that_are_no_json_object(parse: Parser, body: bytes, problem: str, limits: ModelLimits) -> None:
    error = refused(parse, body, limits)
    assert error.status == 400
    assert problem in error.message


@pytest.mark.parametrize("parse", [parse_completion, parse_chat])
def test_an_unknown_model_is_a_404(parse: Parser, limits: ModelLimits) -> None:
    error = refused(parse, b'{"model":"gpt-9","prompt":"a","messages":[]}', limits)
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert error.error_type == "not_found_error"


@pytest.mark.parametrize(
    ("parse", "body", "param"),
    [
        (parse_completion, '{"prompt":"a","logprobs":0}', "logprobs"),
        (parse_completion, '{"prompt":"a","logprobs":3}', "logprobs"),
        (parse_completion, '{"prompt":"a","logit_bias":{"1":1}}', "logit_bias"),
        (parse_completion, '{"prompt":"a","seed":1}', "seed"),
        (parse_completion, '{"prompt":"a","top_k":5}', "top_k"),
        (parse_completion, '{"prompt":"a","presence_penalty":1}', "presence_penalty"),
        (parse_completion, '{"prompt":"a","response_format":{"type":"json_object"}}', "response_format"),
        (parse_chat, '{"messages":[{"role":"user","content":"a"}],"logprobs":true}', "logprobs"),
        (
            parse_chat,
            '{"messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_schema","json_schema":{"schema":{}}}}',
            "response_format",
        ),
        (parse_generate, '{"text":"a","return_logprob":true}', "return_logprob"),
        (parse_generate, '{"text":"a","sampling_params":{"regex":"a"}}', "sampling_params.regex"),
        (parse_generate, '{"text":"a","sampling_params":{"ebnf":"a"}}', "sampling_params.ebnf"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_by_its_name(
    parse: Parser, body: str, param: str, poor_limits: ModelLimits
) -> None:
    error = refused(parse, body.encode(), poor_limits)
    assert (error.status, error.param, error.code) == (400, param, "unsupported_by_engine")
    assert "plain engine" in error.message


_LIMITS = ModelLimits("m", 64, 100, 8, "able", {"temperature": "exact"})
_KNOWN = st.sampled_from([*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__, "role", "content", "type"])
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KNOWN | st.text(max_size=4), inner, max_size=5),
    max_leaves=20,
)


def refusal(parse: Parser, body: bytes) -> ApiError | None:
    try:
        parse(body, _LIMITS)
    except ApiError as error:
        return error
    return None


@given(_JSON | st.dictionaries(_KNOWN, _JSON, max_size=8))
def test_any_json_is_a_request_or_a_4xx(value: object) -> None:
    body = json.dumps(value).encode()
    for parse in (parse_completion, parse_chat, parse_generate, parse_tokenize, parse_detokenize):
        error = refusal(parse, body)
        if error is not None:
            assert 400 <= error.status < 500
            json.loads(error_body(error, "openai"), parse_constant=pytest.fail)


@given(st.binary(max_size=64))
def test_any_bytes_are_a_4xx(body: bytes) -> None:
    for parse in (parse_completion, parse_chat, parse_generate):
        error = refusal(parse, body)
        assert error is not None, "random bytes are no request"
        assert 400 <= error.status < 500
