"""Any interleaving, any loss: every request ends with exactly what an undisturbed run gives, and nothing is left.

Real scheduler (with the simulator), detokenizers, router and frontends; the network, the clock and the deaths are
hypothesis's. It delivers, loses, repeats and delays frames, lets processes run one turn at a time in any order, and
kills and restarts them; afterwards there is quiet, and everything must come right by itself.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Literal
from zlib import crc32

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglmt.ipc.state_page import SlotWord
from sglmt.messages.columns import pack
from sglmt.messages.frame import Role
from sglmt.messages.sampling import LogprobSpec, SamplingParams, TextSpec
from sglmt.messages.to_scheduler import TokenizedGenerateReqInput
from sglmt.server_args import ServerArgs
from sglmt.workers.live_request import LiveRequest
from tests.unit.workers.reference import VOCAB, expected, simulator
from tests.unit.workers.wired import STEP_S, UNEXPLAINED, CheckedSink, Life, SampledSink, World

QUIET_ROUNDS = 4000
SETTLE_ROUNDS = 100
SETTLE_STEP_S = 0.25
STOPS = ((), (), ("ab",), ("bca", "a\n"), ("é", "cabab"), ("鑫", "b ", "\ufffd"))
PLACES = ((Role.SCHEDULER, 0), (Role.ROUTER, 0), (Role.DETOKENIZER, 0), (Role.DETOKENIZER, 1))


class EngineDied(BaseException):
    """The engine takes the whole scheduler with it."""


class Asked:
    """One request of the test."""

    def __init__(self, life: Life, request: LiveRequest, sink: CheckedSink, rid: str) -> None:
        self.life, self.request, self.sink, self.rid = life, request, sink, rid
        self.may_be_aborted = False  # by rid: whether the abort arrives is the network's matter
        self.may_be_duplicate = False


class Interleavings(RuleBasedStateMachine):
    """See the module."""

    world: World

    @initialize(
        multi=st.booleans(),
        engine=st.sampled_from(["exact", "sampled", "bad ids"]),
        slots=st.sampled_from([2, 5, 32]),
    )
    def launch(self, multi: bool, engine: str, slots: int) -> None:
        """Multi mode with two of everything, or single mode.

        The lives of an engine agree on what comes next (exact), go on differently (sampled), or agree and now and
        then emit an id that stands for no text.
        """
        self.directory = Path(tempfile.mkdtemp())
        args = ServerArgs(
            workers=2 if multi else 1,
            detokenizers=2 if multi else 1,
            engine="simulator",
            max_running_requests=slots,
            max_resubmits=1000,
        )
        self.world = World(self.directory, args, bad_ids=engine == "bad ids", sampled=engine == "sampled")
        self.asked: list[Asked] = []
        self.aborted_rids: set[str] = set()
        self.engine_deaths = 0
        self.prompts = 0

    # requests

    @rule(worker=st.integers(0, 1), seed=st.integers(0, 2**32 - 1), requests=st.integers(1, 5))
    def submit(self, worker: int, seed: int, requests: int) -> None:
        """Some requests of all kinds; now and then two answers to one, or a rid that is in use."""
        life = self.world.current.get((Role.TOKENIZER_WORKER, worker % self.world.args.workers))
        if life is None:
            return
        rng = Random(seed)
        for _ in range(requests):
            again = bool(self.asked) and rng.random() < 0.1
            rid = self.asked[-1].rid if again else f"r{len(self.asked)}"
            keys = [life.machine.frontend.next_key() for _ in range(rng.choice((1, 1, 1, 2)))]
            for key in keys:
                self._submit_one(life, self._submission(rng, key, keys[0], rid))
            for one in self.asked:  # whichever of the two arrives second
                one.may_be_duplicate |= again and one.rid == rid

    def _submission(self, rng: Random, key: int, group: int, rid: str) -> TokenizedGenerateReqInput:
        self.prompts += 1
        return TokenizedGenerateReqInput(
            key=key,
            attempt=1,
            rid=rid,
            group=group,
            input_ids=pack("I", [1 + self.prompts % (VOCAB - 1), 2, 1 + self.prompts // VOCAB]),
            sampling=SamplingParams(
                max_new_tokens=rng.choice((0, 1, 2, 5, 10, 20, 30)), stop_token_ids=rng.choice(((), (), (7, 8)))
            ),
            text=TextSpec(stop=rng.choice(STOPS), no_stop_trim=rng.random() < 0.3),
            logprobs=LogprobSpec() if rng.random() < 0.5 else None,
            confirm_admission=rng.random() < 0.5,
        )

    def _submit_one(self, life: Life, submission: TokenizedGenerateReqInput) -> None:
        if self.world.sampled:
            sink: CheckedSink = SampledSink(submission)
        else:
            wanted = expected(submission, simulator(self.world.clock, bad_ids=self.world.bad_ids))
            sink = CheckedSink(wanted, submission.text)
        one = Asked(life, life.machine.frontend.submit(submission, 0, 3, sink), sink, submission.rid)
        one.may_be_aborted = submission.rid in self.aborted_rids  # an abort may still be under way
        self.asked.append(one)

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 50), really=st.integers(0, 2))
    def cancel(self, which: int, really: int) -> None:
        """The client leaves (one time in three: answers are what this test is about)."""
        if really != 2:
            return
        one = self.asked[which % len(self.asked)]
        if one.life in self.world.lives() and one.sink.finish is None:
            one.life.machine.frontend.cancel([one.request])
            one.sink.gone = True

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 50), worker=st.integers(0, 1), really=st.integers(0, 2))
    def abort_by_rid(self, which: int, worker: int, really: int) -> None:
        """Somebody, through any worker, ends a request by its rid (as rarely)."""
        if really != 2:
            return
        one = self.asked[which % len(self.asked)]
        life = self.world.current.get((Role.TOKENIZER_WORKER, worker % self.world.args.workers))
        if life is not None:
            life.machine.frontend.abort_by_rid(one.rid, False)
            self.aborted_rids.add(one.rid)
            for other in self.asked:
                other.may_be_aborted |= other.rid == one.rid

    @rule(mode=st.sampled_from([None, None, "retract", "in_place"]))
    def pause(self, mode: Literal["retract", "in_place"] | None) -> None:
        """Generation is paused, or goes on."""
        if mode is None:
            self.world.change_control(paused=False)
        else:
            self.world.change_control(paused=True, pause_mode=mode)

    # the network

    def _link(self, which: int):  # type: ignore[no-untyped-def]
        links = self.world.network.busy()
        return links[which % len(links)] if links else None

    @rule(which=st.integers(0, 30), frames=st.integers(1, 8))
    def deliver(self, which: int, frames: int) -> None:
        """Some frames of one link arrive."""
        link = self._link(which)
        while link is not None and link.frames and frames and self.world.network.deliver(link):
            frames -= 1

    @rule(which=st.integers(0, 30), position=st.integers(0, 3))
    def lose(self, which: int, position: int) -> None:
        """A frame is lost."""
        link = self._link(which)
        if link is not None and position < len(link.frames):
            del link.frames[position]

    @rule(which=st.integers(0, 30))
    def repeat(self, which: int) -> None:
        """A frame arrives twice."""
        link = self._link(which)
        if link is not None:
            link.frames.insert(1, link.frames[0])

    @rule(which=st.integers(0, 30), blocked=st.booleans())
    def block(self, which: int, blocked: bool) -> None:
        """A peer takes nothing for a while."""
        links = list(self.world.network.links.values())
        if links:
            links[which % len(links)].blocked = blocked

    # time and turns

    @rule(step_s=st.sampled_from([0.001, 0.02, 0.06, 0.5, 1.1]))
    def pass_time(self, step_s: float) -> None:
        """The clock goes on."""
        self.world.clock.now_s += step_s

    @rule(which=st.integers(0, 10), housekeeping=st.booleans())
    def turn(self, which: int, housekeeping: bool) -> None:
        """One process runs one turn."""
        lives = list(self.world.lives())
        if lives:
            lives[which % len(lives)].machine.turn(housekeeping)

    @rule(rounds=st.integers(1, 8))
    def flow(self, rounds: int) -> None:
        """Undisturbed time for those that live."""
        self.world.flow(rounds)

    @rule(
        seed=st.integers(0, 2**32 - 1),
        rounds=st.integers(1, 40),
        loss=st.sampled_from([0.0, 0.0, 0.03, 0.2]),
        repeats=st.sampled_from([0.0, 0.0, 0.1]),
        delay=st.sampled_from([0.0, 0.1, 0.5]),
        stalled=st.sampled_from([0, 0, 1, 3]),
        deaths=st.sampled_from([0.0, 0.03, 0.1]),
    )
    def storm(
        self, seed: int, rounds: int, loss: float, repeats: float, delay: float, stalled: int, deaths: float
    ) -> None:
        """Many of the small steps above in one, with the given odds; on some links nothing comes through."""
        world, rng = self.world, Random(seed)
        for _ in range(rounds):
            world.clock.now_s += rng.choice((0.003, STEP_S, STEP_S, 0.06, 0.3))
            links = [link for link in world.network.busy() if crc32(link.name.encode(), seed) % 8 >= stalled]
            for link in rng.sample(links, k=len(links)):
                while link.frames and rng.random() >= delay:
                    if rng.random() < loss:
                        link.frames.popleft()
                        continue
                    if rng.random() < repeats:
                        link.frames.append(link.frames[0])
                    if not world.network.deliver(link):
                        break
            for life in rng.sample(list(world.lives()), k=len(list(world.lives()))):
                life.machine.turn(rng.random() < 0.7)
            world.reap_leavers()
            if rng.random() < deaths:
                self.kill(rng.choice(PLACES))
            if rng.random() < deaths:
                self.engine_dies()
            if rng.random() < 0.3:
                self.restart(rng.randrange(10))

    # deaths

    @rule(place=st.sampled_from(PLACES))
    def kill(self, place: tuple[Role, int]) -> None:
        """A process that holds no connection dies."""
        if place in self.world.current:
            self.world.kill(*place)

    @rule(index=st.integers(0, 1), really=st.integers(0, 2))
    def kill_worker(self, index: int, really: int) -> None:
        """A worker dies with its connections (as rarely)."""
        if really != 2:
            return
        life = self.world.current.get((Role.TOKENIZER_WORKER, index))
        if life is not None:
            self.world.kill(Role.TOKENIZER_WORKER, index)
            for one in self.asked:
                one.sink.gone |= one.life is life

    @rule(index=st.integers(0, 1))
    def roll_worker(self, index: int) -> None:
        """A worker is replaced; two lives of its index coexist."""
        if (Role.TOKENIZER_WORKER, index) in self.world.current and len(self.world.leaving) < 3:
            self.world.roll_worker(index)

    @rule(which=st.integers(0, 10))
    def spawn(self, which: int) -> None:
        """One of the dead is announced: frames for it wait, it is not there yet."""
        dead = [place for place in self._dead() if place not in self.world.announced]
        if dead:
            self.world.announce(*dead[which % len(dead)])

    def _dead(self) -> list[tuple[Role, int]]:
        return [place for place in self.world.places() if place not in self.world.current]

    @rule(which=st.integers(0, 10))
    def restart(self, which: int) -> None:
        """One of the dead is back."""
        dead = self._dead()
        if dead:
            self.world.start(*dead[which % len(dead)])

    @rule()
    def engine_dies(self) -> None:
        """Once: the next step of the engine takes the scheduler with it, its unmoved requests become suspects."""
        life = self.world.current.get((Role.SCHEDULER, 0))
        if self.engine_deaths or life is None or not life.machine._engine.has_work():
            return
        self.engine_deaths += 1

        def die() -> None:
            raise EngineDied

        life.machine._engine.step = die
        self.world.clock.now_s += STEP_S
        with suppress(EngineDied):  # an abort it finds in its inbox may leave the engine nothing to do
            life.machine.turn(False)
        self.world.kill(Role.SCHEDULER, 0)
        self.world.start(Role.SCHEDULER, 0)

    # what must hold

    @invariant()
    def nothing_unexplained(self) -> None:
        """No message without address, none that cannot be read."""
        if hasattr(self, "world"):
            self.world.reap_leavers()
            for word in UNEXPLAINED:
                assert self.world.counter(word) == 0, word.name

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self._come_to_rest()
            self._check_answers()
            self._check_nothing_left()
        finally:
            self.world.close()
            shutil.rmtree(self.directory)

    def _come_to_rest(self) -> None:
        world = self.world
        world.change_control(paused=False)
        for link in world.network.links.values():
            link.blocked = False
        for place in world.places():
            if place not in world.current:
                world.start(*place)
        for _ in range(QUIET_ROUNDS):
            world.flow(1)
            if not any(life.machine.frontend.live for life in self._workers()):
                break
        world.flow(SETTLE_ROUNDS, SETTLE_STEP_S)
        world.reap_leavers()
        world.flow(2)

    def _workers(self) -> list[Life]:
        return [life for life in self.world.lives() if life.child.role is Role.TOKENIZER_WORKER]

    def _check_answers(self) -> None:
        for one in self.asked:
            finish = one.sink.finish
            if one.sink.gone:
                continue
            if one.may_be_duplicate and finish is not None and finish.code == "duplicate_rid":
                continue
            if one.may_be_aborted and finish is not None and finish.code == "aborted":
                continue
            if isinstance(one.sink, SampledSink):
                one.sink.check_sampled(self.world.current[Role.SCHEDULER, 0].child.generation)
            else:
                one.sink.check_complete()

    def _check_nothing_left(self) -> None:
        world = self.world
        scheduler = world.current[Role.SCHEDULER, 0].machine
        ledger = scheduler._book.ledger
        assert ledger.records == {}
        assert ledger._by_life == {}
        assert ledger._group_of_rid == {}
        assert scheduler._book.running == {}
        assert scheduler._book.unmoved == set()
        assert scheduler._book._deadlines == {}
        assert scheduler._book.trial is None
        assert len(scheduler._book.queue) == 0
        assert not scheduler._engine.has_work()
        assert not scheduler._emitter.has_unsent()
        assert scheduler._book.standing == []
        assert world.current[Role.SCHEDULER, 0].child.slot[SlotWord.RECOVERING] == 0
        assert scheduler._book.ledger.unsubmitted() == 0
        for (role, _index), life in world.current.items():
            if role is Role.DETOKENIZER:
                assert len(life.machine._texts) == 0
                assert life.machine._texts._ended == {}
            if role is Role.TOKENIZER_WORKER:
                assert life.machine.frontend.live == {}
                assert life.machine.frontend._aborts._open == {}
                assert life.child.slot[SlotWord.IN_FLIGHT] == 0


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
