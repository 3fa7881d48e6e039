"""Messages a tokenizer worker receives: rows from detokenizers, control replies through the router."""

from __future__ import annotations

from typing import Annotated

import msgspec

from sglmt.messages.columns import Objects, PerRow, batch
from sglmt.messages.frame import Scope
from sglmt.messages.generation_rows import GenerationRows
from sglmt.messages.registry import message


@message(40, Scope.WORKER)
@batch
class BatchStrOutput(GenerationRows, kw_only=True, omit_defaults=True):
    """Text of one step for one worker (multi mode) or for all (single mode).

    `text_offsets` says how many characters of the request came before a row, as `offsets` does for tokens: a
    receiver drops what it already has and sees a gap, whatever was replayed.
    """

    text_offsets: Annotated[bytes, PerRow("I")]
    texts: Annotated[list[str], Objects()]


@message(41, Scope.WORKER)
class UnknownRequests(msgspec.Struct, kw_only=True):
    """The scheduler does not know these (key, attempt) a list named: submit them again."""

    requests: list[tuple[int, int]]


@message(42, Scope.WORKER)
class AbortsDone(msgspec.Struct, kw_only=True):
    """The scheduler has carried out the aborts of these numbers."""

    numbers: list[int]
