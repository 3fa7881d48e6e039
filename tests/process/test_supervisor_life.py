"""A supervisor with fake children: start, stop, crashes, hangs, and what is left afterwards (nothing)."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglmt.errors import ExitCode
from sglmt.ipc.shared_memory import SEGMENT_BYTES, SHM_DIR, read_arguments
from sglmt.ipc.state_page import HeaderWord
from sglmt.messages.frame import Role
from sglmt.server_args import ServerArgs
from sglmt.supervisor.lifecycle import State
from sglmt.supervisor.rundir import find_instances
from tests.support.supervised import RESOLVER, Supervised, run_to_end, segments_of, supervised

MakeArgs = Callable[..., ServerArgs]


@pytest.fixture
def make_args(tmp_path_factory: pytest.TempPathFactory) -> MakeArgs:
    base = tmp_path_factory.mktemp("r")

    def make(**options: Any) -> ServerArgs:
        return ServerArgs(**({"workers": 2, "port": 0, "name": "t", "runtime_dir": str(base)} | options))

    return make


def assert_nothing_left(running: Supervised, args: ServerArgs) -> None:
    assert args.runtime_dir is not None
    assert list(Path(args.runtime_dir).iterdir()) == []
    assert segments_of(os.getpid()) == []
    assert psutil.Process().children(recursive=True) == []
    if running.supervisor.url:
        port = int(running.supervisor.url.rpartition(":")[2])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


async def ready(running: Supervised) -> None:
    await running.until(lambda: running.ready, 20, "the instance is ready")


def test_start_and_stop_leave_nothing(make_args: MakeArgs) -> None:
    args = make_args(workers=3, detokenizers=2)

    async def scenario() -> Supervised:
        async with supervised(args) as running:
            await ready(running)
            snapshot = running.supervisor.snapshot()
            assert snapshot.state == "running"
            assert snapshot.workers.ready == 3
            roles = sorted((row.role, row.index) for row in snapshot.processes)
            assert roles == [
                ("detokenizer", 0), ("detokenizer", 1), ("router", 0), ("scheduler", 0), ("supervisor", 0),
                *(("tokenizer_worker", index) for index in range(3)),
            ]  # fmt: skip
            assert all(psutil.pid_exists(row.pid or 0) and row.rss_bytes for row in snapshot.processes)
            assert all(row.state == "RUNNING" for row in snapshot.processes)
            (found,) = find_instances(args.runtime_dir)
            assert (found.alive, found.record.url) == (True, snapshot.url)
            assert snapshot.shm is not None
            assert (SHM_DIR / snapshot.shm.name).stat().st_mode & 0o777 == 0o600
            port = int(snapshot.url.rpartition(":")[2])
            socket.create_connection(("127.0.0.1", port), timeout=2).close()
            running.supervisor.request_stop()
            async with asyncio.timeout(10):
                await running.supervisor.wait_stopped()
        return running

    running = asyncio.run(scenario())
    assert running.exit_code == 0
    assert running.supervisor.failure is None
    assert_nothing_left(running, args)


def test_segment_holds_the_scheduler_information_in_its_second_revision(make_args: MakeArgs) -> None:
    args = make_args(api_key=("secret-key",))

    async def scenario() -> None:
        async with supervised(args) as running:
            await ready(running)
            resources = running.supervisor.resources
            claims = running.supervisor._claims
            assert claims is not None
            told, revision = read_arguments(resources.segment.name, claims.instance_id)
            assert revision == 2 == resources.page.header(HeaderWord.SEGMENT_REVISION)
            assert told.scheduler_info is not None
            assert told.scheduler_info.engine == "fake"
            assert told.model_info["asked"]["model_path"] is None
            assert b"secret-key" not in (SHM_DIR / resources.segment.name).read_bytes()
            environ = Path(f"/proc/{running.pids()[0]}/environ").read_bytes()
            assert b"CUDA_VISIBLE_DEVICES=" not in environ or b"NOTIFY_SOCKET" not in environ

    asyncio.run(scenario())


def test_connections_are_refused_until_a_worker_can_answer(make_args: MakeArgs) -> None:
    async def scenario() -> None:
        async with supervised(make_args(), {"tokenizer_worker": {"start": "hang"}}) as running:
            await running.until(
                lambda: running.supervisor.url and running.pids() and running.said("router"), 10, "router is ready"
            )
            port = int(running.supervisor.url.rpartition(":")[2])
            with socket.socket() as client:
                assert client.connect_ex(("127.0.0.1", port)) != 0

    asyncio.run(scenario())


def test_crashed_worker_comes_back_with_a_new_generation(make_args: MakeArgs) -> None:
    async def scenario() -> None:
        async with supervised(make_args(workers=3)) as running:
            await ready(running)
            others = {name: running.process(name).life.pid for name in ("tokenizer_worker:0", "scheduler")}
            victim = running.process("tokenizer_worker:1")
            old_socket = running.supervisor.run_dir / "w1.1"
            assert old_socket.exists()
            assert running.generation(Role.TOKENIZER_WORKER, 1) == 1
            assert victim.life.pid is not None
            os.kill(victim.life.pid, signal.SIGKILL)
            await running.until(lambda: running.supervisor.snapshot().state == "degraded", 5, "the loss is noticed")
            assert running.supervisor.verdict.ready  # two of three serve
            await running.until(lambda: victim.serves and victim.life.generation == 2, 10, "it is back")
            assert running.generation(Role.TOKENIZER_WORKER, 1) == 2
            assert not old_socket.exists()
            assert (running.supervisor.run_dir / "w1.2").exists()
            row = next(r for r in running.supervisor.snapshot().processes if r.pid == victim.life.pid)
            assert row.restarts == 1
            assert row.last_exit is not None
            assert row.last_exit.signal == "SIGKILL (9)"
            assert {name: running.process(name).life.pid for name in others} == others
            await running.until(lambda: running.supervisor.verdict.state == "running", 5, "running again")

    asyncio.run(scenario())


def test_counters_of_the_dead_are_kept(make_args: MakeArgs) -> None:
    async def scenario() -> None:
        async with supervised(make_args()) as running:
            await ready(running)
            worker = running.process("tokenizer_worker:0")

            def count() -> int:
                return running.supervisor.snapshot().totals.requests_total

            await running.until(lambda: count() > 10, 5, "requests are counted")
            before = count()
            assert worker.life.pid is not None
            os.kill(worker.life.pid, signal.SIGKILL)
            await running.until(lambda: worker.life.generation == 2, 5, "restarted")
            assert count() >= before

    asyncio.run(scenario())


@pytest.mark.parametrize("role", ["scheduler", "router", "detokenizer:0"])
def test_not_ready_while_an_essential_process_is_missing(make_args: MakeArgs, role: str) -> None:
    async def scenario() -> None:
        async with supervised(make_args()) as running:
            await ready(running)
            resources = running.supervisor.resources
            assert resources.page.header(HeaderWord.READY) == 1
            pid = running.process(role).life.pid
            assert pid is not None
            os.kill(pid, signal.SIGSEGV)
            await running.until(lambda: resources.page.header(HeaderWord.READY) == 0, 2, "noticed within 2 s")
            await running.until(lambda: resources.page.header(HeaderWord.READY) == 1, 10, "ready again")

    asyncio.run(scenario())


def test_crash_loop_of_the_scheduler_ends_the_tree_with_its_last_words(make_args: MakeArgs, tmp_path: Path) -> None:
    trigger = tmp_path / "crash"
    plan = {"scheduler": {"then": "exit:0", "after_file": str(trigger), "say": ["ERROR the engine broke"]}}
    args = make_args(max_restarts=1)

    async def scenario() -> Supervised:
        async with supervised(args, plan) as running:
            await ready(running)
            trigger.touch()
            async with asyncio.timeout(20):
                await running.supervisor.wait_stopped()
        return running

    running = asyncio.run(scenario())
    assert running.exit_code == ExitCode.CHILD_DEATH  # also when the child itself said 0
    assert running.supervisor.failure is not None
    assert "scheduler" in running.supervisor.failure
    assert "given up" in running.supervisor.failure
    assert "the engine broke" in running.supervisor.failure
    assert_nothing_left(running, args)


def test_one_broken_worker_is_tried_for_ever_all_broken_end_the_tree(make_args: MakeArgs, tmp_path: Path) -> None:
    one, all_of_them = tmp_path / "one", tmp_path / "all"
    plan = {
        "tokenizer_worker:0": {"then": "exit:1", "after_file": str(one)},
        "tokenizer_worker:1": {"then": "exit:1", "after_file": str(all_of_them)},
    }

    async def scenario() -> Supervised:
        async with supervised(make_args(max_restarts=1), plan) as running:
            await ready(running)
            one.touch()
            broken = running.process("tokenizer_worker:0")
            await running.until(lambda: broken.beyond_budget, 10, "its budget is spent")
            assert running.supervisor.verdict.state == "degraded"
            assert running.supervisor.verdict.ready
            all_of_them.touch()
            async with asyncio.timeout(15):
                await running.supervisor.wait_stopped()
        return running

    running = asyncio.run(scenario())
    assert running.exit_code == ExitCode.CHILD_DEATH
    assert "no tokenizer worker is left" in str(running.supervisor.failure)


@pytest.mark.parametrize(
    ("plan", "code", "words"),
    [
        ({"scheduler": {"start": "failed:the model has no weights"}}, 70, "the model has no weights"),
        ({"detokenizer:0": {"start": "exit:66"}}, ExitCode.MODEL, "exit code 66"),
        ({"tokenizer_worker:1": {"start": "kill:7", "last_words": "mapping a segm"}}, 70, "shared memory full"),
    ],
)
def test_failed_start_is_one_line_with_the_cause(
    make_args: MakeArgs, plan: dict[str, dict[str, Any]], code: int, words: str
) -> None:
    args = make_args()
    running = asyncio.run(run_to_end(args, plan))
    assert running.exit_code == code
    assert running.supervisor.failure is not None
    assert running.supervisor.failure.startswith(f"start failed: {next(iter(plan))}: ")
    assert words in running.supervisor.failure.splitlines()[0]
    for process in plan.values():
        assert process.get("last_words", "") in running.supervisor.failure
    assert not running.ready
    assert_nothing_left(running, args)


def test_crash_during_the_start_is_tried_again(make_args: MakeArgs) -> None:
    async def scenario() -> None:
        async with supervised(make_args(), {"detokenizer:0": {"start": "kill:9", "until": 1}}) as running:
            await ready(running)
            assert running.process("detokenizer:0").life.generation == 2

    asyncio.run(scenario())


def test_worker_that_never_gets_ready_is_ended_by_the_start_deadline(make_args: MakeArgs) -> None:
    async def scenario() -> Supervised:
        async with supervised(make_args(start_timeout=1), {"tokenizer_worker:0": {"start": "hang"}}) as running:
            async with asyncio.timeout(20):
                await running.supervisor.wait_stopped()
        return running

    running = asyncio.run(scenario())
    assert running.exit_code == ExitCode.CHILD_DEATH
    assert "not ready after 1 s" in str(running.supervisor.failure)


def test_probe_that_never_comes_back_fails_the_start(make_args: MakeArgs) -> None:
    plan = {"tokenizer_worker:0": {"ignore_probe": True}}
    running = asyncio.run(run_to_end(make_args(start_timeout=1), plan))
    assert running.exit_code == ExitCode.CHILD_DEATH
    assert "probe" in str(running.supervisor.failure)


def test_a_scheduler_that_took_over_is_not_ready_before_everything_continues(
    make_args: MakeArgs, tmp_path: Path
) -> None:
    continues = tmp_path / "continues"

    async def scenario() -> None:
        plan = {"scheduler": {"recovers_until": str(continues), "since": 2}}
        async with supervised(make_args(), plan) as running:
            await ready(running)
            supervisor, page = running.supervisor, running.supervisor.resources.page
            pid = running.process("scheduler").life.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await running.until(lambda: supervisor.verdict.state == "recovering", 10, "it is noticed")
            assert supervisor.snapshot().reason == "after the engine's death: 3 requests continue"
            assert page.header(HeaderWord.READY) == 0
            continues.touch()
            await running.until(lambda: page.header(HeaderWord.READY) == 1, 5, "ready again")
            states = [text.partition(":")[0] for _, _, text in running.lines if text.startswith("instance is ")]
            assert states == ["instance is degraded", "instance is recovering", "instance is running"]

    asyncio.run(scenario())


def test_a_first_start_that_was_repeated_is_ready_only_when_everything_continues(
    make_args: MakeArgs, tmp_path: Path
) -> None:
    continues = tmp_path / "continues"

    async def scenario() -> None:
        plan = {"scheduler": {"recovers_until": str(continues)}}
        async with supervised(make_args(), plan) as running:
            await running.until(lambda: "3 requests" in str(running.supervisor.verdict.reason), 20, "all run")
            assert (running.supervisor.verdict.state, running.ready) == ("starting", False)
            continues.touch()
            await ready(running)

    asyncio.run(scenario())


def test_stopped_child_is_replaced(make_args: MakeArgs) -> None:
    async def scenario() -> None:
        async with supervised(make_args(heartbeat_timeout=0.5)) as running:
            await ready(running)
            worker = running.process("tokenizer_worker:0")
            assert worker.life.pid is not None
            os.kill(worker.life.pid, signal.SIGSTOP)
            await running.until(lambda: worker.life.generation == 2 and worker.serves, 15, "replaced")
            assert running.said("stopped (state T)")

    asyncio.run(scenario())


def test_child_without_heartbeat_is_asked_for_its_stacks_and_replaced(make_args: MakeArgs, tmp_path: Path) -> None:
    trigger = tmp_path / "silent"
    plan = {"detokenizer:0": {"then": "silent", "after_file": str(trigger), "until": 1}}

    async def scenario() -> None:
        async with supervised(make_args(heartbeat_timeout=0.8), plan) as running:
            await ready(running)
            trigger.touch()
            detokenizer = running.process("detokenizer:0")
            await running.until(lambda: detokenizer.life.generation == 2, 10, "replaced")
            assert running.said("without a heartbeat")
            assert "stack dump" in detokenizer.tail()

    asyncio.run(scenario())


def test_child_that_ignores_term_is_killed_at_its_deadline(make_args: MakeArgs) -> None:
    args = make_args(drain_timeout=0.5)

    async def scenario() -> Supervised:
        async with supervised(args, {"tokenizer_worker:0": {"ignore_term": True}}) as running:
            await ready(running)
            running.supervisor.request_stop()
            async with asyncio.timeout(8):
                await running.supervisor.wait_stopped()
        return running

    running = asyncio.run(scenario())
    assert running.exit_code == 0
    assert running.said("KILL")
    assert_nothing_left(running, args)


def test_first_signal_drains_in_order_second_kills(make_args: MakeArgs) -> None:
    args = make_args()

    async def scenario(signals: int) -> Supervised:
        plan = {"tokenizer_worker": {"ignore_term": True}} if signals > 1 else {}
        async with supervised(args, plan) as running:
            await ready(running)
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)  # at the same moment: one request
            if signals > 1:
                await running.until(lambda: running.supervisor.verdict.state == "draining", 5, "draining")
                resources = running.supervisor.resources
                assert resources.page.header(HeaderWord.READY) == 0
                assert resources.page.header(HeaderWord.DRAIN_DEADLINE_NS) > 0
                assert running.process("scheduler").life.state is State.RUNNING
                while not running.said("killing everything now"):  # the first few count as the same request
                    os.kill(os.getpid(), signal.SIGINT)
                    await asyncio.sleep(0.05)
            async with asyncio.timeout(10):
                await running.supervisor.wait_stopped()
        return running

    running = asyncio.run(scenario(1))
    assert running.exit_code == 0
    ended = [text.partition(" ")[0] for _, _, text in running.lines if "ended:" in text]
    assert [name.partition(":")[0] for name in ended] == [
        "tokenizer_worker", "tokenizer_worker", "detokenizer", "router", "scheduler"
    ]  # fmt: skip
    assert_nothing_left(running, args)
    running = asyncio.run(scenario(2))
    assert running.exit_code == ExitCode.KILLED_NOW
    assert sum("killing everything" in text for _, _, text in running.lines) == 1
    assert_nothing_left(running, args)


def test_stop_during_the_start(make_args: MakeArgs) -> None:
    args = make_args(workers=32)  # most of them still wait for their turn to boot

    async def scenario() -> Supervised:
        async with supervised(args, {"tokenizer_worker": {"start": "hang"}}) as running:
            await running.until(lambda: len(running.pids()) > 1, 10, "something is started")
            running.supervisor.request_stop()
            async with asyncio.timeout(8):
                await running.supervisor.wait_stopped()
        return running

    running = asyncio.run(scenario())
    assert running.exit_code == 0
    assert_nothing_left(running, args)


def test_stop_while_the_model_is_resolved(make_args: MakeArgs) -> None:
    args = make_args()

    async def scenario() -> Supervised:
        async with supervised(args, resolver=(*RESOLVER, "hang")) as running:
            await running.until(lambda: running.supervisor.url, 5, "the port is bound")
            await running.until(lambda: psutil.Process().children(), 5, "the resolver runs")
            running.supervisor.request_stop()
            async with asyncio.timeout(5):
                await running.supervisor.wait_stopped()
        return running

    running = asyncio.run(scenario())
    assert running.exit_code == 0
    assert_nothing_left(running, args)


@pytest.mark.parametrize(("mode", "words"), [("error", "no such model"), ("die", "last words of the resolver")])
def test_model_that_cannot_be_resolved(make_args: MakeArgs, mode: str, words: str) -> None:
    args = make_args()
    running = asyncio.run(run_to_end(args, resolver=(*RESOLVER, mode)))
    assert running.exit_code == ExitCode.MODEL
    assert words in str(running.supervisor.failure)
    assert_nothing_left(running, args)


def test_resolver_that_hangs_is_killed_at_its_deadline(make_args: MakeArgs) -> None:
    args = make_args(start_timeout=1)
    running = asyncio.run(run_to_end(args, resolver=(*RESOLVER, "hang")))
    assert running.exit_code == ExitCode.MODEL
    assert "deadline" in str(running.supervisor.failure)
    assert_nothing_left(running, args)


def test_damaged_segment_is_written_again_before_a_spawn(make_args: MakeArgs) -> None:
    async def scenario() -> None:
        async with supervised(make_args()) as running:
            await ready(running)
            resources = running.supervisor.resources
            for damage in (
                lambda p: p.unlink(), lambda p: os.truncate(p, 10), lambda p: p.write_bytes(b"\xff" * SEGMENT_BYTES),
            ):  # fmt: skip
                damage(resources.segment.path)
                worker = running.process("tokenizer_worker:0")
                generation = worker.life.generation
                assert worker.life.pid is not None
                os.kill(worker.life.pid, signal.SIGKILL)
                await running.until(
                    lambda g=generation, w=worker: w.life.generation == g + 1 and w.serves, 15, "restarted"
                )
                claims = running.supervisor._claims
                assert claims is not None
                read_arguments(resources.segment.name, claims.instance_id)

    asyncio.run(scenario())


def test_single_mode_has_no_router(make_args: MakeArgs) -> None:
    async def scenario() -> None:
        async with supervised(make_args(workers=1)) as running:
            await ready(running)
            snapshot = running.supervisor.snapshot()
            assert snapshot.mode == "single"
            assert "router" not in {row.role for row in snapshot.processes}

    asyncio.run(scenario())
