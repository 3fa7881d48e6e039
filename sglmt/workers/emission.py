"""Turns records into batches for the detokenizers. Runs in the scheduler; the hot path of its step.

A record that moved is *dirty*. What is sent of it follows from the record alone (`sent`, `start_sent`,
`finish_sent`), so a replay is the same code as a first sending, and rows of a detokenizer that is gone or
behind simply wait, several tokens becoming one row.

A record that is *plain* (it moved, all of it is sent, and nothing goes with its ids) needs none of that: its next id is
its next row. These are nearly all rows, and what a row costs is the memory it touches, which is cold at every step: so
they go into the columns in one pass, without being marked first and looked at again. Marking a record ends its being
plain.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from sglmt.delivery.ledger import Record
from sglmt.ipc.state_page import SlotWord
from sglmt.messages.columns import RaggedColumn, pack, pack_ragged
from sglmt.messages.frame import FrameError, Role, Scope
from sglmt.messages.registry import kind_of
from sglmt.messages.sampling import FinishReason, TextSpec, TokenLogprobs
from sglmt.messages.to_detokenizer import BatchEmbeddingOutput, BatchTokenIDOutput, ForgetRequests
from sglmt.messages.to_scheduler import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from sglmt.workers.child import ChildContext
from sglmt.workers.oversized import smaller
from sglmt.workers.peers import PeerOutbox

HOLD_BACKLOG_BYTES = 256 * 1024  # above this, rows wait in their records and grow longer instead
_EMPTY_TEXT = TextSpec()
# Looked up once: a member of an enumeration costs more to find than most of what is done with it.
_PEER, _ROWS_OUT, _MESSAGES_OUT = Scope.PEER, SlotWord.ROWS_OUT, SlotWord.MESSAGES_OUT

NewId = tuple[Record, int]


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
    """One BatchTokenIDOutput while it is filled."""

    def __init__(self) -> None:
        self.keys = array("Q")
        self.attempts = array("I")
        self.offsets = array("I")
        self.ids = array("I")
        self.lengths: array[int] | None = None  # none as long as every row has one id
        self.batch = BatchTokenIDOutput(keys=b"", attempts=b"", offsets=b"", output_ids=RaggedColumn(None, b""))

    def add_plain(
        self, running: Mapping[int, Record], keys: Sequence[int], token_ids: Sequence[int], others: list[NewId]
    ) -> None:
        """Append a row with its new id for each of `keys` whose record is plain; add the others to `others`."""
        add_key, add_attempt = self.keys.append, self.attempts.append
        add_offset, add_id = self.offsets.append, self.ids.append
        for key, token_id in zip(keys, token_ids):  # noqa: B905 - the keyword costs as much as ten rows
            record = running[key]
            if not record.plain:
                others.append((record, token_id))
                continue
            ids = record.output_ids
            offset = len(ids)
            add_key(key)
            add_attempt(record.attempt)
            add_offset(offset)
            add_id(token_id)
            ids.append(token_id)
            record.sent = offset + 1

    def add(self, record: Record) -> bool:
        """Append what is not yet sent of `record`. False when the rest needs another batch."""
        ids = record.output_ids
        sent = record.sent
        end = len(ids)
        extras = record.extra
        if extras is not None:
            assert isinstance(extras, RecordExtras)
            end = self._add_extras(record, extras)
        row = len(self.keys)
        self.keys.append(record.key)
        self.attempts.append(record.attempt)
        self.offsets.append(sent)
        count = end - sent
        if count != 1 and self.lengths is None:
            self.lengths = array("I", [1]) * row
        if self.lengths is not None:
            self.lengths.append(count)
        self.ids.extend(ids[sent:end])
        if not record.start_sent:
            record.start_sent = True
            payload = record.payload
            self.batch.text_specs[row] = payload.text if isinstance(payload, TokenizedGenerateReqInput) else _EMPTY_TEXT
        record.sent = end
        if end < len(ids):
            return False
        if record.finish is not None:
            record.finish_sent = True
            self.batch.finish_reasons[row] = record.finish  # type: ignore[assignment]
        else:
            record.plain = record.moved and (extras is None or extras.output_logprobs is None)
        return True

    def _add_extras(self, record: Record, extras: RecordExtras) -> int:
        """Columns few rows have; returns up to which id this row may go (prefix ids have no log-probabilities)."""
        row, batch = len(self.keys), self.batch
        end = len(record.output_ids)
        sent, prefix = record.sent, record.prefix_tokens
        if extras.cached_tokens is not None and sent <= prefix:
            batch.cached_tokens[row] = extras.cached_tokens
        if extras.input_logprobs is not None and sent <= prefix and (prefix < end or record.finish is not None):
            batch.input_logprobs[row] = extras.input_logprobs
        if extras.output_logprobs is not None:
            if sent < prefix < end:
                batch.input_logprobs.pop(row, None)
                return prefix
            if sent >= prefix:
                batch.output_logprobs[row] = extras.output_logprobs.slice(sent - prefix, end - prefix)
        return end

    def finished(self) -> BatchTokenIDOutput:
        """The batch with all rows in it."""
        batch = self.batch
        batch.keys = self.keys.tobytes()
        batch.attempts = self.attempts.tobytes()
        batch.offsets = self.offsets.tobytes()
        lengths = None if self.lengths is None else self.lengths.tobytes()
        batch.output_ids = RaggedColumn(lengths, self.ids.tobytes())
        return batch


class Emitter:
    """Sends dirty records to their detokenizers, one batch a detokenizer and step."""

    def __init__(self, child: ChildContext, detokenizers: int) -> None:
        self._child = child
        self._peers = [PeerOutbox(child, Role.DETOKENIZER, index) for index in range(detokenizers)]
        self._dirty: list[dict[int, Record]] = [{} for _ in range(detokenizers)]
        self._forget: list[list[int]] = [[] for _ in range(detokenizers)]
        self._rows = [Rows() for _ in range(detokenizers)]  # of plain records: filled and sent in one turn

    def detokenizer_of(self, key: int) -> int:
        """Which detokenizer a request is pinned to: by its own number, so all get work."""
        return (key ^ (key >> 52)) % len(self._peers)

    def mark(self, record: Record) -> None:
        """Something of `record` is to be sent."""
        record.plain = False
        peers = self._peers
        self._dirty[0 if len(peers) == 1 else self.detokenizer_of(record.key)][record.key] = record

    def add_plain(self, running: Mapping[int, Record], keys: Sequence[int], token_ids: Sequence[int]) -> list[NewId]:
        """One new id for each of `keys`: rows of plain records for detokenizers that take them. Returns the others,
        with which nothing was done. `flush` has to follow in the same turn: these rows count as sent."""
        others: list[NewId] = []
        parts = [(keys, token_ids)] if len(self._peers) == 1 else self._by_detokenizer(keys, token_ids)
        for index, (its_keys, its_ids) in enumerate(parts):
            if self._takes_rows(index):
                self._rows[index].add_plain(running, its_keys, its_ids, others)
            else:
                others.extend((running[key], token_id) for key, token_id in zip(its_keys, its_ids, strict=True))
        return others

    def _by_detokenizer(
        self, keys: Sequence[int], token_ids: Sequence[int]
    ) -> list[tuple[Sequence[int], Sequence[int]]]:
        """The columns of each detokenizer."""
        parts: list[tuple[list[int], list[int]]] = [([], []) for _ in self._peers]
        for key, token_id in zip(keys, token_ids, strict=True):
            its_keys, its_ids = parts[self.detokenizer_of(key)]
            its_keys.append(key)
            its_ids.append(token_id)
        return list(parts)

    def _takes_rows(self, index: int) -> bool:
        """False while rows for this detokenizer are to wait in their records."""
        peer = self._peers[index]
        return peer.generation != 0 and peer.backlog_bytes <= HOLD_BACKLOG_BYTES

    def drop(self, key: int) -> None:
        """Nobody wants rows of this request (or of this attempt) any more: its detokenizer may forget it."""
        detokenizer = self.detokenizer_of(key)
        self._dirty[detokenizer].pop(key, None)
        self._forget[detokenizer].append(key)

    def flush(self) -> None:
        """Send what is dirty to every detokenizer that takes it."""
        for index, rows in enumerate(self._rows):
            dirty, forget = self._dirty[index], self._forget[index]
            if not (rows.keys or dirty or forget) or not self._takes_rows(index):
                continue
            peer = self._peers[index]
            if forget:  # first: a key may be dirty again, under a new attempt
                self._send_message(peer, ForgetRequests(keys=forget))
                self._forget[index] = []
            if dirty:
                self._dirty[index] = self._add_dirty(peer, rows, dirty)
            if rows.keys:
                self._rows[index] = Rows()
                self._send_message(peer, rows.finished())
                self._child.slot.add(_ROWS_OUT, len(rows.keys))

    def _add_dirty(self, peer: PeerOutbox, rows: Rows, dirty: dict[int, Record]) -> dict[int, Record]:
        """Add generation rows to `rows`, send embeddings; returns what is left for another batch."""
        left: dict[int, Record] = {}
        embeddings: list[Record] = []
        for record in dirty.values():
            if type(record.payload) is TokenizedEmbeddingReqInput:
                embeddings.append(record)
            elif not rows.add(record):
                left[record.key] = record
        done = [record for record in embeddings if record.finish is not None]
        if done:
            self._send_message(peer, _embedding_batch(done))
            self._child.slot.add(_ROWS_OUT, len(done))
        return left

    def _send_message(
        self, peer: PeerOutbox, message: BatchTokenIDOutput | BatchEmbeddingOutput | ForgetRequests
    ) -> None:
        try:
            frame = self._child.writer.frame(kind_of(message), _PEER, message)
        except FrameError:
            if not isinstance(message, BatchTokenIDOutput):
                raise
            for part in smaller(message):
                self._send_message(peer, part)
            return
        peer.send(frame)
        self._child.slot.add(_MESSAGES_OUT)

    def has_unsent(self) -> bool:
        """Whether rows wait for a detokenizer."""
        return any(self._dirty) or any(rows.keys for rows in self._rows)

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
