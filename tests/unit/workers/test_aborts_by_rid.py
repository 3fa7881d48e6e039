"""`/abort_request` behind HTTP: whatever frame is lost, it is carried out once, and the answer is true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sglmt.delivery.aborts import REPEAT_AFTER_S
from sglmt.ipc.state_page import SlotWord
from sglmt.messages.frame import Role, read_prefix
from sglmt.messages.registry import kind_of
from sglmt.messages.to_worker import AbortsDone
from sglmt.workers.frontend import ABORT_WITHIN_S
from tests.unit.workers.asking import Asked, ask, worker
from tests.unit.workers.wired import INSTANCE, STEP_S, World

WorldOf = Callable[..., World]
MODES: list[dict[str, Any]] = [{}, {"workers": 1, "detokenizers": 1}]


def scheduler(world: World) -> Any:
    return world.current[Role.SCHEDULER, 0].machine


def abort(world: World, rid: str | None, index: int = 0) -> list[bool]:
    """Asked for through a worker, None: all; the list fills with the answer."""
    answers: list[bool] = []
    worker(world, index).machine.frontend.abort_by_rid(rid, rid is None, answers.append)
    return answers


def rounds_of(seconds: float) -> int:
    return int(seconds / STEP_S) + 3


def lose(world: World, source: str, address: str) -> int:
    """Everything under way between two processes is lost; how many frames that were."""
    lost = 0
    for link in world.network.busy():
        if link.source.startswith(source) and link.address.rpartition("/")[2].startswith(address):
            lost += len(link.frames)
            link.frames.clear()
    return lost


def flow_without_answers(world: World) -> None:
    """A round in which every answer to an abort is lost, and nothing else."""
    answer = kind_of(AbortsDone(numbers=[]))
    world.clock.now_s += STEP_S
    for role in (Role.TOKENIZER_WORKER, Role.ROUTER, Role.SCHEDULER, Role.DETOKENIZER, Role.TOKENIZER_WORKER):
        for link in world.network.busy():
            kept = [frame for frame in link.frames if read_prefix(frame, INSTANCE).kind != answer]
            link.frames.clear()
            link.frames.extend(kept)
        world.network.deliver_all()
        for life in [life for life in world.lives() if life.child.role is role]:
            life.machine.turn(True)


def code(one: Asked) -> str | None:
    return one.sink.finish.code if one.sink.finish is not None else None


@pytest.mark.parametrize("options", MODES)
def test_an_abort_is_answered_when_it_is_carried_out(world_of: WorldOf, options: dict[str, Any]) -> None:
    world = world_of(**options)
    one, other = ask(world, tokens=400, rid="x"), ask(world, tokens=400)
    world.flow(3)
    answers = abort(world, "x", world.args.workers - 1)
    world.flow(2)
    assert answers == [True]
    assert (code(one), code(other)) == ("aborted", None)
    assert abort(world, "nobody") == []
    everything = abort(world, None)
    world.flow(2)
    assert everything == [True]
    assert code(other) == "aborted"
    assert scheduler(world)._book.running == {}


@pytest.mark.parametrize("options", MODES)
def test_an_abort_that_is_lost_is_repeated(world_of: WorldOf, options: dict[str, Any]) -> None:
    world = world_of(**options)
    one = ask(world, tokens=400, rid="x")
    world.flow(3)
    answers = abort(world, "x")
    assert lose(world, "tokenizer_worker", "") == 1
    world.flow(3)
    assert (answers, code(one)) == ([], None)
    world.flow(rounds_of(REPEAT_AFTER_S))
    assert (answers, code(one)) == ([True], "aborted")


@pytest.mark.parametrize("options", MODES)
def test_a_repeated_abort_does_not_end_who_has_the_rid_now(world_of: WorldOf, options: dict[str, Any]) -> None:
    world = world_of(**options)
    first = ask(world, tokens=400, rid="x")
    world.flow(3)
    answers = abort(world, "x")
    while code(first) is None:
        flow_without_answers(world)
    second = ask(world, tokens=60, rid="x")
    asked_again = worker(world).child.slot[SlotWord.MESSAGES_OUT]
    world.flow(rounds_of(REPEAT_AFTER_S))
    assert answers == [True]
    assert worker(world).child.slot[SlotWord.MESSAGES_OUT] > asked_again
    world.flow(80)
    second.sink.check_complete()


def test_an_abort_is_given_up_when_nobody_answers_and_then_never_carried_out(world_of: WorldOf) -> None:
    world = world_of()
    one = ask(world, tokens=60, rid="x")
    world.flow(3)
    world.kill(Role.ROUTER, 0)
    answers = abort(world, "x")
    world.flow(rounds_of(ABORT_WITHIN_S), step_s=STEP_S)
    assert answers == [False]
    world.start(Role.ROUTER, 0)
    world.flow(100)
    one.sink.check_complete()
    assert answers == [False]


@pytest.mark.parametrize("place", [(Role.ROUTER, 0), (Role.SCHEDULER, 0), (Role.DETOKENIZER, 0)])
@pytest.mark.parametrize("hops", [0, 1, 2, 3])
def test_an_abort_survives_the_death_of_any_process_on_its_way(
    world_of: WorldOf, place: tuple[Role, int], hops: int
) -> None:
    world = world_of()
    asked = [ask(world, n % 2, tokens=400, rid="x" if n == 2 else f"r{n}") for n in range(6)]
    world.flow(3)
    answers = abort(world, "x", 1)
    for hop in range(hops):
        world.network.deliver_all()
        role = (Role.ROUTER, Role.SCHEDULER, Role.ROUTER)[hop]
        world.current[role, 0].machine.turn(True)
    world.kill(*place)
    world.flow(5)
    world.start(*place)
    world.flow(rounds_of(3 * REPEAT_AFTER_S))
    assert answers == [True]
    assert [code(one) for one in asked] == [None, None, "aborted", None, None, None]
    assert scheduler(world)._book.standing == []
    world.flow(100)
    assert len(scheduler(world)._book.running) == 5


@pytest.mark.parametrize("rid", ["x", None])
def test_a_scheduler_that_does_not_know_all_requests_yet_answers_later(world_of: WorldOf, rid: str | None) -> None:
    """The abort is there before the request it names has been submitted again, from a worker that is slow."""
    world = world_of()
    one = ask(world, 0, tokens=400, rid="x")
    world.flow(3)
    slow = world.current.pop((Role.TOKENIZER_WORKER, 0))
    world.kill(Role.SCHEDULER, 0)
    world.start(Role.SCHEDULER, 0)
    answers = abort(world, rid, 1)
    world.flow(30)
    assert answers == []
    late = ask(world, 1, tokens=10)  # came after the abort
    world.flow(2)
    assert code(late) is None
    world.current[Role.TOKENIZER_WORKER, 0] = slow
    world.flow(rounds_of(1.0))
    assert (answers, code(one)) == ([True], "aborted")
    late.sink.check_complete()
    assert scheduler(world)._book.standing == []


def test_what_is_kept_of_aborts_goes_with_their_worker(world_of: WorldOf) -> None:
    world = world_of()
    for _ in range(50):
        abort(world, "nobody", 1)
        world.flow(1)
    world.flow(2)
    seen = scheduler(world)._aborts._seen
    assert sum(map(len, seen._seen.values())) <= 3
    world.kill(Role.TOKENIZER_WORKER, 1)
    world.flow(3)
    assert seen.lives() == []


def test_an_abort_of_a_dead_worker_changes_nothing(world_of: WorldOf) -> None:
    world = world_of()
    one = ask(world, 0, tokens=20, rid="x")
    world.flow(3)
    abort(world, "x", 1)
    world.kill(Role.TOKENIZER_WORKER, 1)
    world.flow(60)
    one.sink.check_complete()
    assert world.counter(SlotWord.UNROUTABLE) == 0
