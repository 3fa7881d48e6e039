"""Real processes without processes: schedulers, detokenizers, routers and frontends on a network of lists.

`World` is the supervisor of the test: it starts and kills lives, publishes generations in a real state page, and
holds the clock. `Network` holds every frame that is under way; a test delivers, loses or repeats them.
"""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglmt.control.state import ControlState, write_state
from sglmt.ipc.addresses import http_worker_ipc, ipc_address
from sglmt.ipc.state_page import HeaderWord, Phase, Slot, SlotWord, StatePage
from sglmt.messages.frame import FrameWriter, Role
from sglmt.messages.sampling import FinishReason, TextSpec, TokenLogprobs
from sglmt.messages.to_detokenizer import BatchEmbeddingOutput
from sglmt.messages.to_scheduler import TokenizedGenerateReqInput
from sglmt.messages.to_worker import AbortsDone, BatchStrOutput, UnknownRequests
from sglmt.server_args import ServerArgs
from sglmt.supervisor.slots import SlotTable
from sglmt.workers.child import ChildContext
from sglmt.workers.counters import FrameReceiver
from sglmt.workers.detokenizer import DetokenizerManager
from sglmt.workers.frontend import Frontend
from sglmt.workers.live_request import LiveRequest
from sglmt.workers.router import MultiTokenizerRouter
from sglmt.workers.row_text import RowText
from sglmt.workers.scheduler import Scheduler
from tests.unit.workers.reference import SEED, Expected, check_continuation, simulator, text_of, token_table

INSTANCE = 0x5151
SLOTS = 12
STEP_S = 0.02
MAX_BACKLOG_BYTES = 64 * 1024
UNEXPLAINED = (SlotWord.UNROUTABLE, SlotWord.UNDECODABLE)
_ORDER = (Role.TOKENIZER_WORKER, Role.ROUTER, Role.SCHEDULER, Role.DETOKENIZER, Role.TOKENIZER_WORKER)


class FakeClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Link:
    """Frames under way from one life to one address, in order. `blocked`: the peer takes nothing now."""

    def __init__(self, source: str, address: str) -> None:
        self.source = source
        self.address = address
        self.frames: deque[bytes] = deque()
        self.blocked = False

    @property
    def name(self) -> str:
        """The same in every run."""
        return f"{self.source} to {self.address.rpartition('/')[2]}"


class Network:
    """All links and inboxes."""

    def __init__(self) -> None:
        self.inboxes: dict[str, deque[bytes]] = {}
        self.links: dict[tuple[str, str], Link] = {}
        self.starting: set[str] = set()  # addresses that will be bound soon

    def link(self, source: str, address: str) -> Link:
        """The link from `source` to `address`."""
        return self.links.setdefault((source, address), Link(source, address))

    def busy(self) -> list[Link]:
        """Links with something under way."""
        return [link for link in self.links.values() if link.frames]

    def deliver(self, link: Link) -> bool:
        """The next frame arrives, or is lost when nobody is there any more. False: the peer is still starting."""
        inbox = self.inboxes.get(link.address)
        if inbox is None and link.address in self.starting:
            return False
        frame = link.frames.popleft()
        if inbox is not None:
            inbox.append(frame)
        return True

    def deliver_all(self) -> None:
        """Everything under way arrives."""
        for link in self.busy():
            while link.frames and self.deliver(link):
                pass

    def unbind(self, address: str) -> None:
        """A life is gone with what it had not read; what is under way to it will arrive nowhere."""
        self.inboxes.pop(address, None)


class FakeInbox:
    """As `Inbox`."""

    def __init__(self, network: Network, address: str) -> None:
        assert address not in network.inboxes, "two lives bind one address"
        self._network, self._address = network, address
        self._frames = network.inboxes[address] = deque()
        network.starting.discard(address)

    def receive(self) -> bytes | None:
        return self._frames.popleft() if self._frames else None

    def close(self) -> None:
        self._network.unbind(self._address)


class FakeOutbox:
    """As `Outbox`."""

    def __init__(self, network: Network, source: str, address: str) -> None:
        self.address = address
        self.dropped = 0
        self._link = network.link(source, address)
        self._backlog: deque[bytes] = deque()

    def send(self, frame: bytes | bytearray) -> bool:
        self.flush()
        if not self._link.blocked:
            self._link.frames.append(bytes(frame))
            return True
        if self.backlog_bytes + len(frame) > MAX_BACKLOG_BYTES:
            self.dropped += 1
            return False
        self._backlog.append(bytes(frame))
        return True

    def flush(self) -> bool:
        if self._link.blocked:
            return not self._backlog
        self._link.frames.extend(self._backlog)
        self._backlog.clear()
        return True

    @property
    def backlog_bytes(self) -> int:
        return sum(map(len, self._backlog))

    def close(self) -> None:
        self.dropped += len(self._backlog)
        self._backlog.clear()


class FakeTransport:
    """As `Transport`, for one life."""

    def __init__(self, network: Network, source: str) -> None:
        self._network, self._source = network, source
        self.addresses: list[str] = []

    def inbox(self, address: str) -> FakeInbox:
        self.addresses.append(address)
        return FakeInbox(self._network, address)

    def outbox(self, address: str) -> FakeOutbox:
        return FakeOutbox(self._network, self._source, address)


class FakeChild(ChildContext):
    """A child context without a process around it."""

    def __init__(
        self,
        *,
        role: Role,
        index: int,
        generation: int,
        run_dir: Path,
        page: StatePage,
        slot: Slot,
        args: ServerArgs,
        transport: Any,
        clock: FakeClock,
    ) -> None:
        self.role, self.index, self.generation = role, index, generation
        self.run_dir, self.instance_id = run_dir, INSTANCE
        self.page, self.slot = page, slot
        self.writer = FrameWriter(INSTANCE, role, index, generation)
        self.args = args
        self.transport = transport
        self.clock = clock
        self.stop_requested = False
        self.log_level = "info"
        self.logged: list[str] = []

    def log(self, level: str, text: str) -> None:
        self.logged.append(f"{level}: {text}")

    def ready(self, info: Any = None) -> None:
        """Nobody is told."""

    def applied(self, report: Any) -> None:
        """Nobody is told."""


class WorkerShell:
    """A tokenizer worker without HTTP: its inbox and its frontend."""

    def __init__(self, child: FakeChild) -> None:
        self._child = child
        self.frontend = Frontend(child)
        self._inbox = child.transport.inbox(http_worker_ipc(child.run_dir, self.frontend.life))
        self._receiver = FrameReceiver(child)

    def turn(self, housekeeping: bool) -> None:
        """What the inbox handler and the tick do."""
        while (frame := self._inbox.receive()) is not None:
            prefix = self._receiver.prefix(frame)
            message = None if prefix is None else self._receiver.message(prefix, frame)
            if type(message) is BatchStrOutput:
                self.frontend.take_batch(message)
            elif type(message) is BatchEmbeddingOutput:
                self.frontend.take_embeddings(message)
            elif type(message) is UnknownRequests:
                self.frontend.take_unknown(message)
            elif type(message) is AbortsDone:
                self.frontend.take_aborts_done(message)
            else:
                self._child.slot.add(SlotWord.UNROUTABLE)
        if housekeeping:
            self.frontend.tick()


class Life:
    """One life of one role."""

    def __init__(self, child: FakeChild, machine: Any) -> None:
        self.child = child
        self.machine = machine

    @property
    def name(self) -> str:
        return f"{self.child.role.label}{self.child.index}.{self.child.generation}"


class World:
    """All lives of one instance, its clock, its network and its state page."""

    def __init__(self, run_dir: Path, args: ServerArgs, bad_ids: int = 0, sampled: bool = False) -> None:
        self.run_dir, self.args, self.bad_ids = run_dir, args, bad_ids
        self.sampled = sampled  # each life of the engine goes on differently
        self.clock = FakeClock()
        self.network = Network()
        self.page = StatePage.create(run_dir / "page", INSTANCE, SLOTS)
        self.slots = SlotTable(self.page)
        self.announced: dict[tuple[Role, int], Slot] = {}  # spawned, not yet there
        self.current: dict[tuple[Role, int], Life] = {}
        self.leaving: list[Life] = []  # replaced workers that still serve what they had
        self._generations = {place: itertools.count(1) for place in self.places()}
        for role, index in self.places():
            self.start(role, index)

    def places(self) -> list[tuple[Role, int]]:
        """Every (role, index) of the instance."""
        router = [(Role.ROUTER, 0)] if self.args.mode == "multi" else []
        return [
            (Role.SCHEDULER, 0),
            *router,
            *((Role.DETOKENIZER, index) for index in range(self.args.detokenizers)),
            *((Role.TOKENIZER_WORKER, index) for index in range(self.args.workers)),
        ]

    def lives(self) -> Iterator[Life]:
        """Everything that runs."""
        yield from list(self.current.values())
        yield from list(self.leaving)

    def announce(self, role: Role, index: int) -> Slot:
        """Spawn a new life: from now on it is the one to talk to, but it is not there yet."""
        generation = next(self._generations[role, index])
        slot = self.announced[role, index] = self.slots.occupy(role, index, generation)
        self.network.starting.add(ipc_address(self.run_dir, role, index, generation))
        return slot

    def start(self, role: Role, index: int) -> Life:
        """A new life is there; it is announced first where it was not."""
        slot = self.announced.get((role, index)) or self.announce(role, index)
        del self.announced[role, index]
        generation = slot[SlotWord.GENERATION]
        child = FakeChild(
            role=role,
            index=index,
            generation=generation,
            run_dir=self.run_dir,
            page=self.page,
            slot=slot,
            args=self.args,
            transport=FakeTransport(self.network, f"{role.label}{index}.{generation}"),
            clock=self.clock,
        )
        life = self.current[role, index] = Life(child, self._machine(role, child))
        child.slot.enter(Phase.READY)
        return life

    def _machine(self, role: Role, child: FakeChild) -> Any:
        if role is Role.SCHEDULER:
            return Scheduler(child, simulator(self.clock, STEP_S, self.bad_ids, self.seed_of(child.generation)))
        if role is Role.DETOKENIZER:
            return DetokenizerManager(child, RowText(token_table(), child.slot))
        return MultiTokenizerRouter(child) if role is Role.ROUTER else WorkerShell(child)

    def change_control(self, **fields: Any) -> None:
        """The supervisor changes the control state. Workers confirm nothing here: the scheduler gives them up."""
        version = self.page.header(HeaderWord.CONTROL_VERSION) + 2
        write_state(self.run_dir, ControlState(version=version, **fields))
        self.page.set_header(HeaderWord.CONTROL_VERSION, version)

    def seed_of(self, generation: int) -> int:
        """The seed of the engine of a scheduler life."""
        return SEED + generation if self.sampled else SEED

    def kill(self, role: Role, index: int) -> None:
        """kill -9, reaped: its inbox is lost, what it sent is still under way, its page slot is free."""
        self.reap(self.current.pop((role, index)))

    def reap(self, life: Life) -> None:
        """The life has ended; its counters move into the totals."""
        if life.child.role is Role.SCHEDULER:
            life.machine._book.suspects._mapping.close()
        for address in life.child.transport.addresses:
            self.network.unbind(address)
        self.slots.release(life.child.slot)
        for key in [key for key, link in self.network.links.items() if key[0] == life.name and not link.frames]:
            del self.network.links[key]

    def roll_worker(self, index: int) -> Life:
        """Replace a worker while the old life still serves what it has."""
        self.leaving.append(self.current[Role.TOKENIZER_WORKER, index])
        return self.start(Role.TOKENIZER_WORKER, index)

    def reap_leavers(self) -> None:
        """A leaving worker without requests ends."""
        for life in [life for life in self.leaving if not life.machine.frontend.live]:
            self.leaving.remove(life)
            self.reap(life)

    def flow(self, rounds: int, step_s: float = STEP_S) -> None:
        """Undisturbed time: in each round every message gets all the way, as hops take no time against a step."""
        for _ in range(rounds):
            self.clock.now_s += step_s
            for role in _ORDER:
                self.network.deliver_all()
                for life in [life for life in self.lives() if life.child.role is role]:
                    life.machine.turn(True)

    def counter(self, word: SlotWord) -> int:
        """A counter over all lives, the ended ones too."""
        ended = sum(self.page.totals(role)[word] for role in Role)
        return ended + sum(life.child.slot[word] for life in self.lives())

    def close(self) -> None:
        """Free the page and what the schedulers map."""
        for place in list(self.current):
            self.kill(*place)
        self.page.close()


class CheckedSink:
    """Receives one request's output and holds it against what must come."""

    def __init__(self, wanted: Expected, spec: TextSpec) -> None:
        self.wanted = wanted
        self._spec = spec
        self.ids: list[int] = []
        self.text = ""
        self.chosen: list[float | None] = []
        self.has_logprobs = bool(wanted.chosen)
        self.finish: FinishReason | None = None
        self.admissions = 0
        self.gone = False  # cancelled, or its worker died: nothing may come any more

    def admitted(self, request: LiveRequest) -> None:
        self.admissions += 1
        assert not self.gone
        assert self.admissions == 1

    def row(self, request: LiveRequest, text: str, token_ids: array[int], logprobs: TokenLogprobs | None) -> None:
        assert not self.gone, "a row after the request was cancelled"
        assert self.finish is None, "a row after the finish"
        self.text += text
        self.ids.extend(token_ids)
        if logprobs is not None:
            self.chosen.extend(logprobs.chosen)
        assert self.ids == self.wanted.ids[: len(self.ids)]
        assert self.wanted.text.startswith(self.text), (self.text, self.wanted.text)
        if self.has_logprobs:
            assert len(self.chosen) == len(self.ids)
            assert self.chosen == self.wanted.chosen[: len(self.ids)]

    def finished(
        self,
        request: LiveRequest,
        text: str,
        token_ids: array[int],
        logprobs: TokenLogprobs | None,
        finish: FinishReason,
    ) -> None:
        if finish.kind == "abort":  # an end somewhere: whatever was held back is flushed there
            ids = [*self.ids, *token_ids]
            assert ids == self.wanted.ids[: len(ids)]
            assert self.text + text == text_of(ids, self._spec, "abort", None).text
        else:
            self.row(request, text, token_ids, logprobs)
        self.finish = finish

    def check_complete(self) -> None:
        """Everything came, and the right end."""
        assert self.finish is not None, f"no finish; {len(self.ids)} of {len(self.wanted.ids)} ids came"
        assert self.finish.kind == self.wanted.kind, self.finish
        assert self.ids == self.wanted.ids
        assert self.text == self.wanted.text
        if self.wanted.kind == "error":
            assert self.finish.code == "invalid_token_id"
        else:
            assert self.finish.matched == self.wanted.matched


class SampledSink(CheckedSink):
    """For engines whose lives go on differently: whatever came must be one answer, and fit together."""

    def __init__(self, submission: TokenizedGenerateReqInput) -> None:
        super().__init__(Expected([], "", "", None, []), submission.text)
        self._submission = submission

    def row(self, request: LiveRequest, text: str, token_ids: array[int], logprobs: TokenLogprobs | None) -> None:
        assert not self.gone, "a row after the request was cancelled"
        assert self.finish is None, "a row after the finish"
        self.text += text
        self.ids.extend(token_ids)
        if logprobs is not None:
            self.chosen.extend(logprobs.chosen)
        if self._submission.logprobs is not None:
            assert len(self.chosen) == len(self.ids)

    def finished(
        self,
        request: LiveRequest,
        text: str,
        token_ids: array[int],
        logprobs: TokenLogprobs | None,
        finish: FinishReason,
    ) -> None:
        self.row(request, text, token_ids, logprobs)
        self.finish = finish

    def check_sampled(self, generations: int) -> None:
        """The answer is complete and each part of it came from some life of the engine."""
        finish, sampling = self.finish, self._submission.sampling
        assert finish is not None, f"no finish; {len(self.ids)} ids came"
        answer = text_of(self.ids, self._submission.text, finish.kind, finish.matched)
        assert (answer.ids, answer.text, answer.kind, answer.matched) == (
            self.ids,
            self.text,
            finish.kind,
            finish.matched,
        )
        assert finish.kind in ("stop", "length")
        if finish.kind == "length":
            assert len(self.ids) == sampling.max_new_tokens
        check_continuation(self._submission, self.ids, self.chosen, [SEED + n for n in range(1, generations + 1)])
