"""A request's prompts to token ids: rendered, bounded, tokenized. Worker process.

What takes long happens in a thread, with calls that release the interpreter lock, so that this worker's streams go on;
what is surely too long is refused before that.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

from sglmt.http.errors import bad_request, context_too_long
from sglmt.http.generation import ChatRender, GenerationRequest
from sglmt.http.service import Service
from sglmt.tokenizer.encode_cache import Plan

INLINE_TEXT_CHARS = 8192  # longer prompts are rendered and tokenized in a thread, off the event loop


async def tokenize(service: Service, request: GenerationRequest) -> list[tuple[Sequence[int], str]]:
    """(ids, text) of every prompt; the text is empty where only ids were given and nobody needs it."""
    chat = request.chat
    texts = [item.text for item in request.prompts] if chat is None else [await _render(service, chat)]
    given = [text for text in texts if text is not None]
    for text in given:
        refuse_surely_too_long(service, text)
    encoded = iter(await encode_all(service, given, request.add_special_tokens))
    result: list[tuple[Sequence[int], str]] = []
    for item, prompt in zip(request.prompts, texts, strict=True):
        if prompt is None:
            ids: Sequence[int] = item.input_ids or []
            result.append((ids, service.tokenizer.decode(ids, skip_special_tokens=False) if request.echo else ""))
            continue
        ids = next(encoded)
        if not ids:
            raise bad_request("the prompt has no tokens; send at least one", "prompt")
        result.append((ids, prompt))
    return result


async def _render(service: Service, chat: ChatRender) -> str:
    """The prompt of a chat; a long one is rendered in a thread."""
    template = service.template
    if template is None:
        raise bad_request("this model has no chat template; use /v1/completions or start with --chat-template")
    if chat.size <= INLINE_TEXT_CHARS:
        return chat.render(template)
    return await asyncio.get_running_loop().run_in_executor(None, chat.render, template)


def refuse_surely_too_long(service: Service, text: str) -> None:
    """Raise ApiError `context_length_exceeded` for a text that cannot fit, without tokenizing it."""
    length, bound = service.limits.context_length, service.tokenizer.length_bound
    if bound is None or len(text) <= length:
        return
    fewest = bound.fewest_tokens(text)
    if fewest > length:
        raise context_too_long(length, f"the prompt has at least {fewest} tokens")


async def encode_all(service: Service, texts: list[str], add_special_tokens: bool) -> list[array[int]]:
    """The ids of each text; much that has to be encoded does not hold up the streams of this worker."""
    plans: list[Plan] = []
    missing_chars = 0
    for text in texts:
        plan = service.encode_cache.plan(text, add_special_tokens)
        plans.append(plan)
        missing_chars += plan.missing_chars
    if missing_chars <= INLINE_TEXT_CHARS:
        return [plan.encode() for plan in plans]
    return await asyncio.get_running_loop().run_in_executor(None, lambda: [plan.encode() for plan in plans])
