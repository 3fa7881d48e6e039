"""The official client, its own parser and stream decoder included, against our parsers and formatters. No network."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from sglmt.http.errors import ApiError, error_body, queue_full, unavailable
from sglmt.http.formatting import ChoiceResult, ChoiceUsage, FormatContext
from sglmt.http.generation import GenerationRequest
from sglmt.http.limits import ModelLimits
from sglmt.http.openai.chat import parse_chat
from sglmt.http.openai.completions import parse_completion
from sglmt.http.openai.models import models_body
from sglmt.messages.sampling import FinishReason, TokenLogprobs

TEXTS = ["The", " answer\u2028is\n\n", "世界", "\U0001f600"]
FINISH = FinishReason(kind="stop", matched=2)
Answer = Callable[[GenerationRequest], bytes]


def context() -> FormatContext:
    return FormatContext("smol", 1700, "abc", lambda i: TEXTS[i % 4], lambda i: TEXTS[i % 4].encode())


def chosen(request: GenerationRequest, count: int) -> TokenLogprobs | None:
    return None if request.logprobs is None else TokenLogprobs(chosen=[-0.5] * count)


def usage() -> ChoiceUsage:
    return ChoiceUsage(7, len(TEXTS) + 1, 2)


def whole(request: GenerationRequest) -> bytes:
    """Every choice says TEXTS; the last id is the end of the sequence."""
    ids = list(range(len(TEXTS) + 1))
    results = [
        ChoiceResult(
            choice // request.n, choice % request.n, "".join(TEXTS), ids, chosen(request, 5), None, FINISH, usage()
        )
        for choice in range(request.num_choices)
    ]
    return request.make_formatter(context()).result(results)


def streamed(request: GenerationRequest) -> bytes:
    formatter = request.make_formatter(context())
    out = [formatter.stream_start()]
    for index, text in enumerate(TEXTS):
        out.extend(formatter.delta(c, text, [index], chosen(request, 1)) for c in range(request.num_choices))
    out.extend(formatter.finish(c, "", [4], chosen(request, 1), FINISH, usage()) for c in range(request.num_choices))
    return b"".join([*out, formatter.stream_end()])


def broken(request: GenerationRequest) -> bytes:
    formatter = request.make_formatter(context())
    start = formatter.stream_start() + formatter.delta(0, "The", [0], None)
    return start + formatter.stream_error(unavailable("the engine is away"))


class Server:
    """What a worker would answer; `failure` is raised instead, `answer_stream` makes the streams."""

    def __init__(self, limits: ModelLimits) -> None:
        self.limits = limits
        self.failure: ApiError | None = None
        self.answer_stream: Answer = streamed

    def __call__(self, http: httpx.Request) -> httpx.Response:
        try:
            return self._answer(http)
        except ApiError as error:
            headers = {"content-type": "application/json"}
            return httpx.Response(error.status, headers=headers, content=error_body(error, "openai"))

    def _answer(self, http: httpx.Request) -> httpx.Response:
        if self.failure is not None:
            raise self.failure
        if http.url.path == "/v1/models":
            return httpx.Response(
                200, headers={"content-type": "application/json"}, content=models_body(self.limits, 1)
            )
        parse = parse_chat if "chat" in http.url.path else parse_completion
        request = parse(http.read(), self.limits)
        if request.stream:
            return httpx.Response(
                200, headers={"content-type": "text/event-stream"}, content=self.answer_stream(request)
            )
        return httpx.Response(200, headers={"content-type": "application/json"}, content=whole(request))


@pytest.fixture
def server(limits: ModelLimits) -> Server:
    return Server(limits)


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    transport = httpx.Client(transport=httpx.MockTransport(server))
    with openai.OpenAI(api_key="k", base_url="http://server/v1", http_client=transport, max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smol", messages=[{"role": "user", "content": "hi"}], n=2, logprobs=True, temperature=0, max_tokens=9
    )
    assert [choice.message.content for choice in answer.choices] == ["".join(TEXTS)] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert answer.choices[1].logprobs is not None
    assert len(answer.choices[1].logprobs.content or []) == 5
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 10, 17)


def test_chat_stream(client: openai.OpenAI) -> None:
    texts = {0: "", 1: ""}
    reasons: list[tuple[int, str]] = []
    usages = []
    stream = client.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage is not None:
            usages.append(chunk.usage.total_tokens)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason is not None:
                reasons.append((choice.index, choice.finish_reason))
    assert texts == {0: "".join(TEXTS), 1: "".join(TEXTS)}
    assert reasons == [(0, "stop"), (1, "stop")]
    assert usages == [17]


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="smol", prompt=["a", "b"], logprobs=0, max_tokens=9)
    assert [choice.text for choice in answer.choices] == ["".join(TEXTS)] * 2
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [-0.5] * 5
    stream = client.completions.create(model="smol", prompt=[1, 2], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "".join(TEXTS)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smol"]


def test_bad_requests_reach_the_user_with_field_and_message(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="smol", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    assert "must be between" in caught.value.message
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-9", prompt="a")
    assert unknown.value.code == "model_not_found"


def test_overload_reaches_the_user_as_a_rate_limit(client: openai.OpenAI, server: Server) -> None:
    server.failure = queue_full()
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="smol", prompt="a", stream=True)
    assert caught.value.code == "queue_full"


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_failure_in_mid_stream_raises_in_the_client(client: openai.OpenAI, server: Server, kind: str) -> None:
    server.answer_stream = broken
    if kind == "chat":
        messages = [{"role": "user", "content": "a"}]
        stream = client.chat.completions.create(model="smol", messages=messages, stream=True)  # type: ignore[call-overload]
    else:
        stream = client.completions.create(model="smol", prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="the engine is away"):
        list(stream)
