"""Embeddings through every process: first thing after launch, across crashes, and with a real model."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.embedding_model import embedding_model_dir
from tests.support.instance import Instance
from tests.support.serving import ANSWER_WITHIN_S, busy, look, post, stopped, until
from tests.support.wait import wait_until

SIMULATOR = ("--engine", "simulator", "--workers", "2")
TEXTS = [f"text number {number} " + "and more " * (number % 7) for number in range(24)]

RELATED = ("A man is eating a piece of bread.", "Someone is having a meal.")
UNRELATED = "The new processor doubles the memory bandwidth."


def vectors(answer: httpx.Response) -> list[list[float]]:
    """Of an answer that must be one."""
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [item["embedding"] for item in data]


def clean(instance: Instance) -> bool:
    """Nothing in flight, nothing that found no address or could not be read."""
    counters = look(instance).totals.counters
    return not busy(instance) and not counters.get("unroutable") and not counters.get("undecodable")


def test_a_batch_of_embeddings_may_be_the_very_first_request(instance: Instance) -> None:
    instance.launch(*SIMULATOR, "--detokenizers", "2")
    first = post(instance, "/v1/embeddings", model="default", input=["a", "b"])
    expected = vectors(first)
    assert len(expected) == 2
    assert expected[0] != expected[1]
    for _ in range(8):  # on connections of their own: both workers get some
        assert vectors(post(instance, "/v1/embeddings", input=["a", "b"])) == expected
    native = post(instance, "/encode", text=["a", "", "b"], rid=["x", "y", "z"]).json()
    assert [row["embedding"] for row in native] == [expected[0], None, expected[1]]
    assert [row["meta_info"]["id"] for row in native] == ["x", "y", "z"]
    assert native[1]["meta_info"]["finish_reason"]["status_code"] == 400
    assert [row.restarts for row in look(instance).processes] == [0] * 7
    wait_until(lambda: clean(instance), 5, "nothing is left in flight")


def pid_of(instance: Instance, role: str) -> int:
    pid = next(row.pid for row in look(instance).processes if row.role == role)
    assert pid is not None
    return pid


def restarts_of(instance: Instance, role: str) -> int:
    return sum(row.restarts for row in look(instance).processes if row.role == role)


def waiting(instance: Instance) -> int:
    """Rows the workers wait for."""
    return sum(count for name, count in busy(instance).items() if name.startswith("tokenizer_worker"))


async def all_texts(instance: Instance, client: httpx.AsyncClient, role: str) -> list[httpx.Response]:
    """One request a text, sent while a process of `role` is stopped, which is then killed."""
    pid = pid_of(instance, role)
    with stopped(pid):
        requests = [
            asyncio.create_task(client.post(instance.url + "/v1/embeddings", json={"input": text})) for text in TEXTS
        ]
        await until(lambda: waiting(instance) == len(TEXTS), 10, f"all are under way while the {role} is stopped")
        assert not any(request.done() for request in requests)
        os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(*requests)


def test_every_embedding_is_answered_once_whoever_is_killed(instance: Instance) -> None:
    instance.launch(*SIMULATOR)
    expected = vectors(post(instance, "/v1/embeddings", input=TEXTS))

    async def kill_each() -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=ANSWER_WITHIN_S, limits=limits) as client:
            for role in ("scheduler", "detokenizer", "router"):
                answers = await all_texts(instance, client, role)
                assert [vectors(answer) for answer in answers] == [[vector] for vector in expected], role
                assert restarts_of(instance, role) == 1

    asyncio.run(kill_each())
    wait_until(lambda: clean(instance), 10, "nothing is left in flight")


def test_a_stream_of_embeddings_survives_kills_in_the_middle(instance: Instance) -> None:
    instance.launch(*SIMULATOR)
    expected = vectors(post(instance, "/v1/embeddings", input=TEXTS))
    stop = asyncio.Event()

    async def ask(client: httpx.AsyncClient) -> int:
        count = 0
        while not stop.is_set():
            answer = await client.post(instance.url + "/v1/embeddings", json={"input": TEXTS})
            assert vectors(answer) == expected
            count += 1
        return count

    async def kill_under_load() -> list[int]:
        async with httpx.AsyncClient(timeout=ANSWER_WITHIN_S) as client:
            askers = [asyncio.create_task(ask(client)) for _ in range(4)]
            try:
                for role in ("detokenizer", "scheduler"):
                    os.kill(pid_of(instance, role), signal.SIGKILL)
                    await until(lambda role=role: restarts_of(instance, role) == 1, 30, f"the {role} is back")  # type: ignore[misc]
            finally:
                stop.set()
            return await asyncio.gather(*askers)

    assert min(asyncio.run(kill_under_load())) > 0
    wait_until(lambda: clean(instance), 10, "nothing is left in flight")


def test_a_client_that_leaves_frees_its_rows(instance: Instance) -> None:
    instance.launch(*SIMULATOR)

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=ANSWER_WITHIN_S) as client:
            request = asyncio.create_task(client.post(instance.url + "/v1/embeddings", json={"input": TEXTS}))
            await until(lambda: waiting(instance) == len(TEXTS), 10, "all rows wait for the stopped scheduler")
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            await until(lambda: waiting(instance) == 0, 1, "the worker has forgotten them")

    with stopped(pid_of(instance, "scheduler")):
        asyncio.run(leave())
    wait_until(lambda: clean(instance), 10, "the scheduler has forgotten them too")
    assert len(vectors(post(instance, "/v1/embeddings", input=TEXTS))) == len(TEXTS)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    pytest.importorskip("openvino_genai")
    with Instance(runtime_dir=Path(tmp_path_factory.mktemp("r"))) as made:
        yield made.launch("--model-path", str(embedding_model_dir()), "--workers", "2")


@pytest.fixture
def client(real: Instance) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def similarity(first: list[float], second: list[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


def test_related_sentences_are_closer_than_unrelated_ones(real: Instance) -> None:
    meal, dinner, chip = vectors(post(real, "/v1/embeddings", input=[*RELATED, UNRELATED]))
    assert similarity(meal, meal) == pytest.approx(1.0, abs=1e-5)
    assert similarity(meal, dinner) > 0.5 > 0.2 > max(similarity(meal, chip), similarity(dinner, chip))


def test_one_text_has_one_vector_alone_or_in_a_batch(real: Instance) -> None:
    texts = [*RELATED, "short", UNRELATED * 8]
    together = vectors(post(real, "/v1/embeddings", input=texts))
    for text, vector in zip(texts, together, strict=True):
        assert vectors(post(real, "/v1/embeddings", input=text))[0] == pytest.approx(vector, abs=1e-4)
        ids = post(real, "/tokenize", prompt=text).json()["tokens"]
        native = post(real, "/encode", input_ids=ids).json()
        assert native["embedding"] == pytest.approx(vector, abs=1e-4)
        assert native["meta_info"]["prompt_tokens"] == len(ids)


def test_the_official_client_reads_both_encodings(client: openai.OpenAI) -> None:
    plain = client.embeddings.create(model="default", input=list(RELATED), encoding_format="float")
    packed = client.embeddings.create(model="default", input=list(RELATED), encoding_format="base64")
    default = client.embeddings.create(model="default", input=list(RELATED))  # base64, decoded by the client
    assert [len(item.embedding) for item in plain.data] == [384, 384]
    for item, other, third in zip(plain.data, packed.data, default.data, strict=True):
        assert isinstance(other.embedding, str)
        assert list(third.embedding) == pytest.approx(item.embedding, abs=1e-6)
    assert plain.usage == default.usage
    assert plain.usage.prompt_tokens > 10
    short = client.embeddings.create(model="default", input=RELATED[0], dimensions=64, encoding_format="float")
    assert len(short.data[0].embedding) == 64
    assert similarity(short.data[0].embedding, short.data[0].embedding) == pytest.approx(1.0, abs=1e-6)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_what_the_model_cannot_do_is_said(real: Instance) -> None:
    long = error_of(post(real, "/v1/embeddings", input=["a", "word " * 400]), 400)
    assert (long["code"], "256 tokens" in long["message"]) == ("context_length_exceeded", True)
    assert "input[1] has 402 tokens" in long["message"]
    rows = post(real, "/encode", text=["a", "word " * 400]).json()
    assert rows[0]["embedding"]
    assert rows[1]["meta_info"]["finish_reason"]["code"] == "context_length_exceeded"
    assert "384" in error_of(post(real, "/v1/embeddings", input="a", dimensions=385), 400)["message"]
    messages = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": messages, "stream": True}),
        ("/generate", {"text": "hi"}),
    ):
        error = error_of(post(real, path, **body), 400)
        assert error["code"] == "unsupported_by_engine"
        assert "the openvino engine makes only embeddings with the model 'default'" in error["message"]
    assert httpx.get(real.url + "/health_generate", timeout=30).status_code == 200
    wait_until(lambda: clean(real), 5, "nothing is left in flight")


def test_a_generating_model_makes_no_embeddings(instance: Instance) -> None:
    pytest.importorskip("openvino_genai")
    instance.launch("--workers", "1")
    for path, body in (("/v1/embeddings", {"input": "hi"}), ("/encode", {"text": "hi"})):
        error = error_of(post(instance, path, **body), 400)
        assert error["code"] == "unsupported_by_engine"
        assert "the openvino engine makes no embeddings with the model 'default'" in error["message"]
