"""The endpoints that tell: health, models, model and server info, tokenize, abort. Worker process."""

from __future__ import annotations

import asyncio
import time

from sglmt.http.app import Call, Handler
from sglmt.http.errors import unavailable
from sglmt.http.native.abort import parse_abort
from sglmt.http.native.info import model_info_body
from sglmt.http.native.tokenize import (
    DetokenizeRequest,
    detokenize_body,
    parse_detokenize,
    parse_tokenize,
    tokenize_body,
)
from sglmt.http.openai.models import model_body, models_body
from sglmt.http.prompts import encode_all
from sglmt.status.metrics import CONTENT_TYPE

ENGINE_PROBE_S = 20.0
INLINE_IDS = 2048  # more ids are decoded and written in a thread, off the event loop


def info_routes() -> dict[tuple[str, str], Handler]:
    """The routes of this module."""
    return {
        ("GET", "/health"): health,
        ("GET", "/ready"): ready,
        ("GET", "/health_generate"): health_generate,
        ("GET", "/v1/models"): models,
        ("GET", "/v1/models/{model}"): model,
        ("GET", "/get_model_info"): model_info,
        ("GET", "/get_server_info"): server_info,
        ("GET", "/metrics"): metrics,
        ("POST", "/tokenize"): tokenize,
        ("POST", "/detokenize"): detokenize,
        ("POST", "/abort_request"): abort_request,
    }


async def health(call: Call) -> None:
    """Liveness: this worker's loop runs."""
    await call.answer(b'{"status":"ok"}')


async def ready(call: Call) -> None:
    """Readiness: requests can be served now, by every kind of process."""
    reason = call.service.why_not_ready()
    if reason is not None:
        raise unavailable(f"not ready: {reason}", code="not_ready")
    await call.answer(b'{"status":"ready"}')


async def health_generate(call: Call) -> None:
    """Deep check: one token through every process."""
    if not await call.service.probe_engine(time.monotonic() + ENGINE_PROBE_S):
        raise unavailable(f"no token came through within {ENGINE_PROBE_S:g} s", code="engine_silent")
    await call.answer(b'{"status":"ok"}')


async def models(call: Call) -> None:
    await call.answer(models_body(call.service.limits, call.service.started_unix_s))


async def model(call: Call) -> None:
    await call.answer(model_body(call.path.rpartition("/")[2], call.service.limits, call.service.started_unix_s))


async def model_info(call: Call) -> None:
    await call.answer(model_info_body(call.service.tokenizer.info, call.service.limits, call.service.weight_version))


async def server_info(call: Call) -> None:
    await call.answer(call.service.server_info())


async def metrics(call: Call) -> None:
    """Counters of the whole instance, the same whichever worker answers."""
    await call.answer(call.service.metrics(), content_type=CONTENT_TYPE.encode())


async def tokenize(call: Call) -> None:
    request = parse_tokenize(await call.body(), call.service.limits)
    rows = await encode_all(call.service, request.texts, request.add_special_tokens)
    limits = call.service.limits
    if sum(map(len, rows)) <= INLINE_IDS:
        body = tokenize_body(request, rows, limits)
    else:
        body = await asyncio.get_running_loop().run_in_executor(None, tokenize_body, request, rows, limits)
    await call.answer(body)


async def detokenize(call: Call) -> None:
    request = parse_detokenize(await call.body(), call.service.limits)
    await call.answer(detokenize_body(request, await _decode_all(call, request)))


async def _decode_all(call: Call, request: DetokenizeRequest) -> list[str]:
    """The text of every row; many ids do not hold up the streams of this worker."""

    def decode() -> list[str]:
        return [call.service.tokenizer.decode(row, request.skip_special_tokens) for row in request.rows]

    if sum(map(len, request.rows)) <= INLINE_IDS:
        return decode()
    return await asyncio.get_running_loop().run_in_executor(None, decode)


async def abort_request(call: Call) -> None:
    """End running requests; answered when the scheduler has done so. An id nobody has is no error (it may just have
    ended)."""
    rid, all_requests = parse_abort(await call.body())
    done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def answered(carried_out: bool) -> None:
        if not done.done():  # else the client has left
            done.set_result(carried_out)

    call.service.frontend.abort_by_rid(rid, all_requests, answered)
    if not await done:
        raise unavailable("the scheduler has not confirmed it in time; it may still happen", code="engine_away")
    await call.answer(b'{"status":"ok"}')
