"""Rows to the detokenizers: whatever happens in between, a receiver rebuilds exactly what the engine gave.

The scheduler is real, the engine a script: single ids in columns, outputs that carry more, finishes. Requests come,
are replaced, replayed, taken out and back in, aborted and ended from outside; detokenizers stop taking frames, die and
come back. Nothing is lost on the way here, so that a receiver must never see a gap or an id twice.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from sglmt.delivery.keys import make_key, make_life
from sglmt.delivery.ledger import Record
from sglmt.engines.base import EngineInfo, EngineOutput, EngineRequest, EngineStep, FixedEngine
from sglmt.ipc.addresses import ipc_address
from sglmt.ipc.state_page import StatePage
from sglmt.messages.columns import pack, unpack, unpack_ragged
from sglmt.messages.frame import Role, read_prefix
from sglmt.messages.registry import MESSAGES
from sglmt.messages.sampling import LogprobSpec, SamplingParams, TextSpec, TokenLogprobs
from sglmt.messages.to_detokenizer import BatchTokenIDOutput, ForgetRequests
from sglmt.messages.to_scheduler import AbortReq, FinishReq, ResumeReq, TokenizedGenerateReqInput
from sglmt.server_args import ServerArgs
from sglmt.workers import emission
from sglmt.workers.request_book import abort_finish
from sglmt.workers.scheduler import Scheduler
from tests.unit.workers.wired import INSTANCE, FakeChild, FakeClock, FakeTransport, Network

LIFE = make_life(0, 1)


class ScriptedEngine(FixedEngine):
    """Gives what a random number generator says, and writes down what it gave."""

    def __init__(self, paced: bool) -> None:
        self.paced = paced
        self.rng = Random(0)
        self.running: dict[int, EngineRequest] = {}
        self.given: dict[int, list[int]] = {}  # key → the whole output, prefix included
        self.silent: set[int] = set()  # those that have yielded nothing since they are in here

    def info(self) -> EngineInfo:
        return EngineInfo(
            name="scripted",
            version="1",
            context_length=1000,
            vocab_size=1000,
            max_total_tokens=None,
            capabilities=dict.fromkeys(("continue.sampled", "continue.logprobs"), "exact"),
        )

    def check(self, request: EngineRequest) -> None:
        """Everything is possible."""

    def submit(self, request: EngineRequest) -> None:
        assert request.key not in self.running
        self.running[request.key] = request
        self.silent.add(request.key)
        self.given[request.key] = list(request.prefix_ids)

    def step(self) -> EngineStep:
        keys, token_ids, outputs = [], [], []
        for key, request in list(self.running.items()):
            kind = self.rng.choice(("one", "one", "one", "several", "nothing", "end"))
            ids = [self.rng.randrange(1000) for _ in range({"nothing": 0, "several": 3}.get(kind, 1))]
            if kind == "nothing":
                continue
            self.given[key] += ids
            cached_tokens = 1 if key in self.silent and key % 2 else None
            self.silent.discard(key)
            if kind == "one" and request.logprobs is None and cached_tokens is None:
                keys.append(key)
                token_ids.append(ids[0])
                continue
            output = EngineOutput(key, ids, cached_tokens=cached_tokens)
            if request.logprobs is not None:
                output.logprobs = TokenLogprobs(chosen=[float(token_id) for token_id in ids])
            if kind == "end":
                output.finish_kind = "length"
                del self.running[key]
            outputs.append(output)
        return EngineStep(keys, token_ids, outputs)

    def abort(self, key: int) -> None:
        self.running.pop(key, None)
        self.silent.discard(key)

    def has_work(self) -> bool:
        return bool(self.running)

    def next_step_at_s(self) -> float | None:
        return 1.0 if self.paced and self.running else None

    def flush_cache(self) -> bool:
        return not self.running

    def close(self) -> None:
        """Nothing to free."""


class Received:
    """What one detokenizer has of one request."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.ids: list[int] = []
        self.chosen: list[float | None] = []
        self.cached_tokens: int | None = None
        self.ended_here = False  # by the detokenizer: it drops what still comes of it, but for a replay
        self.finish: object = None


class Receiver:
    """One life of a detokenizer: rows must follow each other without a gap."""

    def __init__(self) -> None:
        self.known: dict[int, Received] = {}

    def take(self, frame: bytes) -> None:
        message = MESSAGES.decode(read_prefix(frame, INSTANCE), frame)
        if isinstance(message, ForgetRequests):
            for key in message.keys:
                self.known.pop(key, None)
            return
        assert isinstance(message, BatchTokenIDOutput)
        message.check()
        columns = (unpack("Q", message.keys), unpack("I", message.attempts), unpack("I", message.offsets))
        for row, (key, attempt, offset) in enumerate(zip(*columns, strict=True)):
            self._take_row(message, row, key, attempt, offset)

    def _take_row(self, message: BatchTokenIDOutput, row: int, key: int, attempt: int, offset: int) -> None:
        if row in message.text_specs:
            assert offset == 0
            self.known[key] = Received(attempt)
        one = self.known[key]
        if one.ended_here:
            return
        assert (one.attempt, one.finish) == (attempt, None)
        assert offset == len(one.ids)
        one.ids += unpack_ragged("I", message.output_ids)[row]
        if row in message.output_logprobs:
            one.chosen += message.output_logprobs[row].chosen
        one.cached_tokens = message.cached_tokens.get(row, one.cached_tokens)
        one.finish = message.finish_reasons.get(row)


class Histories(RuleBasedStateMachine):
    """See the module."""

    @initialize(detokenizers=st.integers(1, 3), slots=st.sampled_from([2, 50]), paced=st.booleans())
    def launch(self, detokenizers: int, slots: int, paced: bool) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.page = StatePage.create(self.directory / "page", INSTANCE, 8)
        slot = self.page.occupy(0, Role.SCHEDULER, 0, 1)
        self.page.occupy(1, Role.TOKENIZER_WORKER, 0, 1)
        self.page.publish_generation(Role.TOKENIZER_WORKER, 0, 1)
        self.network = Network()
        self.receivers: dict[int, Receiver] = {}
        self.generations = dict.fromkeys(range(detokenizers), 0)
        args = ServerArgs(detokenizers=detokenizers, engine="simulator", max_running_requests=slots)
        for index in self.generations:
            self._start_detokenizer(index)
        child = FakeChild(
            role=Role.SCHEDULER,
            index=0,
            generation=1,
            run_dir=self.directory,
            page=self.page,
            slot=slot,
            args=args,
            transport=FakeTransport(self.network, "scheduler"),
            clock=FakeClock(),
        )
        self.engine = ScriptedEngine(paced)
        self.scheduler = Scheduler(child, self.engine)
        self.book = self.scheduler._book
        self.requests = 0

    def _start_detokenizer(self, index: int) -> None:
        self.generations[index] += 1
        self.receivers[index] = Receiver()
        self.page.publish_generation(Role.DETOKENIZER, index, self.generations[index])

    def _link(self, index: int):  # type: ignore[no-untyped-def]
        address = ipc_address(self.directory, Role.DETOKENIZER, index, self.generations[index])
        return self.network.link("scheduler", address)

    def _deliver(self) -> None:
        for index, receiver in self.receivers.items():
            frames = self._link(index).frames
            while frames:
                receiver.take(frames.popleft())

    def _record(self, which: int) -> Record | None:
        records = list(self.book.ledger.records.values())
        return records[which % len(records)] if records else None

    @rule(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 4))
    def submit(self, seed: int, count: int) -> None:
        """Some new requests; some with output of an earlier life, some with log-probabilities."""
        rng = Random(seed)
        for _ in range(count):
            self.requests += 1
            self._submit(make_key(LIFE, self.requests), 1, [7] * rng.choice((0, 0, 3)), rng)

    def _submit(self, key: int, attempt: int, prefix: list[int], rng: Random) -> None:
        self.book.submit(
            TokenizedGenerateReqInput(
                key=key,
                attempt=attempt,
                rid=f"r{key}",
                group=key,
                input_ids=pack("I", [1, 2]),
                prefix_ids=pack("I", prefix),
                sampling=SamplingParams(max_new_tokens=1000),
                text=TextSpec(),
                logprobs=LogprobSpec() if rng.random() < 0.2 else None,
                confirm_admission=rng.random() < 0.5,
            )
        )

    @rule(which=st.integers(0, 50), seed=st.integers(0, 2**32 - 1))
    def submit_again(self, which: int, seed: int) -> None:
        """Under a higher attempt, with the output so far."""
        record = self._record(which)
        if record is not None:
            self._submit(record.key, record.attempt + 1, record.output_ids.tolist(), Random(seed))

    @rule(seed=st.integers(0, 2**32 - 1), turns=st.integers(1, 6), housekeeping=st.booleans())
    def turn(self, seed: int, turns: int, housekeeping: bool) -> None:
        """The engine brings something."""
        self.engine.rng.seed(seed)
        for _ in range(turns):
            self.scheduler.turn(housekeeping)
            assert self.book.unmoved == self.engine.silent
            assert not any(rows.keys for rows in self.scheduler._emitter._rows)  # they wait in their records
            for key in self.engine.running:
                assert self.book.running[key].output_ids.tolist() == self.engine.given[key]

    @rule(which=st.integers(0, 50))
    def replay(self, which: int) -> None:
        record = self._record(which)
        if record is not None:
            self.book.resume(ResumeReq(requests=[(record.key, record.attempt)]))

    @rule(which=st.integers(0, 50))
    def forget(self, which: int) -> None:
        record = self._record(which)
        if record is not None:
            self.book.abort(AbortReq(keys=[record.key]))

    @rule(which=st.integers(0, 50))
    def end(self, which: int) -> None:
        record = self._record(which)
        if record is not None and record.finish is None:
            self.book.end(record, abort_finish(499, "aborted", "by the test"))

    @rule(which=st.integers(0, 50), fewer=st.integers(0, 2))
    def detokenizer_finishes(self, which: int, fewer: int) -> None:
        """It has cut the output, of which it has everything that was sent."""
        record = self._record(which)
        index = None if record is None else self.scheduler._emitter.detokenizer_of(record.key)
        if record is None or index is None or self._link(index).frames or not self.generations[index]:
            return
        one = self.receivers[index].known.get(record.key)
        if one is None or one.attempt != record.attempt or one.finish is not None or not record.start_sent:
            return
        if record.finish is None and record.sent == len(one.ids):
            one.finish, one.ended_here = abort_finish(200, "stop", "by the detokenizer"), True
            del one.ids[len(one.ids) - min(fewer, len(one.ids)) :]
            self.book.finish_by_detokenizer(
                FinishReq(key=record.key, attempt=record.attempt, output_tokens=len(one.ids), finish=one.finish)
            )

    @rule()
    def retract(self) -> None:
        """As a pause does: everything out of the engine, to go on where it was."""
        self.book.retract_all()

    @rule(index=st.integers(0, 2))
    def detokenizer_dies(self, index: int) -> None:
        """And its successor is there at once; the scheduler hears of it at its next housekeeping."""
        if index in self.receivers:
            self._link(index).frames.clear()
            self._start_detokenizer(index)
            self.scheduler.turn(True)

    @rule(index=st.integers(0, 2), blocked=st.booleans(), hold=st.booleans())
    def block(self, index: int, blocked: bool, hold: bool) -> None:
        """It takes no frames, or does again."""
        if index in self.receivers:
            self._link(index).blocked = blocked
            emission.HOLD_BACKLOG_BYTES = 1 if hold else 256 * 1024

    @precondition(lambda self: self.requests)
    @rule()
    def deliver(self) -> None:
        """What was sent arrives; a link that is blocked has a backlog, not frames."""
        self._deliver()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        try:
            for index in self.receivers:
                self._link(index).blocked = False
            self.engine.running.clear()
            for _ in range(3):  # a replay with log-probabilities goes out in two parts
                self.scheduler.turn(True)
            self._deliver()
            self._check()
        finally:
            emission.HOLD_BACKLOG_BYTES = 256 * 1024
            self.book.suspects._mapping.close()
            self.page.close()
            shutil.rmtree(self.directory)

    def _check(self) -> None:
        emitter = self.scheduler._emitter
        assert not emitter.has_unsent()
        for key, record in self.book.ledger.records.items():
            one = self.receivers[emitter.detokenizer_of(key)].known.get(key)
            if one is None:
                assert not record.start_sent
                continue
            assert (one.attempt, one.ids) == (record.attempt, record.output_ids.tolist())
            assert one.finish == record.finish
            assert one.cached_tokens == (None if record.extra is None else emission.extras_of(record).cached_tokens)
            if record.payload.logprobs is not None:  # type: ignore[attr-defined]
                ids = one.ids[record.prefix_tokens :]
                assert one.chosen[: len(ids)] == [float(token_id) for token_id in ids]
        for receiver in self.receivers.values():
            assert receiver.known.keys() <= self.book.ledger.records.keys()


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, derandomize="CI" in os.environ
)
