"""/v1/embeddings and /encode: what is taken and refused, how vectors are written, how rows are collected."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import math
import struct
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types import CreateEmbeddingResponse

from sglmt.http.embedding import EmbeddingContext, EmbeddingRequest, EmbeddingResult, EmbeddingSink
from sglmt.http.errors import ApiError
from sglmt.http.limits import ModelLimits
from sglmt.http.native.encode import parse_encode
from sglmt.http.openai.embeddings import MAX_ROWS, parse_embedding, shortened
from sglmt.messages.columns import pack
from sglmt.messages.sampling import FinishReason
from sglmt.messages.to_scheduler import TokenizedEmbeddingReqInput
from sglmt.workers.live_request import LiveRequest

STOP = FinishReason(kind="stop")
FAILURE = FinishReason(kind="error", status=500, code="engine_error", message="it broke")


@pytest.fixture
def able(limits: ModelLimits) -> ModelLimits:
    return dataclasses.replace(limits, context_length=8, embedding_dimensions=4)


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def answer(request: EmbeddingRequest, results: Sequence[EmbeddingResult]) -> Any:
    formatter = request.formatter_type(request, EmbeddingContext("smol", 10.0))
    rows = [formatter.row(index, result) for index, result in enumerate(results)]
    return json.loads(formatter.body(rows, results))


@pytest.mark.parametrize(
    ("value", "rows"),
    [
        ("hi", [("hi", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        ([1, 2, 3], [(None, [1, 2, 3])]),
        ([[1], [2, 3]], [(None, [1]), (None, [2, 3])]),
        (["a", [7]], [("a", None), (None, [7])]),
    ],
)
def test_all_forms_of_input(able: ModelLimits, value: Any, rows: list[tuple[Any, Any]]) -> None:
    request = parse_embedding(body(input=value, model="smol", user="u", encoding_format="float"), able)
    assert [(row.text, row.input_ids) for row in request.rows] == rows
    assert len({row.rid for row in request.rows}) == len(rows)
    assert request.one_fails_all
    assert not request.as_base64


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "input", "required"),
        ({"input": ""}, "input", "not be empty"),
        ({"input": []}, "input", "not be empty"),
        ({"input": ["a", ""]}, "input[1]", "not be empty"),
        ({"input": [[1], []]}, "input[1]", "not be empty"),
        ({"input": [[1], [1000]]}, "input[1][0]", "1000 is outside"),
        ({"input": [1, "a"]}, "input[0]", "expected"),
        ({"input": [True]}, "input[0]", "integer"),
        ({"input": {"a": 1}}, "input", "expected"),
        ({"input": ["a"] * (MAX_ROWS + 1)}, "input", "at most 2048 texts in one request, got 2049"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "float or base64"),
        ({"input": "a", "dimensions": 5}, "dimensions", "have 4 numbers; 1 to 4 can be asked for, got 5"),
        ({"input": "a", "dimensions": 0}, "dimensions", "got 0"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not supported"),
        ({"input": ["a", "b"], "rid": ["x", "x"]}, "rid", "must differ"),
    ],
)
def test_what_cannot_be_used_is_named(able: ModelLimits, fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_embedding(body(**fields), able)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert words in refused.value.message


def test_a_model_of_another_name_is_a_404(able: ModelLimits) -> None:
    with pytest.raises(ApiError) as refused:
        parse_embedding(body(input="a", model="other"), able)
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def test_long_ids_are_refused_with_both_numbers(able: ModelLimits) -> None:
    with pytest.raises(ApiError, match=r"8 tokens, but input\[1\] has 9 tokens") as refused:
        parse_embedding(body(input=[[1], [1] * 9]), able)
    assert refused.value.code == "context_length_exceeded"


def test_a_list_of_ids_is_one_text_however_long(limits: ModelLimits) -> None:
    request = parse_embedding(body(input=[1] * (MAX_ROWS + 1)), limits)
    assert len(request.rows) == 1


def results(*vectors: Sequence[float]) -> list[EmbeddingResult]:
    return [EmbeddingResult(3, 12.5, vector) for vector in vectors]


def test_the_answer_is_the_apis_own_type(able: ModelLimits) -> None:
    request = parse_embedding(body(input=["a", "b"]), able)
    written = answer(request, results((0.5, 0.5, 0.5, 0.5), (1.0, 0.0, 0.0, 0.0)))
    parsed = CreateEmbeddingResponse.model_validate(written)
    assert [(item.index, item.embedding) for item in parsed.data] == [(0, [0.5] * 4), (1, [1.0, 0.0, 0.0, 0.0])]
    assert (parsed.model, parsed.usage.prompt_tokens, parsed.usage.total_tokens) == ("smol", 6, 6)
    assert CreateEmbeddingResponse.model_fields.keys() == written.keys()


def test_base64_is_little_endian_floats(able: ModelLimits) -> None:
    request = parse_embedding(body(input="a", encoding_format="base64"), able)
    written = answer(request, results((0.5, -2.0, 0.25, 1e-30)))["data"][0]["embedding"]
    assert struct.unpack("<4f", base64.b64decode(written)) == pytest.approx((0.5, -2.0, 0.25, 1e-30))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_dimensions_are_the_first_ones_at_length_one(able: ModelLimits, count: int) -> None:
    request = parse_embedding(body(input="a", dimensions=count), able)
    vector = answer(request, results((0.6, 0.0, -0.48, 0.64)))["data"][0]["embedding"]
    assert len(vector) == count
    assert math.hypot(*vector) == pytest.approx(1.0)
    assert vector[0] > 0


def test_shortening_changes_nothing_more_than_asked_for() -> None:
    vector = (3.0, 4.0)  # a model that does not scale its vectors
    assert shortened(vector, None) is vector
    assert shortened(vector, 2) is vector
    assert shortened((0.0, 4.0), 1) == (0.0,)


def test_encode_single_and_batch(able: ModelLimits) -> None:
    single = parse_encode(body(text="a", rid="x"), able)
    written = answer(single, results((1.0, 2.0)))
    assert written == {
        "embedding": [1.0, 2.0],
        "meta_info": {"id": "x", "finish_reason": {"type": "stop"}, "prompt_tokens": 3, "e2e_latency": 2.5},
    }
    batch = parse_encode(body(input_ids=[[1], [2]], rid="y"), able)
    assert [row["meta_info"]["id"] for row in answer(batch, results((1.0,), (2.0,)))] == ["y_0", "y_1"]
    assert not parse_encode(body(input_ids=[1, 2]), able).is_batch
    assert parse_encode(body(text=["a"]), able).is_batch


def test_a_bad_row_of_a_native_batch_costs_itself(able: ModelLimits) -> None:
    request = parse_encode(body(text=["a", "", 7, "d"]), able)
    assert [row.error is None for row in request.rows] == [True, False, False, True]
    request = parse_encode(body(input_ids=[[1] * 9, [1], [1000]]), able)
    errors = [row.error.message if row.error else None for row in request.rows]
    assert errors[1] is None
    assert "8 tokens, but input_ids[0] has 9 tokens" in (errors[0] or "")
    assert "input_ids[2][0]" in (errors[2] or "")
    error = request.rows[0].error
    written = answer(request, [EmbeddingResult(0, 11.0, error=error), *results((1.0,), (2.0,))])
    assert written[0]["embedding"] is None
    reason = written[0]["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"], reason["code"]) == ("abort", 400, "context_length_exceeded")
    assert written[1]["embedding"] == [1.0]


def test_a_native_request_without_any_vector_is_an_error(able: ModelLimits) -> None:
    request = parse_encode(body(text=["", ""]), able)
    with pytest.raises(ApiError, match=r"text\[0\]: must not be empty"):
        answer(request, [EmbeddingResult(0, 11.0, error=row.error) for row in request.rows])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": []}, "text"),
        ({"text": "a", "input_ids": [1]}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "rid": "x" * 200}, "rid"),
    ],
)
def test_native_bodies_that_cannot_be_used(able: ModelLimits, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_encode(body(**fields), able)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_each_kind_of_model_refuses_the_other_kind_of_request(able: ModelLimits) -> None:
    embedding = dataclasses.replace(able, capabilities={"generation": "refused", "embeddings": "exact"})
    with pytest.raises(ApiError, match="the able engine makes only embeddings with the model 'smol'"):
        embedding.require_generation()
    embedding.require_embeddings()
    generating = dataclasses.replace(able, capabilities={"generation": "exact", "embeddings": "refused"})
    with pytest.raises(ApiError, match="the able engine makes no embeddings with the model 'smol'"):
        generating.require_embeddings()
    generating.require_generation()


def live(choice: int, sink: EmbeddingSink, vector: tuple[float, ...] | None) -> LiveRequest:
    submission = TokenizedEmbeddingReqInput(key=choice, attempt=1, rid="r", group=0, input_ids=pack("I", [1]))
    request = LiveRequest(submission, choice, 1, sink, 3, 0.0)
    request.embedding = vector
    return request


def end(sink: EmbeddingSink, choice: int, vector: tuple[float, ...] | None, finish: FinishReason = STOP) -> None:
    sink.finished(live(choice, sink, vector), "", array("I"), None, finish)


def test_rows_come_out_in_order_each_once() -> None:
    async def collect() -> list[EmbeddingResult]:
        sink = EmbeddingSink(3, False)
        sink.refused(2, 9, ApiError(400, "too long"))
        end(sink, 1, (2.0,))
        end(sink, 1, (5.0,))
        assert not sink.done.done()
        end(sink, 0, None, FAILURE)
        return await sink.done

    first, second, third = asyncio.run(collect())
    assert first.error is not None
    assert first.error.message == "it broke"
    assert (second.vector, second.error) == ((2.0,), None)
    assert third.error is not None
    assert third.prompt_tokens == 9


def test_one_failure_ends_a_request_that_stands_or_falls_as_a_whole() -> None:
    async def collect() -> None:
        sink = EmbeddingSink(3, True)
        end(sink, 1, (), FAILURE)
        end(sink, 0, (1.0,))
        await sink.done

    with pytest.raises(ApiError, match="it broke"):
        asyncio.run(collect())


def test_a_client_that_leaves_ends_the_wait() -> None:
    async def leave() -> None:
        sink = EmbeddingSink(1, True)
        sink.connection_lost()
        end(sink, 0, (1.0,))
        await sink.done

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(leave())
