"""The inner loops by themselves, in this process: what a row costs in the detokenizer and in the worker.

Runs in `scripts/bench`, one thread, CPU time of the process. Rows are those of a running batch: one new token a
request, from real text, through the very classes the processes use.
"""

from __future__ import annotations

import gc
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from sglmt.bench.bench import Bench
from sglmt.bench.figures import Bar, Result, at_most
from sglmt.delivery.keys import life_of, make_key, make_life
from sglmt.delivery.progress import judge_row
from sglmt.ipc.state_page import StatePage
from sglmt.messages.columns import RaggedColumn, pack
from sglmt.messages.frame import FrameWriter, Role, Scope
from sglmt.messages.registry import kind_of
from sglmt.messages.sampling import TextSpec
from sglmt.messages.to_detokenizer import BatchTokenIDOutput
from sglmt.messages.to_worker import BatchStrOutput
from sglmt.workers.row_text import RowText

WORKERS = 8
PROMPT_IDS = 64
INSTANCE_ID = 1


def scenarios() -> dict[str, Callable[[Bench, str], Result]]:
    """Name → how it is measured."""
    return {
        "micro-split-256": partial(measure_split, rows=256),
        "micro-detokenizer-256": partial(measure_detokenizer, rows=256, bar=at_most(3.5)),
        "micro-detokenizer-1024": partial(measure_detokenizer, rows=1024, bar=at_most(1.8)),
        "micro-delivery": measure_delivery,
    }


def keys_of(rows: int) -> list[int]:
    """Requests of `WORKERS` workers, mixed as they come."""
    return [make_key(make_life(row % WORKERS, 1), row + 1) for row in range(rows)]


def token_batch(keys: list[int], offset: int, ids: list[int]) -> BatchTokenIDOutput:
    """One step: one id a request. At offset 0 every row starts its text."""
    return BatchTokenIDOutput(
        keys=pack("Q", keys),
        attempts=pack("I", [1] * len(keys)),
        offsets=pack("I", [offset] * len(keys)),
        output_ids=RaggedColumn(None, pack("I", ids)),
        text_specs={} if offset else {row: TextSpec() for row in range(len(keys))},
    )


def text_batch(keys: list[int], offset: int) -> BatchStrOutput:
    """One step as a detokenizer sends it."""
    return BatchStrOutput(
        keys=pack("Q", keys),
        attempts=pack("I", [1] * len(keys)),
        offsets=pack("I", [offset] * len(keys)),
        text_offsets=pack("I", [6 * offset] * len(keys)),
        output_ids=RaggedColumn(None, pack("I", [1000 + row for row in range(len(keys))])),
        texts=[" token"] * len(keys),
    )


def writer() -> FrameWriter:
    """The send door of a detokenizer."""
    return FrameWriter(INSTANCE_ID, Role.DETOKENIZER, 0, 1)


def split_and_encode(batch: BatchStrOutput, frames: FrameWriter) -> int:
    """What is done per step to hand each worker its rows; returns how many frames were made."""
    made = 0
    for life, rows in batch.split_by(life_of).items():
        frames.frame(kind_of(rows), Scope.WORKER, rows, life >> 20, 1)
        made += 1
    return made


def us_per_row(work: Callable[[], object], rows: int, rounds: int) -> float:
    """CPU microseconds a row, over `rounds` calls; the collector is frozen as in the servers."""
    work()
    gc.collect()
    gc.freeze()
    try:
        began_s = time.process_time()
        for _ in range(rounds):
            work()
        return 1e6 * (time.process_time() - began_s) / (rounds * rows)
    finally:
        gc.unfreeze()


def measure_split(bench: Bench, name: str, rows: int) -> Result:
    """One text batch split over 8 workers and encoded, one frame each."""
    result = Result(name, {"rows": rows, "workers": WORKERS})
    batch, frames = text_batch(keys_of(rows), 5), writer()
    for _ in range(bench.repeats):
        result.add("split_encode", "µs/row", us_per_row(lambda: split_and_encode(batch, frames), rows, 400))
    return result


def measure_detokenizer(bench: Bench, name: str, rows: int, bar: Bar) -> Result:
    """Split by worker, text and stop check, encode: a detokenizer's whole step but for the sockets."""
    result = Result(name, {"rows": rows, "workers": WORKERS})
    table, vocabulary = _default_table()
    steps = max(8, bench.scaled(200, 40) * 256 // rows)
    keys = keys_of(rows)
    frames = writer()
    for repeat in range(bench.repeats):
        ids = [
            [vocabulary[(7919 * (step * rows + row) + repeat) % len(vocabulary)] for row in range(rows)]
            for step in range(steps + 1)
        ]
        batches = iter([token_batch(keys, step, step_ids) for step, step_ids in enumerate(ids)])
        with tempfile.TemporaryDirectory() as directory:
            texts = RowText(table, StatePage.create(Path(directory, "page"), INSTANCE_ID, 1).slot(0))
            work = partial(_next_turn, batches, texts, frames)
            result.add("cpu", "µs/row", us_per_row(work, rows, steps), bar)
    return result


def _next_turn(batches: Iterator[BatchTokenIDOutput], texts: RowText, frames: FrameWriter) -> None:
    """A detokenizer's step with the next batch."""
    for life, rows in texts.turn(next(batches)).items():
        frames.frame(kind_of(rows), Scope.WORKER, rows, life >> 20, 1)


def _default_table() -> tuple[Any, list[int]]:
    """The token table of the default model, and the ids of some natural text."""
    from sglmt.bench.model import default_tokenizer
    from sglmt.bench.texts import prompts

    tokenizer = default_tokenizer()
    ids = [token_id for text in prompts(20, 500, seed=0) for token_id in tokenizer.encode(text, False)]
    return tokenizer.table, ids


def measure_delivery(bench: Bench, name: str) -> Result:
    """What exactly-once delivery costs a row: the full judgement, and the common case a worker checks inline."""
    rows = 256
    result = Result(name, {"rows": rows})
    tokens, chars = array("I", range(rows)), array("I", range(0, 6 * rows, 6))

    def judge_all() -> None:
        for row in range(rows):
            judge_row(
                attempt=1, tokens=tokens[row], chars=chars[row], row_attempt=1, row_offset=tokens[row], row_tokens=1,
                row_text_offset=chars[row], row_chars=6, row_finishes=False,
            )  # fmt: skip

    def check_all() -> int:
        fits = 0
        for row in range(rows):
            if tokens[row] == row and chars[row] == 6 * row and row >= 0:
                fits += 1
        return fits

    for _ in range(bench.repeats):
        result.add("judge_row", "µs/row", us_per_row(judge_all, rows, 400))
        result.add("inline_check", "µs/row", us_per_row(check_all, rows, 400))
    return result
