"""The endpoints that generate: parse, tokenize, submit, answer. Worker process; no hot path runs through here
twice a request.

`/v1/completions`, `/v1/chat/completions` and `/generate` differ in their parser only.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial

from sglmt.http.app import Call, Handler, let_in
from sglmt.http.errors import from_finish
from sglmt.http.formatting import ChoiceResult, ChoiceUsage, FormatContext, Formatter
from sglmt.http.generation import GenerationRequest
from sglmt.http.limits import ModelLimits
from sglmt.http.native.generate import parse_generate
from sglmt.http.openai.chat import parse_chat
from sglmt.http.openai.completions import parse_completion
from sglmt.http.prompts import tokenize
from sglmt.http.service import Service
from sglmt.http.streams import CollectSink, StreamSink
from sglmt.ipc.state_page import SlotWord
from sglmt.messages.columns import pack
from sglmt.messages.sampling import FinishReason, SamplingParams, TextSpec
from sglmt.messages.to_scheduler import TokenizedGenerateReqInput
from sglmt.status.metric_words import AbortCause, Outcome, abort_word
from sglmt.workers.live_request import LiveRequest, Sink

_SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

Parser = Callable[[bytes, ModelLimits], GenerationRequest]


def generation_routes() -> dict[tuple[str, str], Handler]:
    """The routes of this module."""
    return {
        ("POST", "/v1/completions"): partial(generate, parse=parse_completion),
        ("POST", "/v1/chat/completions"): partial(generate, parse=parse_chat),
        ("POST", "/generate"): partial(generate, parse=parse_generate),
    }


async def generate(call: Call, parse: Parser) -> None:
    """One generation request, streamed or not."""
    await let_in(call, _generate, parse)


async def _generate(call: Call, parse: Parser) -> None:
    service = call.service
    limits = service.limits
    body = await call.body()
    limits.require_generation()
    request = parse(body, limits)
    prompts = await tokenize(service, request)
    prompt_ids = [ids for ids, _ in prompts]
    samplings = [
        request.sampling_for(len(prompt_ids[choice // request.n]), limits, choice % request.n)
        for choice in range(request.num_choices)
    ]
    formatter = request.make_formatter(_format_context(call, request, prompts, limits))
    if not request.needs_engine:
        await _answer_without_engine(call, request, formatter, prompt_ids)
        return
    lora_name = request.model if request.model in limits.adapters else None
    if request.stream:
        await _answer_stream(call, request, formatter, prompt_ids, samplings, lora_name)
    else:
        await _answer_whole(call, request, formatter, prompt_ids, samplings, lora_name)


def _format_context(
    call: Call, request: GenerationRequest, prompts: list[tuple[Sequence[int], str]], limits: ModelLimits
) -> FormatContext:
    service = call.service
    return FormatContext(
        model_name=request.model or limits.model_name,
        created_unix_s=int(time.time()),
        request_id=request.prompts[0].rid,
        token_text=service.tokenizer.token_text,
        token_bytes=service.tokenizer.token_bytes,
        prompt_texts=[text for _, text in prompts],
        prompt_ids=[ids for ids, _ in prompts],
        started_s=call.started_s,
    )


def submit(
    service: Service,
    request: GenerationRequest,
    prompt_ids: list[Sequence[int]],
    samplings: list[SamplingParams],
    lora_name: str | None,
    sink: Sink,
) -> list[LiveRequest]:
    """Send every choice to the scheduler; choices of a prompt share its rid."""
    frontend = service.frontend
    deadline_s = None if request.timeout_s is None else time.monotonic() + request.timeout_s
    packed = [ids.tobytes() if isinstance(ids, array) else pack("I", ids) for ids in prompt_ids]
    live: list[LiveRequest] = []
    group = 0
    for choice, sampling in enumerate(samplings):
        prompt_index, k = divmod(choice, request.n)
        key = frontend.next_key()
        if k == 0:
            group = key
        submission = TokenizedGenerateReqInput(
            key=key,
            attempt=1,
            rid=request.prompts[prompt_index].rid,
            group=group,
            input_ids=packed[prompt_index],
            sampling=sampling,
            text=request.text,
            logprobs=request.logprobs,
            confirm_admission=request.stream,
            priority=request.priority,
            deadline_s=deadline_s,
            lora_name=lora_name,
        )
        tokens = len(prompt_ids[prompt_index])
        live.append(frontend.submit(submission, choice, tokens, sink))
    frontend.count_prompt_tokens(sum(map(len, prompt_ids)))
    return live


async def _answer_stream(
    call: Call,
    request: GenerationRequest,
    formatter: Formatter,
    prompt_ids: list[Sequence[int]],
    samplings: list[SamplingParams],
    lora_name: str | None,
) -> None:
    service = call.service
    live: list[LiveRequest] = []
    sink = StreamSink(call.connection, formatter, len(samplings), service.flusher, partial(_end_slow_client, call))
    listeners = call.connection.listeners
    listeners.add(sink)
    service.frontend.open_streams.add(sink)
    try:
        live = submit(service, request, prompt_ids, samplings, lora_name, sink)
        await sink.admission
        await call.start(200, _SSE_HEADERS, sink.open)
        await sink.done
        if sink.failure is not None:
            call.outcome = Outcome.ABORTED if sink.failure.status == 499 else Outcome.FAILED
        await call.finish(sink.take_rest())
    finally:
        listeners.discard(sink)
        service.frontend.open_streams.discard(sink)
        sink.close()
        service.frontend.cancel(live)


def _end_slow_client(call: Call) -> None:
    """The client does not read: its answer would grow without bound."""
    slot = call.service.frontend.slot
    slot.add(SlotWord.SLOW_CLIENT_ABORTS)
    slot.add(abort_word(AbortCause.SLOW_CLIENT))
    call.outcome = Outcome.ABORTED
    call.connection.transport.abort()


async def _answer_whole(
    call: Call,
    request: GenerationRequest,
    formatter: Formatter,
    prompt_ids: list[Sequence[int]],
    samplings: list[SamplingParams],
    lora_name: str | None,
) -> None:
    sink = CollectSink(len(samplings), request.n)
    call.connection.listeners.add(sink)
    live: list[LiveRequest] = []
    try:
        live = submit(call.service, request, prompt_ids, samplings, lora_name, sink)
        results = await sink.done
    finally:
        call.connection.listeners.discard(sink)
        call.service.frontend.cancel(live)
    if len(results) == 1 and results[0].finish.kind in ("abort", "error"):
        raise from_finish(results[0].finish)
    await call.answer(formatter.result(results))


async def _answer_without_engine(
    call: Call, request: GenerationRequest, formatter: Formatter, prompt_ids: list[Sequence[int]]
) -> None:
    """Nothing is to be generated: every choice is empty and ends by length."""
    results = []
    for choice in range(request.num_choices):
        prompt_index, k = divmod(choice, request.n)
        usage = ChoiceUsage(len(prompt_ids[prompt_index]), 0, 0)
        results.append(ChoiceResult(prompt_index, k, "", [], None, None, FinishReason(kind="length"), usage))
    if not request.stream:
        await call.answer(formatter.result(results))
        return
    events = [formatter.stream_start()]
    for choice, result in enumerate(results):
        events.append(formatter.finish(choice, "", [], None, result.finish, result.usage))
    events.append(formatter.stream_end())
    await call.start(200, _SSE_HEADERS)
    await call.finish(b"".join(events))


def probe_submission(key: int, token_id: int) -> TokenizedGenerateReqInput:
    """A request of one token, to see whether the way through every process is open."""
    return TokenizedGenerateReqInput(
        key=key,
        attempt=1,
        rid=f"probe-{key:x}",
        group=key,
        input_ids=pack("I", [token_id]),
        sampling=SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True),
        text=TextSpec(),
    )
