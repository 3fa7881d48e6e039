"""What each process does at its edges: refusals with an address, bad messages, deaths, pauses of peers, suspects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sglmt.delivery.keys import make_key, make_life
from sglmt.ipc.addresses import ipc_address
from sglmt.ipc.state_page import SlotWord
from sglmt.messages.columns import RaggedColumn, pack, pack_ragged
from sglmt.messages.frame import FrameWriter, Role, Scope
from sglmt.messages.registry import kind_of, scope_of
from sglmt.messages.sampling import FinishReason, LogprobSpec, SamplingParams, TextSpec
from sglmt.messages.to_detokenizer import BatchEmbeddingOutput, BatchTokenIDOutput
from sglmt.messages.to_scheduler import (
    AbortReq,
    HeldTextsReq,
    LiveRequestsReq,
    ResumeReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
)
from sglmt.messages.to_worker import BatchStrOutput, UnknownRequests
from sglmt.workers.engine_control import MARKERS_WITHIN_S
from tests.unit.workers.asking import Asked, ask, worker
from tests.unit.workers.wired import STEP_S, Life, World

WorldOf = Callable[..., World]


def scheduler(world: World) -> Any:
    return world.current[Role.SCHEDULER, 0].machine


def put(
    world: World, life: Life, message: Any, scope: Scope | None = None, index: int = 0, generation: int = 0
) -> None:
    """A message arrives at `life` as if some process of this instance had sent it."""
    writer = FrameWriter(life.child.instance_id, Role.TOKENIZER_WORKER, 0, 1)
    frame = writer.frame(kind_of(message), scope_of(message) if scope is None else scope, message, index, generation)
    address = ipc_address(world.run_dir, life.child.role, life.child.index, life.child.generation)
    world.network.inboxes[address].append(bytes(frame))


def put_raw(world: World, life: Life, frame: bytes) -> None:
    address = ipc_address(world.run_dir, life.child.role, life.child.index, life.child.generation)
    world.network.inboxes[address].append(frame)


def check_all(asked: list[Asked]) -> None:
    for one in asked:
        one.sink.check_complete()


# a request's way


@pytest.mark.parametrize("options", [{}, {"workers": 1, "detokenizers": 1}, {"workers": 4, "detokenizers": 3}])
def test_undisturbed_requests_are_answered_and_leave_nothing(world_of: WorldOf, options: dict[str, Any]) -> None:
    world = world_of(**options)
    asked = [
        ask(world, n % world.args.workers, tokens=n % 9, prompt=1 + n % 12, stop=("ab",) if n % 3 else ())
        for n in range(40)
    ]
    world.flow(30)
    check_all(asked)
    world.flow(60)
    assert scheduler(world)._book.ledger.records == {}
    for word in (SlotWord.UNROUTABLE, SlotWord.UNDECODABLE, SlotWord.GAP_ROWS, SlotWord.RESUMES, SlotWord.LATE_ROWS):
        assert world.counter(word) == 0, word.name


def test_every_detokenizer_gets_work_whatever_the_number_of_workers(world_of: WorldOf) -> None:
    """Case 15."""
    world = world_of(workers=1, detokenizers=4, router="always")
    asked = [ask(world, tokens=2) for _ in range(64)]
    world.flow(10)
    check_all(asked)
    rows = [world.current[Role.DETOKENIZER, n].child.slot[SlotWord.ROWS_IN] for n in range(4)]
    assert min(rows) >= 0.5 * max(rows) > 0


def test_a_row_longer_than_a_frame_costs_its_request_only(world_of: WorldOf, monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(detokenizers=1)
    world.flow(5)
    monkeypatch.setattr("sglmt.messages.frame.MAX_FRAME_BYTES", 1500)
    many = LogprobSpec(prompt_from=0, token_ids=tuple(range(200)))
    few = LogprobSpec(token_ids=tuple(range(20)))
    huge = [ask(world, n, logprobs=many) for n in (0, 1)]
    others = [ask(world, n % 2, logprobs=few) for n in range(8)] + [ask(world, n % 2) for n in range(8)]
    world.flow(40)
    check_all(others)
    for one in huge:
        assert one.sink.finish is not None
        assert (one.sink.finish.kind, one.sink.finish.code) == ("error", "answer_too_large")
    world.flow(60)
    assert scheduler(world)._book.ledger.records == {}


def test_one_message_a_worker_and_step(world_of: WorldOf) -> None:
    world = world_of(detokenizers=1)
    asked = [ask(world, n % 2, tokens=5, prompt=1 + n % 12) for n in range(20)]
    world.flow(1)
    before = world.counter(SlotWord.MESSAGES_OUT)
    detokenizer = world.current[Role.DETOKENIZER, 0].child.slot
    sent = detokenizer[SlotWord.MESSAGES_OUT]
    world.flow(10)
    check_all(asked)
    assert detokenizer[SlotWord.MESSAGES_OUT] - sent <= 2 * 6
    assert world.counter(SlotWord.MESSAGES_OUT) > before


def test_the_prompts_logprobs_come_even_without_any_token(world_of: WorldOf) -> None:
    world = world_of()
    spec = LogprobSpec(prompt_from=0)
    asked = [ask(world, tokens=tokens, logprobs=spec) for tokens in (0, 3)]
    world.flow(10)
    check_all(asked)
    for one in asked:
        assert one.request.input_logprobs is not None
        assert len(one.request.input_logprobs.chosen) == 3


def test_embeddings_reach_the_worker_that_asked(world_of: WorldOf) -> None:
    """Case 3."""

    class Sink:
        finish: FinishReason | None = None

        def finished(self, request: Any, text: str, ids: Any, logprobs: Any, finish: FinishReason) -> None:
            self.finish = finish

    world = world_of()
    requests = []
    for index in (0, 1):
        frontend = worker(world, index).machine.frontend
        key = frontend.next_key()
        submission = TokenizedEmbeddingReqInput(
            key=key, attempt=1, rid=f"e{index}", group=key, input_ids=pack("I", [1, 2 + index])
        )
        requests.append(frontend.submit(submission, 0, 2, Sink()))
    world.flow(5)
    assert [request.sink.finish for request in requests] == [FinishReason(kind="stop")] * 2
    assert all(len(request.embedding or ()) == 64 for request in requests)
    assert requests[0].embedding != requests[1].embedding


def test_an_embedding_whose_row_was_lost_is_sent_again(world_of: WorldOf) -> None:
    class Sink:
        finishes = 0

        def finished(self, *_: Any) -> None:
            self.finishes += 1

    world = world_of(workers=1, detokenizers=1)
    frontend = worker(world).machine.frontend
    submission = TokenizedEmbeddingReqInput(
        key=frontend.next_key(), attempt=1, rid="e", group=0, input_ids=pack("I", [1])
    )
    sink = Sink()
    frontend.submit(submission, 0, 1, sink)
    world.network.deliver_all()
    scheduler(world).turn(False)
    for link in world.network.busy():
        link.frames.clear()
    world.flow(150)
    assert sink.finishes == 1


def test_a_stop_string_frees_the_slot_and_the_scheduler_keeps_what_the_client_has(world_of: WorldOf) -> None:
    world = world_of(detokenizers=1)
    one = ask(world, tokens=400, stop=("ab",))
    world.flow(1)
    links = [link for link in world.network.links.values() if link.source.startswith("detokenizer")]
    reports = next(link for link in links if link.address.endswith("/s0.1"))
    reports.blocked = True
    while one.sink.finish is None:
        world.flow(1)
    world.flow(3)  # the engine goes on: it has not heard
    record = scheduler(world)._book.ledger.records[one.key]
    assert len(record.output_ids) == len(one.sink.ids) + 3
    reports.blocked = False
    world.flow(2)
    assert record.output_ids.tolist() == one.sink.ids
    assert scheduler(world)._book.running == {}
    assert not scheduler(world)._engine.has_work()
    one.sink.check_complete()


# refusals have an address


def test_a_full_queue_answers_every_request_it_refuses(world_of: WorldOf) -> None:
    """Case 1: twelve at once, one may run and one may wait; the rest hear 429 at once."""
    world = world_of(max_running_requests=2, max_queued_requests=1)
    asked = [ask(world, n % 2, tokens=4) for n in range(12)]
    world.flow(2)
    refused = [one for one in asked if one.sink.finish is not None]
    assert len(refused) == 9
    for one in refused:
        finish = one.sink.finish
        assert finish is not None
        assert (finish.status, finish.code, finish.retry_after_s) == (429, "queue_full", 1)
    world.flow(30)
    check_all([one for one in asked if one not in refused])


def test_a_rid_in_use_is_refused_and_its_owner_untouched(world_of: WorldOf) -> None:
    """Case 7: on another worker, in one batch, and again after the first has ended."""
    world = world_of()
    first = ask(world, 0, rid="x")
    world.flow(1)
    second = ask(world, 1, rid="x")
    world.flow(2)
    assert second.sink.finish is not None
    assert (second.sink.finish.status, second.sink.finish.code) == (400, "duplicate_rid")
    world.flow(15)
    third = ask(world, 1, rid="x")
    world.flow(15)
    check_all([first, third])


def test_an_abort_finds_exactly_its_rid_through_any_worker(world_of: WorldOf) -> None:
    """Cases 8 and 9."""
    world = world_of()
    asked = [ask(world, n % 2, tokens=50, rid=rid) for n, rid in enumerate(("r-1", "r-10", "other"))]
    world.flow(3)
    worker(world, 1).machine.frontend.abort_by_rid("r-1", False)
    worker(world, 1).machine.frontend.abort_by_rid("", False)
    world.flow(2)
    assert asked[0].sink.finish is not None
    assert (asked[0].sink.finish.kind, asked[0].sink.finish.status) == ("abort", 499)
    assert [one.sink.finish for one in asked[1:]] == [None, None]
    assert len(scheduler(world)._book.running) == 2
    worker(world, 0).machine.frontend.abort_by_rid(None, True)
    world.flow(2)
    assert all(one.sink.finish is not None for one in asked)
    assert scheduler(world)._book.running == {}


def test_a_deadline_ends_a_request_with_an_answer_and_a_free_slot(world_of: WorldOf) -> None:
    world = world_of(max_running_requests=1)
    running = ask(world, tokens=100, deadline_s=world.clock.now_s + 0.1)
    waiting = ask(world, tokens=100, deadline_s=world.clock.now_s + 0.1)
    world.flow(9)
    for one in (running, waiting):
        assert one.sink.finish is not None
        assert (one.sink.finish.status, one.sink.finish.code) == (504, "deadline_exceeded")
    assert scheduler(world)._book.running == {}
    assert not scheduler(world)._engine.has_work()


def test_what_the_engine_cannot_do_is_a_400(world_of: WorldOf) -> None:
    world = world_of()
    one = ask(world, sampling=SamplingParams(max_new_tokens=3))
    other = worker(world).machine.frontend
    key = other.next_key()
    submission = TokenizedGenerateReqInput(
        key=key,
        attempt=1,
        rid="x",
        group=key,
        input_ids=pack("I", [1]),
        sampling=SamplingParams(max_new_tokens=1, regex="a"),
        text=TextSpec(),
    )
    refused = other.submit(submission, 0, 1, one.sink.__class__(one.sink.wanted, TextSpec()))
    world.flow(12)
    assert refused.sink.finish.status == 400
    assert "regex" in refused.sink.finish.message
    check_all([one])


# the dead


def test_a_cancelled_request_frees_its_slot_at_once(world_of: WorldOf) -> None:
    """Case 18: running and waiting."""
    world = world_of(max_running_requests=1)
    running, waiting = ask(world, tokens=400), ask(world, tokens=400)
    world.flow(3)
    for one in (running, waiting):
        worker(world).machine.frontend.cancel([one.request])
        one.sink.gone = True
    world.flow(2)
    assert scheduler(world)._book.ledger.records == {}
    assert not scheduler(world)._engine.has_work()
    assert [len(world.current[Role.DETOKENIZER, n].machine._texts) for n in (0, 1)] == [0, 0]


def test_the_requests_of_a_dead_worker_end_everywhere(world_of: WorldOf) -> None:
    world = world_of()
    lost, kept = ask(world, 0, tokens=400), ask(world, 1, tokens=20)
    world.flow(3)
    lost.sink.gone = True
    world.kill(Role.TOKENIZER_WORKER, 0)
    world.flow(3)
    assert list(scheduler(world)._book.ledger.records) == [kept.key]
    successor = ask_after_restart(world)
    world.flow(30)
    check_all([kept, successor])


def ask_after_restart(world: World) -> Asked:
    world.start(Role.TOKENIZER_WORKER, 0)
    return ask(world, 0, tokens=5)


@pytest.mark.parametrize("place", [(Role.SCHEDULER, 0), (Role.ROUTER, 0), (Role.DETOKENIZER, 0), (Role.DETOKENIZER, 1)])
def test_every_stream_survives_every_death(world_of: WorldOf, place: tuple[Role, int]) -> None:
    world = world_of()
    asked = [ask(world, n % 2, tokens=12, prompt=1 + n % 12, stop=("cab",), logprobs=LogprobSpec()) for n in range(16)]
    for _ in range(3):
        world.flow(3)
        world.kill(*place)
        world.flow(2)
        world.start(*place)
    world.flow(120)
    check_all(asked)


def test_only_the_requests_of_a_dead_detokenizer_are_replayed(world_of: WorldOf) -> None:
    world = world_of()
    asked = [ask(world, tokens=20) for _ in range(8)]
    world.flow(4)
    world.kill(Role.DETOKENIZER, 0)
    world.start(Role.DETOKENIZER, 0)
    world.flow(30)
    check_all(asked)
    emitter = scheduler(world)._emitter
    assert world.counter(SlotWord.GAP_ROWS) == 0  # nobody had to notice a gap first
    assert world.counter(SlotWord.RESUMES) == sum(emitter.detokenizer_of(one.key) == 0 for one in asked) == 4


def test_requests_end_with_an_error_when_the_engine_dies_too_often(world_of: WorldOf) -> None:
    world = world_of(max_resubmits=2)
    lucky, stuck = ask(world, 0, tokens=20), ask(world, 1, tokens=20)
    for deaths in range(3):
        assert stuck.sink.finish is None
        world.flow(deaths, step_s=0.001)
        world.kill(Role.SCHEDULER, 0)
        world.start(Role.SCHEDULER, 0)
        frontend = stuck.life.machine.frontend
        frontend.take_unknown(UnknownRequests(requests=[(stuck.key, stuck.request.attempt)]))
    assert stuck.sink.finish is not None
    assert (stuck.sink.finish.kind, stuck.sink.finish.code) == ("error", "engine_died")
    assert stuck.sink.ids == []
    world.flow(120)
    lucky.sink.check_complete()


def test_a_new_scheduler_has_all_requests_again_at_once(world_of: WorldOf) -> None:
    """Not only after the next regular lists."""
    world = world_of()
    asked = [ask(world, n % 2, tokens=20) for n in range(8)]
    world.flow(5)
    world.kill(Role.SCHEDULER, 0)
    world.start(Role.SCHEDULER, 0)
    world.flow(3)
    assert len(scheduler(world)._book.running) == 8
    world.flow(20)
    check_all(asked)


class EngineDied(BaseException):
    """The engine takes the scheduler with it."""


def poison(world: World, key: int) -> None:
    """From now on the engine of the current scheduler dies on `key`, before it yields anything."""
    engine = scheduler(world)._engine
    step = engine.step

    def dying_step() -> Any:
        if key in engine._plain or key in engine._running:
            raise EngineDied
        return step()

    engine.step = dying_step


def flow_with_poison(world: World, key: int, rounds: int) -> int:
    """Undisturbed time, but for the deaths the poison causes; returns how many there were."""
    deaths = 0
    for _ in range(rounds):
        try:
            world.flow(1)
        except EngineDied:
            deaths += 1
            world.kill(Role.SCHEDULER, 0)
            world.start(Role.SCHEDULER, 0)
            poison(world, key)
    return deaths


def test_a_poison_request_ends_with_an_error_and_its_neighbours_finish(world_of: WorldOf) -> None:
    world = world_of()
    healthy = [ask(world, n % 2, tokens=30, prompt=1 + n % 12) for n in range(64)]
    world.flow(4)
    bad = ask(world, 0, tokens=30, prompt=5)
    poison(world, bad.key)
    assert flow_with_poison(world, bad.key, 200) == 2
    check_all(healthy)
    assert bad.sink.finish is not None
    assert (bad.sink.finish.kind, bad.sink.finish.code) == ("error", "engine_died")


def test_requests_that_came_with_the_poison_are_tried_one_at_a_time_and_finish(world_of: WorldOf) -> None:
    world = world_of()
    bad_key = make_key(make_life(0, 1), 3)
    poison(world, bad_key)
    together = [ask(world, 0, tokens=10, prompt=1 + n) for n in range(6)]
    assert flow_with_poison(world, bad_key, 200) == 2
    bad = next(one for one in together if one.key == bad_key)
    check_all([one for one in together if one is not bad])
    assert bad.sink.finish is not None
    assert bad.sink.finish.code == "engine_died"


def test_a_suspect_has_its_turn_on_a_busy_server(world_of: WorldOf) -> None:
    world = world_of(max_running_requests=4)
    suspect = ask(world, tokens=3)
    poison(world, suspect.key)
    with pytest.raises(EngineDied):
        world.flow(2)
    world.kill(Role.SCHEDULER, 0)
    world.start(Role.SCHEDULER, 0)
    asked = [suspect]
    for n in range(40):
        asked.append(ask(world, 1, tokens=1, prompt=1 + n % 12))
        world.flow(1)
        if suspect.sink.finish is not None:
            break
    assert suspect.sink.finish is not None
    world.flow(40)
    check_all(asked)


def test_the_rid_of_a_stream_that_continues_cannot_be_taken_from_it(world_of: WorldOf) -> None:
    world = world_of()
    stream = ask(world, 0, tokens=30, rid="x")
    world.flow(4)
    world.kill(Role.SCHEDULER, 0)
    world.start(Role.SCHEDULER, 0)
    ask(world, 1, tokens=30, rid="x")  # is there before the stream is submitted again
    world.network.deliver_all()
    for place in ((Role.TOKENIZER_WORKER, 1), (Role.ROUTER, 0)):
        world.current[place].machine.turn(True)
        world.network.deliver_all()
    scheduler(world).turn(True)
    world.flow(60)
    stream.sink.check_complete()


def test_a_row_of_a_replaced_attempt_is_not_delivered_even_where_it_would_fit(world_of: WorldOf) -> None:
    world = world_of()
    one = ask(world, tokens=10)
    world.flow(1)
    frontend = worker(world).machine.frontend
    frontend.take_unknown(UnknownRequests(requests=[(one.key, 1)]))
    assert one.request.attempt == 2
    columns = {"keys": pack("Q", [one.key]), "offsets": pack("I", [0]), "text_offsets": pack("I", [0])}
    stale = BatchStrOutput(**columns, attempts=pack("I", [1]), output_ids=pack_ragged("I", [[9]]), texts=["x"])
    frontend.take_batch(stale)
    assert (one.request.tokens, one.sink.ids) == (0, [])
    assert world.counter(SlotWord.STALE_ATTEMPT_ROWS) == 1
    frontend.take_unknown(UnknownRequests(requests=[(one.key, 1)]))  # an old answer changes nothing
    assert one.request.attempt == 2
    world.flow(20)
    one.sink.check_complete()


def test_two_lives_of_a_worker_are_both_served(world_of: WorldOf) -> None:
    """During a roll, in both modes."""
    for options in ({}, {"workers": 1, "detokenizers": 1}):
        world = world_of(**options)
        old = ask(world, tokens=20)
        world.flow(3)
        world.roll_worker(0)
        new = ask(world, tokens=20)
        world.flow(40)
        check_all([old, new])
        assert old.life is not new.life
        world.close()
        (world.run_dir / "page").unlink()
        world.close = lambda: None  # type: ignore[method-assign]


# control state


def change(world: World, **fields: Any) -> None:
    """A change of the control state, and the time until it is carried out."""
    world.change_control(**fields)
    world.flow(1)
    world.clock.now_s += MARKERS_WITHIN_S
    world.flow(1)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_paused_requests_go_on_exactly_where_they_were(world_of: WorldOf, mode: str) -> None:
    world = world_of()
    asked = [ask(world, n % 2, tokens=30, prompt=1 + n % 12, logprobs=LogprobSpec(), stop=("cab",)) for n in range(8)]
    world.flow(4)
    change(world, paused=True, pause_mode=mode)
    before = [list(one.sink.ids) for one in asked]
    late = ask(world, 0, tokens=5)
    world.flow(20)
    assert [one.sink.ids for one in asked] == before
    assert late.sink.ids == []
    assert scheduler(world)._engine.has_work() == (mode == "in_place")
    change(world, paused=False)
    world.flow(60)
    check_all([*asked, late])


def test_a_pause_may_abort_what_runs_and_waits(world_of: WorldOf) -> None:
    world = world_of(max_running_requests=1)
    asked = [ask(world, tokens=100) for _ in range(3)]
    world.flow(2)
    change(world, paused=True, pause_mode="abort")
    assert [one.sink.finish.code for one in asked if one.sink.finish is not None] == ["paused"] * 3
    assert not scheduler(world)._engine.has_work()


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_deadline_holds_while_a_request_is_paused(world_of: WorldOf, mode: str) -> None:
    world = world_of()
    one = ask(world, tokens=300, deadline_s=world.clock.now_s + MARKERS_WITHIN_S + 1.0)
    world.flow(3)
    change(world, paused=True, pause_mode=mode)
    assert one.sink.finish is None
    world.clock.now_s += 1.0
    world.flow(2)
    assert one.sink.finish is not None
    assert one.sink.finish.code == "deadline_exceeded"


# peers that do not take anything


def test_rows_for_a_detokenizer_that_is_away_become_fewer_and_longer(world_of: WorldOf) -> None:
    world = world_of(workers=1, detokenizers=1)
    one = ask(world, tokens=40)
    world.flow(3)
    world.kill(Role.DETOKENIZER, 0)
    world.flow(20)
    before = scheduler(world)._child.slot[SlotWord.ROWS_OUT]
    world.start(Role.DETOKENIZER, 0)
    world.flow(2)
    assert scheduler(world)._child.slot[SlotWord.ROWS_OUT] - before <= 3
    world.flow(60)
    one.sink.check_complete()


def test_a_worker_that_takes_nothing_delays_nobody_and_then_gets_everything(world_of: WorldOf) -> None:
    """Cases 16 and 28."""
    world = world_of()
    stopped, others = ask(world, 0, tokens=60), [ask(world, 1, tokens=20) for _ in range(4)]
    world.flow(2)
    inward = [link for link in world.network.links.values() if link.address.endswith("/w0.1")]
    assert inward
    for link in inward:
        link.blocked = True
    life = world.current.pop((Role.TOKENIZER_WORKER, 0))
    world.flow(25)
    check_all(others)
    assert stopped.sink.finish is None
    world.current[Role.TOKENIZER_WORKER, 0] = life
    for link in inward:
        link.blocked = False
    world.flow(80)
    stopped.sink.check_complete()


# messages that are wrong cost themselves only


def malformed_for_scheduler() -> list[Any]:
    life = make_life(0, 1)
    good = TokenizedGenerateReqInput(
        key=make_key(life, 900),
        attempt=1,
        rid="bad",
        group=1,
        input_ids=b"",
        sampling=SamplingParams(max_new_tokens=1),
        text=TextSpec(),
    )
    lists = LiveRequestsReq(life=life, number=10**6, up_to_counter=0, keys=b"", attempts=b"", offsets=b"")
    return [
        msgspec.structs.replace(good, prefix_ids=b"123"),
        msgspec.structs.replace(good, input_ids=b"12345"),
        msgspec.structs.replace(lists, keys=b"1234567"),
        msgspec.structs.replace(lists, keys=pack("Q", [1]), attempts=pack("I", [1, 2])),
        HeldTextsReq(keys=b"123"),
    ]


@pytest.mark.parametrize("number", range(5))
def test_an_inconsistent_message_costs_itself_only(world_of: WorldOf, number: int) -> None:
    world = world_of()
    one = ask(world, tokens=10)
    world.flow(2)
    put(world, world.current[Role.SCHEDULER, 0], malformed_for_scheduler()[number])
    world.flow(20)
    one.sink.check_complete()
    assert world.counter(SlotWord.UNDECODABLE) == 1
    assert any("inconsistent" in line for line in scheduler(world)._child.logged)
    world.flow(60)
    assert scheduler(world)._book.ledger.records == {}


def test_numbers_that_fit_no_column_are_refused_where_they_come_in(world_of: WorldOf) -> None:
    world = world_of()
    good = malformed_for_scheduler()[0]
    fields = {name: getattr(good, name) for name in good.__struct_fields__} | {"prefix_ids": b""}
    writer = FrameWriter(world.current[Role.SCHEDULER, 0].child.instance_id, Role.TOKENIZER_WORKER, 0, 1)
    for wrong in ({"key": -1}, {"attempt": -1}, {"attempt": 2**32}, {"group": -5}):
        put_raw(world, world.current[Role.SCHEDULER, 0], bytes(writer.frame(1, Scope.SCHEDULER, fields | wrong)))
    world.flow(3)
    assert world.counter(SlotWord.UNDECODABLE) == 4
    assert scheduler(world)._book.ledger.records == {}


def test_keys_of_lives_that_cannot_be_and_keys_nobody_knows_change_nothing(world_of: WorldOf) -> None:
    world = world_of()
    one = ask(world, tokens=10)
    far = 2**32 - 1
    good = msgspec.structs.replace(malformed_for_scheduler()[0], prefix_ids=b"", key=2**64 - 1)
    for message in (
        good,
        LiveRequestsReq(
            life=far, number=1, up_to_counter=9, keys=pack("Q", [1]), attempts=pack("I", [1]), offsets=pack("I", [0])
        ),
        AbortReq(keys=[-1, 2**64 - 1]),
        ResumeReq(requests=[(-1, -1), (2**64 - 1, 5)]),
        HeldTextsReq(keys=pack("Q", [2**64 - 1, 0])),
    ):
        put(world, world.current[Role.SCHEDULER, 0], message)
    world.flow(20)
    one.sink.check_complete()
    assert world.counter(SlotWord.UNDECODABLE) == 0


def test_a_message_for_somebody_else_is_counted_as_unroutable(world_of: WorldOf) -> None:
    world = world_of()
    unknown = UnknownRequests(requests=[])
    put(world, world.current[Role.SCHEDULER, 0], unknown)
    put(world, world.current[Role.DETOKENIZER, 0], AbortReq(), scope=Scope.PEER)
    put(world, world.current[Role.ROUTER, 0], unknown, scope=Scope.PEER)
    put(world, worker(world), AbortReq())
    world.flow(2)
    assert world.counter(SlotWord.UNROUTABLE) == 4


@pytest.mark.parametrize(("index", "generation"), [(0, 0), (5000, 1), (65535, 2**32 - 1), (0, 2**31)])
@pytest.mark.parametrize("role", [Role.ROUTER, Role.DETOKENIZER])
def test_a_reply_for_a_worker_that_cannot_be_is_unroutable(
    world_of: WorldOf, role: Role, index: int, generation: int
) -> None:
    world = world_of()
    one = ask(world, tokens=5)
    put(world, world.current[role, 0], UnknownRequests(requests=[]), index=index, generation=generation)
    world.flow(12)
    assert world.counter(SlotWord.UNROUTABLE) == 1
    one.sink.check_complete()


def test_rows_for_a_life_that_cannot_be_are_unroutable(world_of: WorldOf) -> None:
    world = world_of()
    row = BatchTokenIDOutput(
        keys=pack("Q", [make_key(make_life(3, 0), 1)]),
        attempts=pack("I", [1]),
        offsets=pack("I", [0]),
        output_ids=pack_ragged("I", [[1]]),
        text_specs={0: TextSpec()},
    )
    put(world, world.current[Role.DETOKENIZER, 0], row)
    world.flow(2)
    assert world.counter(SlotWord.UNROUTABLE) == 1


@pytest.mark.parametrize("mode", ["multi", "single"])
def test_a_malformed_batch_costs_itself_only(world_of: WorldOf, mode: str) -> None:
    one_of_each = 1 if mode == "single" else 2
    world = world_of(workers=one_of_each, detokenizers=one_of_each)
    one = ask(world, tokens=10)
    world.flow(2)
    keys = pack("Q", [make_key(make_life(0, 1), 900), make_key(make_life(1, 1), 900)])
    columns = {"attempts": pack("I", [1, 1]), "offsets": pack("I", [0, 0]), "output_ids": pack_ragged("I", [[1], [2]])}
    wrong: list[Any] = [
        BatchTokenIDOutput(**columns, keys=keys[:-1]),
        BatchTokenIDOutput(**{**columns, "attempts": pack("I", [1])}, keys=keys),
        BatchTokenIDOutput(**{**columns, "offsets": b"abcde"}, keys=keys),
        BatchTokenIDOutput(**{**columns, "output_ids": RaggedColumn(pack("I", [9, 9]), b"1234")}, keys=keys),
        BatchTokenIDOutput(**columns, keys=keys, finish_reasons={5: FinishReason(kind="stop")}),
        BatchTokenIDOutput(**columns, keys=keys, rids=["only one"]),
        BatchEmbeddingOutput(keys=keys, attempts=pack("I", [1]), embeddings=pack_ragged("f", [[1.0], [2.0]])),
    ]
    for message in wrong:
        put(world, world.current[Role.DETOKENIZER, 0], message)
    world.flow(20)
    assert world.current[Role.DETOKENIZER, 0].child.slot[SlotWord.UNDECODABLE] == len(wrong)
    one.sink.check_complete()


def test_a_malformed_batch_is_refused_by_a_worker_before_any_row_is_delivered(world_of: WorldOf) -> None:
    world = world_of()
    one = ask(world, tokens=10)
    world.flow(1)
    frontend = worker(world).machine.frontend
    row = BatchStrOutput(
        keys=pack("Q", [one.key]),
        attempts=pack("I", [1]),
        offsets=pack("I", [0, 1]),
        text_offsets=pack("I", [0]),
        output_ids=pack_ragged("I", [[1]]),
        texts=["x"],
    )
    with pytest.raises(ValueError, match="offsets has 2 rows"):
        frontend.take_batch(row)
    assert (one.request.tokens, one.sink.ids) == (0, [])


def test_frames_of_another_instance_or_of_noise_are_refused_and_logged_once(world_of: WorldOf) -> None:
    world = world_of()
    foreign = FrameWriter(1, Role.ROUTER, 0, 1)
    for life in world.lives():
        address = life.child.transport.addresses[0]
        for frame in (
            b"",
            b"noise",
            bytes(foreign.frame(3, Scope.SCHEDULER, AbortReq())),
            b"\xff" * 100,
            b"\xff" * 100,
        ):
            world.network.inboxes[address].append(frame)
    world.flow(2)
    lives = list(world.lives())
    assert all(
        life.child.slot[SlotWord.UNDECODABLE] == 5 for life in lives if life.child.role is not Role.TOKENIZER_WORKER
    )
    assert all(len(life.child.logged) == 3 for life in lives)  # short, instance, version


# leftovers


def test_state_whose_forgetting_was_lost_is_found_and_dropped(world_of: WorldOf) -> None:
    world = world_of(workers=1, detokenizers=1)
    texts = world.current[Role.DETOKENIZER, 0].machine._texts
    one = ask(world, tokens=100)
    world.flow(3)
    worker(world).machine.frontend.cancel([one.request])
    one.sink.gone = True
    world.network.deliver_all()
    scheduler(world).turn(True)
    for link in world.network.busy():
        link.frames.clear()
    world.flow(2)
    assert texts.held() == [one.key]
    world.flow(30, step_s=0.25)
    assert texts.held() == []


def test_a_request_whose_abort_was_lost_is_ended_by_the_next_list(world_of: WorldOf) -> None:
    world = world_of(workers=1, detokenizers=1)
    one = ask(world, tokens=400)
    world.flow(3)
    worker(world).machine.frontend.cancel([one.request])
    one.sink.gone = True
    for link in world.network.busy():
        link.frames.clear()
    world.flow(3)
    assert scheduler(world)._book.running
    world.flow(60)
    assert scheduler(world)._book.running == {}


def test_a_request_whose_abort_and_last_list_were_lost_is_ended_because_its_rows_come_late(world_of: WorldOf) -> None:
    world = world_of(workers=1, detokenizers=1)
    one = ask(world, tokens=400)
    world.flow(3)
    worker(world).machine.frontend.cancel([one.request])
    one.sink.gone = True
    world.clock.now_s += 1.1
    worker(world).machine.turn(True)
    for link in world.network.busy():
        link.frames.clear()
    world.flow(int(1.2 / STEP_S))
    assert scheduler(world)._book.running == {}
    assert world.counter(SlotWord.LATE_ROWS) > 0


def test_the_wait_for_an_engine_that_is_away_begins_when_it_went(world_of: WorldOf) -> None:
    world = world_of(max_running_requests=1)
    running, queued = ask(world, tokens=400), ask(world, tokens=400)
    world.flow(3)
    frontend = worker(world).machine.frontend
    world.clock.now_s += 100.0  # in the queue, behind another
    away_since_s = world.clock.now_s
    away = FinishReason(kind="abort", status=503, code="engine_away")
    late = ask(world, tokens=5)
    frontend.fail_waiting(10.0, away_since_s, away)
    world.clock.now_s += 9.9
    frontend.fail_waiting(10.0, away_since_s, away)
    assert [one.sink.finish for one in (running, queued, late)] == [None, None, None]
    world.clock.now_s += 0.2
    frontend.fail_waiting(10.0, away_since_s, away)
    assert running.sink.finish is None
    assert [one.sink.finish.code for one in (queued, late) if one.sink.finish is not None] == ["engine_away"] * 2


@pytest.mark.parametrize("word", ["exact", "approximate", "refused"])
def test_continuing_is_counted_once_or_refused_as_the_engine_declares(world_of: WorldOf, word: str) -> None:
    world = world_of()
    drawn = SamplingParams(max_new_tokens=30, temperature=0.7)
    greedy = ask(world, sampling=SamplingParams(max_new_tokens=30, temperature=0.0))
    interrupted = [ask(world, n, sampling=drawn) for n in range(2)]
    world.flow(5)
    world.kill(Role.SCHEDULER, 0)
    world.start(Role.SCHEDULER, 0)
    scheduler(world)._book._capabilities = {**scheduler(world)._book._capabilities, "continue.sampled": word}
    new = ask(world, 1, sampling=drawn)
    world.flow(60)
    check_all([greedy, new])
    assert world.counter(SlotWord.APPROXIMATE_RESUMES) == {"exact": 0, "approximate": 2, "refused": 0}[word]
    if word != "refused":
        check_all(interrupted)
        return
    for one in interrupted:
        assert one.sink.finish is not None
        assert (one.sink.finish.kind, one.sink.finish.status) == ("error", 500)
        assert one.sink.finish.code == "cannot_continue"
        assert "continue.sampled" in str(one.sink.finish.message)
    assert scheduler(world)._book.ledger.records == {}


def test_what_a_pause_took_out_and_cannot_be_continued_ends_with_an_error(world_of: WorldOf) -> None:
    world = world_of()
    one = ask(world, tokens=30)
    world.flow(5)
    book = scheduler(world)._book
    book._capabilities = {**book._capabilities, "continue.sampled": "refused"}
    change(world, paused=True, pause_mode="retract")
    fresh = ask(world, tokens=5)
    change(world, paused=False)
    world.flow(20)
    assert one.sink.finish is not None
    assert one.sink.finish.code == "cannot_continue"
    check_all([fresh])
