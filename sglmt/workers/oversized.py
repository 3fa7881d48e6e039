"""What to send when a batch of rows is longer than a frame may be. Used by scheduler and detokenizers; pure.

Log-probabilities of long prompts for many ids can add up to that. It costs the one request whose row alone is too long
an error, and nobody else anything.
"""

from __future__ import annotations

from typing import TypeVar

from sglmt.messages.columns import RaggedColumn, pack
from sglmt.messages.frame import MAX_FRAME_BYTES
from sglmt.messages.generation_rows import GenerationRows
from sglmt.messages.sampling import FinishReason
from sglmt.messages.to_worker import BatchStrOutput

R = TypeVar("R", bound=GenerationRows)


def smaller(batch: R) -> list[R]:
    """The same rows as two batches; instead of a single row, an error that ends its request."""
    rows = batch.rows()
    if rows > 1:
        return [batch.take(range(rows // 2)), batch.take(range(rows // 2, rows))]
    only = batch.take([0])
    only.output_logprobs, only.input_logprobs = {}, {}
    only.output_ids = RaggedColumn(pack("I", [0]), b"")
    if isinstance(only, BatchStrOutput):
        only.texts = [""]
    only.finish_reasons = {
        0: FinishReason(
            kind="error",
            status=500,
            code="answer_too_large",
            message=f"the log-probabilities asked for are more than {MAX_FRAME_BYTES} bytes; ask for fewer",
        )
    }
    return [only]
