"""Big requests beside running streams: are they answered, and how long do the streams wait meanwhile?

`python -m tests.support.big_prompts` (see `scripts/gaps`) prints the longest pause between two pieces of any stream,
for each kind of big request, and fails above the limit. What else runs on the machine shows in these numbers: the row
`nothing` tells how much.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.instance import Instance

STREAMS = 20
BIG_BYTES = 2 * 1024 * 1024
SETTLE_S = 0.3  # the streams' pieces that were on their way
QUIET_S = 1.5
WORDS = "The quick brown fox jumps over the lazy dog, 12345 times. "
KANJI = "日本語のテキストと漢字、"

Case = tuple[str, dict[str, Any], int]  # path, body, expected status


def cases() -> dict[str, Case]:
    """A name → a request of about 2 MB."""
    text, unicode_text = WORDS * (BIG_BYTES // len(WORDS)), KANJI * (BIG_BYTES // len(KANJI.encode()))
    rows = [WORDS * 140] * 250
    turns = [{"role": role, "content": WORDS * 3} for _ in range(4000) for role in ("user", "assistant")]
    return {
        "completion": ("/v1/completions", {"prompt": text, "max_tokens": 1}, 400),
        "completion, other script": ("/v1/completions", {"prompt": unicode_text, "max_tokens": 1}, 400),
        "completion, 250 rows": ("/v1/completions", {"prompt": rows, "max_tokens": 1}, 200),
        "completion, unreadable": ("/v1/completions", {"prompt": text, "max_tokens": "x"}, 400),
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, 400),
        "chat, 8000 turns": ("/v1/chat/completions", {"messages": turns}, 400),
        "generate": ("/generate", {"input_ids": [500] * 500_000}, 400),
        "tokenize": ("/tokenize", {"prompt": text}, 200),
        "tokenize, other script": ("/tokenize", {"prompt": unicode_text}, 200),
        "detokenize": ("/detokenize", {"tokens": [500] * 400_000}, 200),
        "embeddings": ("/v1/embeddings", {"input": text}, 400),
    }


class Streams:
    """`STREAMS` running streams; `longest_gap_s` of any since `reset`."""

    def __init__(self) -> None:
        self.longest_gap_s = 0.0
        self.all_run = asyncio.Event()
        self._running = 0

    def reset(self) -> None:
        """Forget the gaps so far."""
        self.longest_gap_s = 0.0

    async def read(self, client: httpx.AsyncClient, url: str, tokens: int) -> str:
        """One stream, to its end; its text."""
        body = {"prompt": "go", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        last_s: float | None = None
        text = ""
        async with client.stream("POST", url + "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now_s = time.monotonic()
                if last_s is None:
                    self._begun()
                else:
                    self.longest_gap_s = max(self.longest_gap_s, now_s - last_s)
                last_s = now_s
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
        return text

    def _begun(self) -> None:
        self._running += 1
        if self._running == STREAMS:
            self.all_run.set()


@asynccontextmanager
async def running(url: str, tokens: int) -> AsyncIterator[tuple[Streams, Callable[[], Any]]]:
    """The streams for the block, and what gives all their texts when they have ended."""
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
        streams = Streams()
        tasks = [asyncio.create_task(streams.read(client, url, tokens)) for _ in range(STREAMS)]
        try:
            async with asyncio.timeout(30):
                await streams.all_run.wait()
            yield streams, lambda: asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def send(url: str, path: str, body: bytes) -> tuple[int, bytes]:
    """One request by a process of its own: this one has to watch the streams. (status, body)"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SEND, url + path,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate(body)
    status, _, answer = out.partition(b"\n")
    return int(status), answer


_SEND = """
import sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], sys.stdin.buffer.read(), {"content-type": "application/json"})
try:
    answer = urllib.request.urlopen(request, timeout=60)
except urllib.error.HTTPError as error:
    answer = error
sys.stdout.buffer.write(b"%d\\n" % answer.status + answer.read())
"""


async def measure(url: str, tokens: int, repeat: int) -> dict[str, float]:
    """Case → the longest gap beside it, in seconds. Raises AssertionError for a wrong answer."""
    gaps: dict[str, float] = {}
    async with running(url, tokens) as (streams, _):
        streams.reset()
        await asyncio.sleep(QUIET_S)
        gaps["nothing"] = streams.longest_gap_s
        for name, (path, body, status) in cases().items():
            content = json.dumps(body).encode()
            for _ in range(repeat):
                await asyncio.sleep(SETTLE_S)
                streams.reset()
                answered, answer = await send(url, path, content)
                await asyncio.sleep(SETTLE_S)
                gaps[name] = max(gaps.get(name, 0.0), streams.longest_gap_s)
                assert answered == status, f"{name}: {answered} {answer[:300]!r}"
    return gaps


def main() -> int:
    """0 when no gap was above the limit."""
    parser = argparse.ArgumentParser(prog="scripts/gaps", description=__doc__)
    parser.add_argument("--limit-ms", type=float, default=100.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--backend", choices=["auto", "huggingface"], default="auto")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="g") as directory, Instance(Path(directory)) as made:
        made.launch("--workers", "1", "--engine", "simulator", "--tokenizer-backend", options.backend)
        gaps = asyncio.run(measure(made.url, 8000, options.repeat))
    for name, gap_s in gaps.items():
        print(f"{name:28} {gap_s * 1000:6.0f} ms")
    return 1 if max(gaps.values()) * 1000 > options.limit_ms else 0


if __name__ == "__main__":
    sys.exit(main())
