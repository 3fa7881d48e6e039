"""A scheduler that takes over says truthfully what does not continue yet; nothing pays for a death after that."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglmt.ipc.state_page import HeaderWord, Phase, SlotWord
from sglmt.messages.frame import Role
from sglmt.server_args import ServerArgs
from sglmt.status.recovery import recovering_reason
from sglmt.workers.engine_control import MARKERS_WITHIN_S
from tests.unit.workers.asking import Asked, ask, worker
from tests.unit.workers.wired import World

WorldOf = Callable[..., World]
ENOUGH_ROUNDS = 400


def scheduler(world: World) -> Any:
    return world.current[Role.SCHEDULER, 0]


def left(world: World) -> int:
    """What the state page says."""
    return int(scheduler(world).child.slot[SlotWord.RECOVERING])


def reason(world: World) -> str | None:
    return recovering_reason(scheduler(world).child.slot)


def take_over(world: World) -> None:
    """kill -9, and a new life."""
    world.kill(Role.SCHEDULER, 0)
    world.start(Role.SCHEDULER, 0)


def recover(world: World) -> None:
    """Undisturbed time until the scheduler says that everything continues."""
    for _ in range(ENOUGH_ROUNDS):
        if not left(world):
            return
        world.flow(1)
    raise AssertionError(f"still recovering: {reason(world)}")


def test_a_first_life_recovers_nothing(world_of: WorldOf) -> None:
    world = world_of()
    ask(world, tokens=30)
    for _ in range(20):
        assert left(world) == 0
        world.flow(1)
    assert reason(world) is None


def test_a_life_that_takes_over_says_so_before_its_first_turn(world_of: WorldOf) -> None:
    world = world_of()
    ask(world, tokens=30)
    world.flow(3)
    take_over(world)
    assert left(world) == 2
    assert reason(world) == "after the engine's death: 2 workers have to say what runs"


def test_it_is_over_when_every_worker_has_a_new_token_of_every_request(world_of: WorldOf) -> None:
    world = world_of()
    asked = [ask(world, n % 2, tokens=60, prompt=1 + n % 12) for n in range(6)]
    world.flow(5)
    before = [one.request.tokens for one in asked]
    take_over(world)
    reasons = set()
    while left(world):
        reasons.add(reason(world))
        world.flow(1)
    assert "after the engine's death: 6 requests continue" in reasons
    for one, tokens in zip(asked, before, strict=True):
        assert one.request.tokens > tokens
        assert one.request.attempt == 2
    for _ in range(10):
        world.flow(1)
        assert left(world) == 0


def test_rows_that_reach_no_worker_do_not_count(world_of: WorldOf) -> None:
    """The engine gives tokens, the detokenizer is away: a death now would bring the request nothing."""
    world = world_of(workers=1, router="always", detokenizers=1)
    one = ask(world, tokens=200)
    world.flow(5)
    world.kill(Role.DETOKENIZER, 0)
    take_over(world)
    world.flow(40)
    assert len(scheduler(world).machine._book.ledger.records[one.key].output_ids) > one.request.tokens
    assert left(world) == 1
    world.start(Role.DETOKENIZER, 0)
    recover(world)
    assert one.request.tokens > 5


def test_workers_without_requests_are_heard_at_once_even_when_a_list_is_lost(world_of: WorldOf) -> None:
    world = world_of()
    world.flow(20)
    take_over(world)
    world.flow(1)
    for link in world.network.busy():
        link.frames.clear()
    before_s = world.clock.now_s
    recover(world)
    assert world.clock.now_s - before_s < 0.5


def test_idle_workers_send_no_more_lists_than_before_once_it_is_over(world_of: WorldOf) -> None:
    world = world_of()
    world.flow(20)
    take_over(world)
    recover(world)
    world.flow(3)
    before = worker(world).child.slot[SlotWord.MESSAGES_OUT]
    world.flow(100)
    assert worker(world).child.slot[SlotWord.MESSAGES_OUT] == before


def test_a_ready_instance_asks_for_no_lists(world_of: WorldOf) -> None:
    world = world_of()
    world.flow(20)
    take_over(world)
    world.page.set_header(HeaderWord.READY, 1)
    world.flow(100)
    assert left(world) == 2  # nobody looked: nobody was asked
    world.page.set_header(HeaderWord.READY, 0)
    recover(world)


@pytest.mark.parametrize("is_reaped", [False, True])
def test_a_worker_that_hangs_is_waited_for_until_it_is_ended(world_of: WorldOf, is_reaped: bool) -> None:
    world = world_of()
    lost, kept = ask(world, 0, tokens=400), ask(world, 1, tokens=400)
    world.flow(5)
    hanging = world.current.pop((Role.TOKENIZER_WORKER, 0))
    lost.sink.gone = True
    take_over(world)
    if is_reaped:
        world.reap(hanging)
        recover(world)
        assert kept.request.attempt == 2
        return
    world.flow(50)
    assert reason(world) == "after the engine's death: 1 worker has to say what runs"
    world.reap(hanging)
    recover(world)


def test_a_worker_that_dies_with_requests_on_the_way_is_not_waited_for(world_of: WorldOf) -> None:
    world = world_of()
    lost = ask(world, 0, tokens=400)
    world.flow(5)
    world.kill(Role.DETOKENIZER, 0)
    world.kill(Role.DETOKENIZER, 1)  # nothing comes through any more
    take_over(world)
    world.flow(20)
    assert left(world) == 1
    lost.sink.gone = True
    world.kill(Role.TOKENIZER_WORKER, 0)
    recover(world)


def test_a_client_that_leaves_is_not_waited_for(world_of: WorldOf) -> None:
    world = world_of(detokenizers=1)
    one = ask(world, tokens=400)
    world.flow(5)
    world.kill(Role.DETOKENIZER, 0)
    take_over(world)
    world.flow(20)
    assert left(world) == 1
    worker(world).machine.frontend.cancel([one.request])
    one.sink.gone = True
    recover(world)


def test_workers_that_start_meanwhile_have_nothing_to_say(world_of: WorldOf) -> None:
    world = world_of()
    world.flow(3)
    for life in (worker(world, 0), worker(world, 1)):
        life.child.slot.enter(Phase.LOADING)
    take_over(world)
    assert left(world) == 0


def test_what_only_waits_for_its_turn_does_not_count(world_of: WorldOf) -> None:
    """A long queue is no recovery: it waits now as it did before."""
    world = world_of(max_running_requests=2)
    asked = [ask(world, n % 2, tokens=60, prompt=1 + n % 12) for n in range(8)]
    world.flow(6)
    take_over(world)
    recover(world)
    assert len(scheduler(world).machine._book.queue) == 6
    assert sum(one.request.tokens > 0 for one in asked) == 2


def test_while_paused_nothing_moves_and_nothing_is_waited_for(world_of: WorldOf) -> None:
    world = world_of()
    asked = [ask(world, n % 2, tokens=60, prompt=1 + n % 12) for n in range(4)]
    world.flow(5)
    world.change_control(paused=True, pause_mode="retract")
    world.flow(1)
    world.clock.now_s += MARKERS_WITHIN_S
    world.flow(2)
    take_over(world)
    recover(world)
    assert len(scheduler(world).machine._book.queue) == 4
    world.change_control(paused=False)
    world.flow(1)
    world.clock.now_s += MARKERS_WITHIN_S
    world.flow(1)
    assert left(world) == 4
    recover(world)
    world.flow(80)
    for one in asked:
        one.sink.check_complete()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    counts=st.lists(st.integers(0, 5), min_size=3, max_size=8),
    extra_deaths=st.lists(st.booleans(), min_size=8, max_size=8),
    data=st.data(),
)
def test_deaths_after_recovery_cost_no_request_anything(
    counts: list[int], extra_deaths: list[bool], data: st.DataObject
) -> None:
    """With one resubmission allowed: however often the scheduler is killed, inside the engine or out of it, and
    detokenizers with it, as long as each time it says first that everything continues."""
    with tempfile.TemporaryDirectory() as directory:
        args = ServerArgs(workers=2, detokenizers=2, engine="simulator", max_resubmits=1)
        with closing(World(Path(directory), args)) as world:
            die_after_each_recovery(world, counts, extra_deaths, data)


def die_after_each_recovery(world: World, counts: list[int], extra_deaths: list[bool], data: st.DataObject) -> None:
    asked: list[Asked] = []
    for turn, count in enumerate(counts):
        asked += [ask(world, n % 2, tokens=120, prompt=1 + (turn + n) % 12) for n in range(count)]
        world.flow(data.draw(st.integers(0, 6)))
        if extra_deaths[turn]:
            place = (Role.DETOKENIZER, turn % 2)
            world.kill(*place)
            world.flow(data.draw(st.integers(0, 30)))
            world.start(*place)
        recover(world)
        book = scheduler(world).machine._book
        if data.draw(st.booleans()) and book.unmoved:  # as when the engine dies inside its step
            inside = book.suspects.inside_engine(book.unmoved, on_trial=book.trial is not None)
            inside.__enter__()
        take_over(world)
    world.flow(ENOUGH_ROUNDS)
    for one in asked:
        one.sink.check_complete()


def test_suspects_are_waited_for_one_after_the_other(world_of: WorldOf) -> None:
    world = world_of()
    asked = [ask(world, n % 2, tokens=30, prompt=1 + n) for n in range(4)]
    world.flow(1, step_s=0.001)
    book = scheduler(world).machine._book
    assert len(book.unmoved) == 4
    book.suspects.inside_engine(book.unmoved, on_trial=False).__enter__()  # the engine dies inside its step
    take_over(world)
    scheduler(world).child.args = msgspec.structs.replace(world.args, max_running_requests=1)
    recover(world)
    assert [one.request.tokens > 0 for one in asked] == [True] * 4
    assert scheduler(world).machine._book.suspects.suspects == set()
