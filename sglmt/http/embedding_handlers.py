"""The endpoints that embed: parse, tokenize, submit, answer. Worker process.

`/v1/embeddings` and `/encode` differ in their parser and in how an answer is written. Work on many rows is done in
portions, so that the streams of this worker go on in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from sglmt.http.app import Call, Handler, let_in
from sglmt.http.embedding import EmbeddingContext, EmbeddingRequest, EmbeddingResult, EmbeddingRow, EmbeddingSink
from sglmt.http.errors import bad_field, context_too_long
from sglmt.http.limits import ModelLimits
from sglmt.http.native.encode import parse_encode
from sglmt.http.openai.embeddings import parse_embedding
from sglmt.http.prompts import INLINE_TEXT_CHARS
from sglmt.http.service import Service
from sglmt.messages.columns import pack
from sglmt.messages.to_scheduler import TokenizedEmbeddingReqInput
from sglmt.workers.live_request import LiveRequest

ROWS_AT_A_TIME = 64

Parser = Callable[[bytes, ModelLimits], EmbeddingRequest]


def embedding_routes() -> dict[tuple[str, str], Handler]:
    """The routes of this module."""
    return {
        ("POST", "/v1/embeddings"): partial(embed, parse=parse_embedding),
        ("POST", "/encode"): partial(embed, parse=parse_encode),
    }


async def embed(call: Call, parse: Parser) -> None:
    """One embedding request."""
    await let_in(call, _embed, parse)


async def _embed(call: Call, parse: Parser) -> None:
    service = call.service
    limits = service.limits
    body = await call.body()
    limits.require_embeddings()
    request = parse(body, limits)
    await tokenize(service, request)
    results = await _results(call, request)
    formatter = request.formatter_type(request, EmbeddingContext(request.model or limits.model_name, call.started_s))
    rows: list[bytes] = []
    for index, result in enumerate(results):
        if index and index % ROWS_AT_A_TIME == 0:
            await asyncio.sleep(0)
        rows.append(formatter.row(index, result))
    await call.answer(formatter.body(rows, results))


async def tokenize(service: Service, request: EmbeddingRequest) -> None:
    """Give every row its ids, or its error. Raises ApiError where one row ends the request."""
    rows = [row for row in request.rows if row.text is not None]
    texts = [row.text for row in rows if row.text is not None]
    if sum(map(len, texts)) <= INLINE_TEXT_CHARS:
        all_ids = [service.tokenizer.encode(text, request.add_special_tokens) for text in texts]
    else:
        loop = asyncio.get_running_loop()
        all_ids = await loop.run_in_executor(None, service.tokenizer.encode_many, texts, request.add_special_tokens)
    for row, ids in zip(rows, all_ids, strict=True):
        row.input_ids = ids
        _check_length(row, len(ids), service.limits)
        if row.error is not None and request.one_fails_all:
            raise row.error


def _check_length(row: EmbeddingRow, tokens: int, limits: ModelLimits) -> None:
    if not tokens:
        row.error = bad_field(row.param, "the text has no tokens; send at least one")
    elif tokens > limits.context_length:
        row.error = context_too_long(limits.context_length, f"{row.param} has {tokens} tokens")


async def _results(call: Call, request: EmbeddingRequest) -> list[EmbeddingResult]:
    """Submit the rows and wait for all of them; a client that leaves ends them."""
    sink = EmbeddingSink(len(request.rows), request.one_fails_all)
    call.connection.listeners.add(sink)
    live: list[LiveRequest] = []
    try:
        await _submit(call.service, request, sink, live)
        return await sink.done
    finally:
        call.connection.listeners.discard(sink)
        call.service.frontend.cancel(live)
        if sink.done.done() and not sink.done.cancelled():
            sink.done.exception()  # seen, also when the client left first


async def _submit(service: Service, request: EmbeddingRequest, sink: EmbeddingSink, live: list[LiveRequest]) -> None:
    """Send every row that can be answered; `live` grows as they go, so that a caller who is cancelled knows them."""
    frontend = service.frontend
    deadline_s = None if request.timeout_s is None else time.monotonic() + request.timeout_s
    for index, row in enumerate(request.rows):
        if index and index % ROWS_AT_A_TIME == 0:
            await asyncio.sleep(0)
        if sink.done.done():
            return
        ids = row.input_ids or []
        if row.error is not None:
            sink.refused(index, len(ids), row.error)
            continue
        key = frontend.next_key()
        submission = TokenizedEmbeddingReqInput(
            key=key,
            attempt=1,
            rid=row.rid,
            group=key,
            input_ids=pack("I", ids),
            priority=request.priority,
            deadline_s=deadline_s,
        )
        live.append(frontend.submit(submission, index, len(ids), sink))
        frontend.count_prompt_tokens(len(ids))


def embedding_probe(key: int, token_id: int) -> TokenizedEmbeddingReqInput:
    """A request of one token, to see whether the way through every process is open."""
    return TokenizedEmbeddingReqInput(
        key=key, attempt=1, rid=f"probe-{key:x}", group=key, input_ids=pack("I", [token_id])
    )
