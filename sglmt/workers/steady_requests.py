"""The requests whose next token is expected with the next batch, in columns. Part of `Frontend`; runs in workers; pure.

While requests run, every batch begins with the same keys in the same order as the one before, one id a row, each
offset one higher. Such rows are compared with what is expected as whole columns, and only their texts are handled one
by one. The reason is the memory that a row touches: a worker sleeps between two steps and finds its caches lost.

A request in here is `steady`: its `tokens`, `chars`, `output_ids` and `last_token_at_s` are those of the moment it
joined, until it is released or given back; `write_positions` brings the first two up to date. Whatever comes in another
way than expected is not judged here but given back.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence

from sglmt.messages.columns import unpack
from sglmt.messages.packed import add_u32, common_items, item_u32, ones_u32
from sglmt.messages.to_worker import BatchStrOutput
from sglmt.workers.live_request import LiveRequest, TextLine

MAX_STEPS = 64  # ids of so many steps are kept here before they are given to their requests


class SteadyRequests:
    """Requests expected to come next, in this order, at the beginning of a batch."""

    def __init__(self) -> None:
        self._order = b""  # packed keys that will be steady if they come again in this order
        self._clear()

    def _clear(self) -> None:
        self._requests: list[LiveRequest] = []
        self._lines: list[TextLine | None] = []
        self._keys, self._attempts = bytearray(), bytearray()
        self._offsets, self._text_offsets = bytearray(), bytearray()
        self._steps: list[array[int]] = []  # ids not yet given to their requests; who joined later has none in it
        self._last_s = 0.0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def last_token_at_s(self) -> float:
        """When the requests in here got their last token."""
        return self._last_s

    # what comes

    def expect(self, batch: BatchStrOutput, special: Collection[int]) -> int:
        """How many rows at the beginning of `batch` are the requests in here, as expected; all others of them are no
        longer in here. `special`: rows that are more, or less, than one token of text."""
        if not self._requests:
            return 0
        plain = min(special) if special else len(batch.keys) // 8
        if plain >= len(self._requests) and self._matches(batch):
            return len(self._requests)
        present = set(unpack("Q", batch.keys[: 8 * plain]))
        absent = [row for row, request in enumerate(self._requests) if request.key not in present]
        if len(absent) == len(self._requests):
            return 0  # nothing but others, requests that begin above all: those in here pause
        if 2 * len(absent) > len(self._requests):
            self.give_back()
        else:
            self._remove(absent)
            self._keep_what_matches(batch, plain)
        return len(self._requests)

    def _matches(self, batch: BatchStrOutput) -> bool:
        return (
            batch.keys.startswith(self._keys)
            and batch.offsets.startswith(self._offsets)
            and batch.text_offsets.startswith(self._text_offsets)
            and batch.attempts.startswith(self._attempts)
        )

    def _keep_what_matches(self, batch: BatchStrOutput, plain: int) -> None:
        """Give back all from the first on that came otherwise; if the rest is small, everything."""
        matching = min(
            plain,
            common_items(self._keys, batch.keys, 8),
            common_items(self._attempts, batch.attempts, 4),
            common_items(self._offsets, batch.offsets, 4),
            common_items(self._text_offsets, batch.text_offsets, 4),
        )
        if 2 * matching < len(self._requests):
            self.give_back()
        else:
            self._remove(list(range(matching, len(self._requests))))

    def deliver(self, ids: array[int], texts: Sequence[str], now_s: float, collect: bool) -> None:
        """Every request in here gets its id and its text, through its sink where it has no short way, or when rows
        are to be collected. `ids` and `texts` have one item a request."""
        lines = self._lines
        others: Collection[int]
        if collect:
            others = range(len(lines))
        else:
            others = [
                row
                for row, (line, text) in enumerate(zip(lines, texts, strict=True))
                if line is None or not text or not line.write(text, now_s)
            ]
        for row in others:
            request = self._requests[row]
            request.sink.row(request, texts[row], (ids[row],), None)
            lines[row] = request.text_line
        add_u32(self._offsets, ones_u32(len(lines)))
        add_u32(self._text_offsets, int.from_bytes(array("I", map(len, texts)), "little"))
        self._steps.append(ids)
        self._last_s = now_s
        if len(self._steps) >= MAX_STEPS:
            self._write_ids()

    # who comes and goes

    def join(self, order: bytes, requests: Sequence[LiveRequest], now_s: float) -> None:
        """These got a token with a batch just now, at `now_s`, behind those in here; `order` are their packed keys.
        When nobody is in here they must have come twice in this order: an engine without an order costs nothing."""
        if not self._requests and order != self._order:
            self._order = order
            return
        self._last_s = now_s
        for request in requests:
            request.steady = True
            self._requests.append(request)
            self._lines.append(request.text_line)
            self._attempts += request.attempt.to_bytes(4, "little")
            self._offsets += request.tokens.to_bytes(4, "little")
            self._text_offsets += request.chars.to_bytes(4, "little")
        self._keys += order

    def release(self, request: LiveRequest) -> None:
        """Give this one back, if it is in here."""
        if request.steady:
            self._remove([self._requests.index(request)])

    def give_back(self) -> None:
        """Give back all."""
        for row in range(len(self._requests)):
            self._give_back(row)
        self._clear()

    def _remove(self, rows: list[int]) -> None:
        """Give back some rows (rising)."""
        for row in reversed(rows):
            self._give_back(row)
            del self._requests[row], self._lines[row]
            del self._keys[8 * row : 8 * row + 8]
            for column in (self._attempts, self._offsets, self._text_offsets):
                del column[4 * row : 4 * row + 4]
            for step in self._steps:
                if row < len(step):
                    del step[row]

    def _give_back(self, row: int) -> None:
        request = self._requests[row]
        request.steady = False
        request.tokens, request.chars = item_u32(self._offsets, row), item_u32(self._text_offsets, row)
        request.last_token_at_s = self._last_s
        request.output_ids.extend(step[row] for step in self._steps if row < len(step))

    def _write_ids(self) -> None:
        for step in self._steps:
            for request, token_id in zip(self._requests, step, strict=False):
                request.output_ids.append(token_id)
        self._steps.clear()

    def write_positions(self) -> None:
        """Bring `tokens` and `chars` of the requests in here up to date."""
        for request, tokens, chars in zip(
            self._requests, array("I", self._offsets), array("I", self._text_offsets), strict=True
        ):
            request.tokens, request.chars = tokens, chars
