"""Turns records into batches for the detokenizers. Runs in the scheduler; the hot path of its step.

A record that moved is *dirty*. What is sent of it follows from the record alone (`sent`, `start_sent`,
`finish_sent`), so a replay is the same code as a first sending, and rows of a detokenizer that is gone or
behind simply wait, several tokens becoming one row.
"""

from __future__ import annotations

from sglmt.delivery.ledger import Record
from sglmt.ipc.state_page import SlotWord
from sglmt.messages.columns import RaggedColumn, pack, pack_ragged
from sglmt.messages.frame import Role, Scope
from sglmt.messages.registry import kind_of
from sglmt.messages.sampling import FinishReason, TextSpec, TokenLogprobs
from sglmt.messages.to_detokenizer import BatchEmbeddingOutput, BatchTokenIDOutput, ForgetRequests
from sglmt.messages.to_scheduler import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from sglmt.workers.child import ChildContext
from sglmt.workers.peers import PeerOutbox

HOLD_BACKLOG_BYTES = 256 * 1024  # above this, rows wait in their records and grow longer instead
_EMPTY_TEXT = TextSpec()


class RecordExtras:
    """What a record keeps beside its ids: log-probabilities, embedding, counts."""

    __slots__ = ("cached_tokens", "embedding", "input_logprobs", "output_logprobs")

    def __init__(self) -> None:
        self.cached_tokens: int | None = None
        self.embedding: list[float] | None = None
        self.input_logprobs: TokenLogprobs | None = None
        self.output_logprobs: TokenLogprobs | None = None  # of the ids after the prefix

    def add_logprobs(self, new: TokenLogprobs) -> None:
        """Append those of further ids."""
        known = self.output_logprobs
        if known is None:
            self.output_logprobs = new
            return
        known.chosen.extend(new.chosen)
        if known.top is not None and new.top is not None:
            known.top.extend(new.top)
        if known.requested is not None and new.requested is not None:
            known.requested.extend(new.requested)


def extras_of(record: Record) -> RecordExtras:
    """The record's extras, made on first use."""
    if record.extra is None:
        record.extra = RecordExtras()
    assert isinstance(record.extra, RecordExtras)
    return record.extra


class Rows:
    """The columns of one BatchTokenIDOutput while they are filled."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.attempts: list[int] = []
        self.offsets: list[int] = []
        self.lengths: list[int] = []
        self.ids: list[int] = []
        self.text_specs: dict[int, TextSpec] = {}
        self.finish_reasons: dict[int, FinishReason] = {}
        self.output_logprobs: dict[int, TokenLogprobs] = {}
        self.input_logprobs: dict[int, TokenLogprobs] = {}
        self.cached_tokens: dict[int, int] = {}

    def add(self, record: Record) -> bool:
        """Append what is not yet sent of `record`. False when the rest needs another batch."""
        ids = record.output_ids
        sent = record.sent
        end = len(ids)
        extras = record.extra
        if extras is not None:
            end = self._add_extras(record, extras)  # type: ignore[arg-type]
        row = len(self.keys)
        self.keys.append(record.key)
        self.attempts.append(record.attempt)
        self.offsets.append(sent)
        count = end - sent
        self.lengths.append(count)
        if count == 1:
            self.ids.append(ids[sent])
        elif count:
            self.ids.extend(ids[sent:end])
        if not record.start_sent:
            record.start_sent = True
            payload = record.payload
            self.text_specs[row] = payload.text if isinstance(payload, TokenizedGenerateReqInput) else _EMPTY_TEXT
        record.sent = end
        if end < len(ids):
            return False
        if record.finish is not None:
            record.finish_sent = True
            self.finish_reasons[row] = record.finish  # type: ignore[assignment]
        return True

    def _add_extras(self, record: Record, extras: RecordExtras) -> int:
        """Columns few rows have; returns up to which id this row may go (prefix ids have no log-probabilities)."""
        row = len(self.keys)
        end = len(record.output_ids)
        sent, prefix = record.sent, record.prefix_tokens
        if extras.cached_tokens is not None and sent <= prefix:
            self.cached_tokens[row] = extras.cached_tokens
        if extras.input_logprobs is not None and sent <= prefix and (prefix < end or record.finish is not None):
            self.input_logprobs[row] = extras.input_logprobs
        if extras.output_logprobs is not None:
            if sent < prefix < end:
                self.input_logprobs.pop(row, None)
                return prefix
            if sent >= prefix:
                self.output_logprobs[row] = extras.output_logprobs.slice(sent - prefix, end - prefix)
        return end

    def batch(self) -> BatchTokenIDOutput:
        """The finished batch."""
        return BatchTokenIDOutput(
            keys=pack("Q", self.keys),
            attempts=pack("I", self.attempts),
            offsets=pack("I", self.offsets),
            output_ids=RaggedColumn(
                None
                if len(self.ids) == len(self.lengths) and all(n == 1 for n in self.lengths)
                else pack("I", self.lengths),
                pack("I", self.ids),
            ),
            text_specs=self.text_specs,
            finish_reasons=self.finish_reasons,
            output_logprobs=self.output_logprobs,
            input_logprobs=self.input_logprobs,
            cached_tokens=self.cached_tokens,
        )


class Emitter:
    """Sends dirty records to their detokenizers, one batch a detokenizer and step."""

    def __init__(self, child: ChildContext, detokenizers: int) -> None:
        self._child = child
        self._peers = [PeerOutbox(child, Role.DETOKENIZER, index) for index in range(detokenizers)]
        self._dirty: list[dict[int, Record]] = [{} for _ in range(detokenizers)]
        self._forget: list[list[int]] = [[] for _ in range(detokenizers)]

    def detokenizer_of(self, key: int) -> int:
        """Which detokenizer a request is pinned to: by its own number, so all get work."""
        return (key ^ (key >> 52)) % len(self._peers)

    def mark(self, record: Record) -> None:
        """Something of `record` is to be sent."""
        peers = self._peers
        self._dirty[0 if len(peers) == 1 else self.detokenizer_of(record.key)][record.key] = record

    def drop(self, key: int) -> None:
        """Nobody wants rows of this request (or of this attempt) any more: its detokenizer may forget it."""
        detokenizer = self.detokenizer_of(key)
        self._dirty[detokenizer].pop(key, None)
        self._forget[detokenizer].append(key)

    def flush(self) -> None:
        """Send what is dirty to every detokenizer that takes it."""
        for index, dirty in enumerate(self._dirty):
            if not dirty and not self._forget[index]:
                continue
            peer = self._peers[index]
            if peer.generation == 0 or peer.backlog_bytes > HOLD_BACKLOG_BYTES:
                continue
            if self._forget[index]:  # first: a key may be dirty again, under a new attempt
                self._send_message(peer, ForgetRequests(keys=self._forget[index]))
                self._forget[index] = []
            if dirty:
                self._dirty[index] = self._send(peer, dirty)

    def _send(self, peer: PeerOutbox, dirty: dict[int, Record]) -> dict[int, Record]:
        """One batch of generation rows and one of embeddings; returns what is left for another."""
        rows = Rows()
        left: dict[int, Record] = {}
        embeddings: list[Record] = []
        for record in dirty.values():
            if type(record.payload) is TokenizedEmbeddingReqInput:
                embeddings.append(record)
            elif not rows.add(record):
                left[record.key] = record
        slot = self._child.slot
        if rows.keys:
            self._send_message(peer, rows.batch())
            slot.add(SlotWord.ROWS_OUT, len(rows.keys))
        done = [record for record in embeddings if record.finish is not None]
        if done:
            self._send_message(peer, _embedding_batch(done))
            slot.add(SlotWord.ROWS_OUT, len(done))
        return left

    def _send_message(
        self, peer: PeerOutbox, message: BatchTokenIDOutput | BatchEmbeddingOutput | ForgetRequests
    ) -> None:
        peer.send(self._child.writer.frame(kind_of(message), Scope.PEER, message))
        self._child.slot.add(SlotWord.MESSAGES_OUT)

    def has_unsent(self) -> bool:
        """Whether rows wait for a detokenizer."""
        return any(self._dirty)

    def refresh(self, records: dict[int, Record]) -> int:
        """Follow the state page: requests of a detokenizer that is another life now are sent again from their
        first token. Returns how many."""
        moved = {index for index, peer in enumerate(self._peers) if peer.refresh()}
        if not moved:
            return 0
        replayed = 0
        for record in records.values():
            if record.start_sent and self.detokenizer_of(record.key) in moved:  # else nothing was sent yet
                record.rewind()
                self.mark(record)
                replayed += 1
        return replayed

    @property
    def dropped(self) -> int:
        """Frames no detokenizer took."""
        return sum(peer.dropped for peer in self._peers)

    @property
    def backlog_bytes(self) -> int:
        """Bytes kept back for detokenizers that do not take them now."""
        return sum(peer.backlog_bytes for peer in self._peers)

    def send_to(self, index: int, frame: bytearray) -> None:
        """A frame that is no batch (a control reply in single mode) through one detokenizer."""
        self._peers[index].send(frame)


def _embedding_batch(records: list[Record]) -> BatchEmbeddingOutput:
    for record in records:
        record.sent, record.start_sent, record.finish_sent = len(record.output_ids), True, True
    return BatchEmbeddingOutput(
        keys=pack("Q", [record.key for record in records]),
        attempts=pack("I", [record.attempt for record in records]),
        embeddings=pack_ragged("f", [extras_of(record).embedding or [] for record in records]),
        finish_reasons={
            row: record.finish for row, record in enumerate(records) if isinstance(record.finish, FinishReason)
        },
    )
