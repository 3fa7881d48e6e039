"""The shipped model through every process: answers, streams, both APIs, errors. One instance for all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.support.instance import Instance
from tests.support.serving import busy, chat_text, events_of, get, look, post, streams_to, until
from tests.support.wait import wait_until

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHAT: dict[str, Any] = {"model": "default", "messages": QUESTION, "temperature": 0, "max_tokens": 24}
QUESTIONS = (
    "What is the capital of France?",
    "¿Cuál es la capital de España?",
    "日本の首都はどこですか？",
    "Какая столица России?",
    "Quelle heure est-il ?",
    "Say hello in Thai: สวัสดี",
    "Count to five.",
    "🔥 What does this emoji mean?",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    with Instance(runtime_dir=Path(tmp_path_factory.mktemp("r"))) as made:
        yield made.launch("--workers", "2")


@pytest.fixture
def client(served: Instance) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_chat_is_answered_and_a_stream_says_the_same(served: Instance) -> None:
    whole = post(served, "/v1/chat/completions", **CHAT)
    assert whole.status_code == 200
    answer = whole.json()
    text = answer["choices"][0]["message"]["content"]
    assert "Paris" in text
    stream = post(served, "/v1/chat/completions", **CHAT, stream=True, stream_options={"include_usage": True})
    events = events_of(stream.text)
    assert chat_text(events) == text
    usage = events[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
        answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"],
    )  # fmt: skip
    assert 0 < usage["completion_tokens"] <= 24
    finishes = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert [reason for reason in finishes if reason] == [answer["choices"][0]["finish_reason"]]


def test_generate_takes_text_and_ids_and_gives_ids(served: Instance) -> None:
    params = {"temperature": 0, "max_new_tokens": 12}
    by_text = post(served, "/generate", text="The capital of France is", sampling_params=params).json()
    prompt = post(served, "/tokenize", prompt="The capital of France is").json()["tokens"]
    by_ids = post(served, "/generate", input_ids=prompt, sampling_params=params).json()
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_text["text"] == by_ids["text"]
    assert by_text["meta_info"]["prompt_tokens"] == len(prompt)
    assert by_text["meta_info"]["completion_tokens"] == len(by_text["output_ids"])
    back = post(served, "/detokenize", tokens=by_text["output_ids"]).json()
    assert back["text"] == by_text["text"]
    streamed = post(
        served, "/generate", text="The capital of France is", sampling_params=params, stream=True,
        incremental_streaming_output=True,
    )  # fmt: skip
    events = events_of(streamed.text)
    assert "".join(event["text"] for event in events) == by_text["text"]
    assert [token for event in events for token in event["output_ids"]] == by_text["output_ids"]


def test_completions_stop_strings_and_seeds(served: Instance) -> None:
    ask: dict[str, Any] = {"model": "default", "prompt": "One, two, three, four, five,", "temperature": 0}
    plain = post(served, "/v1/completions", **ask, max_tokens=16).json()["choices"][0]
    at = len(plain["text"]) // 2
    stop = plain["text"][at : at + 3]
    cut = post(served, "/v1/completions", **ask, max_tokens=16, stop=stop).json()["choices"][0]
    assert cut["text"] == plain["text"].partition(stop)[0]
    assert cut["finish_reason"] == "stop"
    sampled: dict[str, Any] = {**ask, "prompt": "Once upon a time", "temperature": 1.2, "max_tokens": 16}
    texts = [
        post(served, "/v1/completions", **sampled, seed=seed).json()["choices"][0]["text"] for seed in (7, 7, 8, 9)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


def test_the_official_client(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["default"]
    answer = client.chat.completions.create(**CHAT)
    text = answer.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(client.chat.completions.create(**CHAT, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    completion = client.completions.create(model="default", prompt="The sea is", max_tokens=4, temperature=0)
    pieces = client.completions.create(model="default", prompt="The sea is", max_tokens=4, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == completion.choices[0].text != ""


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/v1/chat/completions", {"model": "default"}, 400, "messages"),
        ("/v1/chat/completions", {**CHAT, "temperature": -1}, 400, "temperature"),
        ("/v1/chat/completions", {**CHAT, "stream": True, "n": 0}, 400, "n"),
        ("/v1/chat/completions", {**CHAT, "model": "another"}, 404, "model"),
        ("/v1/completions", {"model": "default", "prompt": [-1]}, 400, "prompt"),
        ("/v1/completions", {"model": "default", "prompt": "x", "seed": "seven"}, 400, "seed"),
        ("/generate", {"sampling_params": {}}, 400, "text"),
        ("/generate", {"input_ids": [10**9]}, 400, "input_ids"),
        ("/generate", {"text": "x", "sampling_params": {"top_p": 7}}, 400, "top_p"),
    ],
)
def test_bad_input_is_refused_by_its_name(
    served: Instance, path: str, body: dict[str, Any], status: int, field: str
) -> None:
    answer = post(served, path, **body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert field in error["message"]
    assert error["param"] is None or field in error["param"]


def test_the_official_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{**CHAT, "temperature": -1})
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**CHAT, "model": "another"})


def test_health_and_information(served: Instance) -> None:
    for path in ("/health", "/ready", "/health_generate"):
        assert get(served, path).status_code == 200, path
    assert get(served, "/v1/models").json()["data"][0]["id"] == "default"
    model = get(served, "/get_model_info").json()
    assert model["is_simulator"] is False
    assert model["has_chat_template"] is True
    server = get(served, "/get_server_info").json()
    assert (server["mode"], server["workers"], server["engine"]) == ("multi", 2, "openvino")
    missing = get(served, "/v1/nowhere")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")


def test_a_client_that_leaves_frees_its_slot(served: Instance) -> None:
    async def scenario() -> None:
        async with streams_to(served) as streams:
            stream = streams.start(
                "/generate", text="Tell me everything.", sampling_params={"max_new_tokens": 2000, "ignore_eos": True}
            )
            await until(lambda: stream.chunks > 3, 20, "the stream runs")
            assert look(served).totals.running == 1
            await stream.leave()
            await until(lambda: not busy(served), 1.0, "worker, scheduler and detokenizer have forgotten it")

    asyncio.run(scenario())


def test_many_at_once_each_get_their_own_answer(served: Instance) -> None:
    async def scenario() -> list[list[dict[str, Any]]]:
        async with streams_to(served) as streams:
            opened = [
                streams.start(
                    "/v1/chat/completions", model="default", temperature=0, max_tokens=4 + number % 9,
                    messages=[{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}],
                    ignore_eos=True, stream_options={"include_usage": True},
                )
                for number in range(32)
            ]  # fmt: skip
            return [(await stream.finish()).events for stream in opened]

    answers = asyncio.run(scenario())
    assert len({events[0]["id"] for events in answers}) == 32
    prompts: dict[int, set[int]] = {}
    for number, events in enumerate(answers):
        assert len({event["id"] for event in events}) == 1
        assert events[-1]["usage"]["completion_tokens"] == 4 + number % 9
        assert [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == ["length"]
        prompts.setdefault(number % len(QUESTIONS), set()).add(events[-1]["usage"]["prompt_tokens"])
    assert all(len(lengths) == 1 for lengths in prompts.values())  # the same question, the same prompt


def test_status_shows_every_process_and_the_segment(served: Instance) -> None:
    snapshot = served.snapshot()
    assert (snapshot["state"], snapshot["mode"], snapshot["simulator"]) == ("running", "multi", False)
    roles = sorted(row["role"] for row in snapshot["processes"])
    assert roles == ["detokenizer", "router", "scheduler", "supervisor", "tokenizer_worker", "tokenizer_worker"]
    assert all(row["state"] == "RUNNING" and psutil.pid_exists(row["pid"]) for row in snapshot["processes"])
    segment = Path("/dev/shm") / snapshot["shm"]["name"]
    assert segment.stat().st_mode & 0o7777 == 0o600
    assert segment.stat().st_size == snapshot["shm"]["bytes"]
    unexplained = {name: snapshot["totals"]["counters"].get(name, 0) for name in ("unroutable", "undecodable")}
    assert unexplained == {"unroutable": 0, "undecodable": 0}
    wait_until(lambda: not busy(served), 5, "nothing is left in flight")
