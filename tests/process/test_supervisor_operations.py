"""A supervisor with fake children is scaled, rolled, reloaded and drained: what becomes of each process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from sglmt.errors import ExitCode
from sglmt.ipc.shared_memory import read_arguments
from sglmt.ipc.state_page import UNTIL_STOPPED_NS, HeaderWord, SlotWord
from sglmt.messages.frame import Role
from sglmt.server_args import ServerArgs
from sglmt.supervisor.lifecycle import State
from sglmt.supervisor.operations import Operation, OperationError
from tests.support.supervised import RESOLVER, Supervised, supervised

MakeArgs = Callable[..., ServerArgs]
WORKER = Role.TOKENIZER_WORKER


@pytest.fixture
def make_args(tmp_path_factory: pytest.TempPathFactory) -> MakeArgs:
    base = tmp_path_factory.mktemp("r")

    def make(**options: Any) -> ServerArgs:
        return ServerArgs(**({"workers": 2, "port": 0, "name": "t", "runtime_dir": str(base)} | options))

    return make


async def ready(running: Supervised) -> None:
    await running.until(lambda: running.ready, 20, "the instance is ready")


async def done(running: Supervised, operation: Operation, within_s: float = 20) -> str | None:
    """Its error."""
    await running.until(lambda: operation.done, within_s, operation.what)
    return operation.error


def pids(running: Supervised) -> dict[str, int | None]:
    return {process.name: process.life.pid for process in running.supervisor.crew.workers()}


def wanted(running: Supervised) -> tuple[int, int]:
    """Workers wanted: as the snapshot and as the state page says."""
    header = running.supervisor.resources.page.header(HeaderWord.WORKERS_REQUESTED)
    return running.supervisor.snapshot().workers.requested, header


def test_scale_up_and_down_and_at_once(make_args: MakeArgs) -> None:
    async def scenario() -> None:
        async with supervised(make_args()) as running:
            await ready(running)
            live = running.supervisor.live
            assert await done(running, live.scale(5)) is None
            assert wanted(running) == (5, 5)
            assert len(pids(running)) == 5
            kept = pids(running)["tokenizer_worker:0"]
            first, second = live.scale(1), live.scale(3)  # the later one takes over
            assert await done(running, second) is None
            assert first.done
            assert sorted(pids(running)) == [f"tokenizer_worker:{index}" for index in range(3)]
            assert pids(running)["tokenizer_worker:0"] == kept
            assert wanted(running) == (3, 3)
            assert await done(running, live.scale(3)) is None
            assert running.supervisor.snapshot().state == "running"
            assert running.supervisor.crew.leaving_workers() == []

    asyncio.run(scenario())


def test_an_index_that_comes_back_goes_on_behind_its_old_generations(make_args: MakeArgs) -> None:
    async def scenario() -> None:
        async with supervised(make_args(), {"tokenizer_worker:1": {"until": 1, "ignore_term": True}}) as running:
            await ready(running)
            live = running.supervisor.live
            running.supervisor.args = msgspec.structs.replace(running.supervisor.args, drain_timeout=1.0)
            running.supervisor.crew.adopt(running.supervisor.args)
            live.scale(1)
            await running.until(lambda: running.supervisor.crew.leaving_workers(), 5, "it leaves, slowly")
            leaving = running.supervisor.crew.leaving_workers()[0]
            assert leaving.run is not None
            assert leaving.run.slot[SlotWord.DRAIN_DEADLINE_NS] > 0
            live.scale(2)
            await running.until(lambda: running.generation(WORKER, 1) == 2, 10, "the new life is published")
            assert running.supervisor.resources.page.live(WORKER) >= {(1, 1), (1, 2)}
            await running.until(lambda: not running.supervisor.crew.leaving_workers(), 15, "the old one is gone")
            assert running.said("did not finish by the drain deadline")
            assert running.generation(WORKER, 1) == 2

    asyncio.run(scenario())


def test_a_roll_replaces_each_worker_after_its_successor_serves(make_args: MakeArgs) -> None:
    async def scenario() -> None:
        async with supervised(make_args(workers=3)) as running:
            await ready(running)
            before = pids(running)
            lives: list[int] = []
            serving: list[int] = []

            def look() -> bool:
                lives.append(len(running.supervisor.resources.page.live(WORKER)))
                serving.append(running.supervisor.snapshot().workers.ready)
                return operation.done

            operation = running.supervisor.live.restart("tokenizer_worker")
            await running.until(look, 20, "the roll")
            assert operation.error is None
            assert (max(lives), min(serving)) == (4, 3)  # one more at most, none fewer ever
            assert not set(before.values()) & set(pids(running).values())
            assert all(process.life.generation == 2 for process in running.supervisor.crew.workers())

    asyncio.run(scenario())


def test_the_first_failure_ends_a_roll_and_the_old_one_stays(make_args: MakeArgs) -> None:
    plan = {"tokenizer_worker:1": {"since": 2, "start": "failed:bad tokenizer"}}

    async def scenario() -> None:
        async with supervised(make_args(workers=3), plan) as running:
            await ready(running)
            before = pids(running)
            error = await done(running, running.supervisor.live.restart("tokenizer_worker"))
            assert error is not None
            assert "tokenizer_worker:1: its replacement failed" in error
            assert "bad tokenizer" in error
            assert "the old one stays" in error
            after = pids(running)
            assert after["tokenizer_worker:0"] != before["tokenizer_worker:0"]
            assert [after[f"tokenizer_worker:{i}"] for i in (1, 2)] == [before[f"tokenizer_worker:{i}"] for i in (1, 2)]
            await running.until(lambda: not running.supervisor.crew.leaving_workers(), 5, "the failed one is gone")
            assert running.generation(WORKER, 1) == 1
            assert running.supervisor.snapshot().state == "running"

    asyncio.run(scenario())


def test_a_worker_that_dies_while_its_successor_boots_comes_back_under_another_generation(
    make_args: MakeArgs,
) -> None:
    async def scenario() -> None:
        async with supervised(
            make_args(start_timeout=4.0), {"tokenizer_worker:0": {"since": 2, "until": 2, "start": "hang"}}
        ) as running:
            await ready(running)
            operation = running.supervisor.live.restart("tokenizer_worker:0")
            old = running.process("tokenizer_worker:0")
            await running.until(lambda: running.generation(WORKER, 0) == 2, 5, "the successor boots")
            assert old.life.pid is not None
            os.kill(old.life.pid, signal.SIGKILL)
            await running.until(lambda: old.serves and old.life.generation == 3, 10, "it is back")
            error = await done(running, operation)
            assert error is not None
            assert "not ready after 4 s" in error
            await running.until(lambda: running.generation(WORKER, 0) == 3, 5, "the life that is left is published")
            assert old.serves

    asyncio.run(scenario())


@pytest.mark.parametrize("role", ["scheduler", "router", "detokenizer"])
def test_processes_that_exist_once_are_restarted_in_place(make_args: MakeArgs, role: str) -> None:
    async def scenario() -> None:
        async with supervised(make_args()) as running:
            await ready(running)
            before = {process.name: process.life.pid for process in running.supervisor.crew.everybody()}
            assert await done(running, running.supervisor.live.restart(role)) is None
            after = {process.name: process.life.pid for process in running.supervisor.crew.everybody()}
            assert [name.partition(":")[0] for name in before if before[name] != after[name]] == [role]
            assert all(process.life.restarts == 0 for process in running.supervisor.crew.everybody())

    asyncio.run(scenario())


def test_a_restart_that_fails_says_why(make_args: MakeArgs) -> None:
    async def scenario() -> None:
        plan = {"router": {"since": 2, "until": 2, "start": "failed:no more sockets"}}
        async with supervised(make_args(), plan) as running:
            await ready(running)
            error = await done(running, running.supervisor.live.restart("all"))
            assert error is not None
            assert error.startswith("router: failed after its restart")
            assert "no more sockets" in error
            await running.until(
                lambda: running.supervisor.snapshot().state == "running", 10, "its policy brings it back"
            )
            assert running.process("tokenizer_worker:0").life.generation == 1  # nothing after it was touched

    asyncio.run(scenario())


def test_every_signal_of_a_burst_counts_and_the_sum_stays_within_limits(make_args: MakeArgs) -> None:
    async def scenario() -> None:
        async with supervised(make_args()) as running:
            await ready(running)
            supervisor = running.supervisor
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTTIN)
            await running.until(lambda: supervisor.snapshot().workers.ready == 5, 20, "three more")
            for _ in range(50):
                os.kill(os.getpid(), signal.SIGTTOU)  # to ourselves: delivered before kill returns
            await running.until(lambda: wanted(running) == (1, 1) and supervisor.operations.idle, 20, "one is left")
            assert running.said("5-50 workers is outside 1 to 128: 1")

    asyncio.run(scenario())


@pytest.mark.parametrize("count", [-1, 0, 129, 100000])
def test_limits(make_args: MakeArgs, count: int) -> None:
    async def scenario() -> None:
        async with supervised(make_args()) as running:
            await ready(running)
            with pytest.raises(OperationError, match="can have 1 to 128") as refused:
                running.supervisor.live.scale(count)
            assert refused.value.exit_code == ExitCode.CONFIG
            assert wanted(running) == (2, 2)

    asyncio.run(scenario())


def test_reload_tells_new_children_the_new_arguments_and_keeps_what_was_scaled(make_args: MakeArgs) -> None:
    args = make_args(workers=2, api_key=("old",))
    fresh = [msgspec.structs.replace(args, api_key=("new",), drain_timeout=3.0, workers=4, max_restarts=9)]

    async def scenario() -> None:
        async with supervised(args, reread=lambda: fresh[-1]) as running:
            await ready(running)
            supervisor = running.supervisor
            assert await done(running, supervisor.live.reload()) is None
            assert wanted(running) == (4, 4)
            claims = supervisor._claims
            assert claims is not None
            told, revision = read_arguments(supervisor.resources.segment.name, claims.instance_id)
            assert revision == supervisor.resources.page.header(HeaderWord.SEGMENT_REVISION) == 3
            assert (told.server_args.drain_timeout, told.server_args.api_key) == (3.0, ())
            assert supervisor.resources._args.api_key == ("new",)
            assert all(process.life.policy.max_restarts == 9 for process in supervisor.crew.everybody())
            assert await done(running, supervisor.live.scale(3)) is None
            assert await done(running, supervisor.live.reload()) is None
            assert wanted(running) == (3, 3)
            before = pids(running)
            fresh.append(msgspec.structs.replace(args, port=1))
            error = await done(running, supervisor.live.reload())
            assert error is not None
            assert "--port" in error
            assert pids(running) == before

    asyncio.run(scenario())


def test_a_reload_that_fails_leaves_the_old_arguments(make_args: MakeArgs) -> None:
    args = make_args()
    fresh = msgspec.structs.replace(args, drain_timeout=3.0)

    async def scenario() -> None:
        plan = {"tokenizer_worker": {"since": 2, "start": "failed:bad template"}}
        async with supervised(args, plan, reread=lambda: fresh) as running:
            await ready(running)
            before = pids(running)
            error = await done(running, running.supervisor.live.reload())
            assert error is not None
            assert "tokenizer_worker:0" in error
            assert "bad template" in error
            assert pids(running) == before
            assert running.supervisor.args == args
            assert running.supervisor.resources.arguments.server_args.drain_timeout == args.drain_timeout

    asyncio.run(scenario())


def test_a_model_that_cannot_be_read_any_more_changes_nothing(make_args: MakeArgs) -> None:
    args = make_args()

    async def scenario() -> None:
        async with supervised(args, reread=lambda: args) as running:
            await ready(running)
            before = pids(running)
            running.supervisor._resolver = (*RESOLVER, "error")
            operation = running.supervisor.live.reload()
            assert await done(running, operation) == "model 'default': no such model"
            assert operation.exit_code == ExitCode.MODEL
            assert pids(running) == before

    asyncio.run(scenario())


def test_drain_lasts_until_the_stop(make_args: MakeArgs) -> None:
    async def scenario() -> Supervised:
        async with supervised(make_args()) as running:
            await ready(running)
            supervisor = running.supervisor
            for _ in range(2):
                supervisor.request_drain()
            await running.until(lambda: supervisor.snapshot().state == "draining", 5, "it drains")
            page = supervisor.resources.page
            words = (page.header(HeaderWord.READY), page.header(HeaderWord.DRAIN_DEADLINE_NS))
            assert words == (0, UNTIL_STOPPED_NS)
            victim = running.process("tokenizer_worker:0")
            assert victim.life.pid is not None
            os.kill(victim.life.pid, signal.SIGKILL)
            await running.until(lambda: victim.life.generation == 2 and victim.serves, 10, "it is still supervised")
            assert supervisor.snapshot().state == "draining"
            supervisor.request_stop()
            async with asyncio.timeout(10):
                await supervisor.wait_stopped()
        return running

    assert asyncio.run(scenario()).exit_code == 0


def test_a_stop_ends_what_is_under_way_and_leaves_nothing(make_args: MakeArgs) -> None:
    plan = {"tokenizer_worker": {"since": 2, "start": "hang"}}

    async def scenario() -> Supervised:
        async with supervised(make_args(), plan) as running:
            await ready(running)
            operation = running.supervisor.live.restart("tokenizer_worker")
            queued = running.supervisor.live.restart("router")
            await running.until(lambda: running.generation(WORKER, 0) == 2, 5, "the successor boots")
            running.supervisor.request_stop()
            async with asyncio.timeout(15):
                await running.supervisor.wait_stopped()
            assert (operation.error, queued.error) == ("the instance is stopping",) * 2
        return running

    assert asyncio.run(scenario()).exit_code == 0


def test_workers_are_recycled_after_their_lifetime(make_args: MakeArgs) -> None:
    async def scenario() -> None:
        async with supervised(make_args(max_worker_lifetime=1.0)) as running:
            await ready(running)
            crew = running.supervisor.crew
            await running.until(lambda: all(p.life.generation >= 2 for p in crew.workers()), 20, "both are replaced")
            assert running.said("(--max-worker-lifetime 1)")
            assert all(process.life.state is State.RUNNING for process in crew.workers())

    asyncio.run(scenario())
