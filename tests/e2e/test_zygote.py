"""Children come from the zygote; whatever becomes of it, they live on and others can be started."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import psutil
import pytest

from sglmt.ipc.shared_memory import sweep
from sglmt.supervisor.zygote import FORK_WITHIN_S
from tests.support.instance import Instance
from tests.support.serving import is_gone, look, streams_to, until
from tests.support.wait import wait_until

ZYGOTE = "sglmt::zygote"
BODY = {"text": "a", "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}


@pytest.fixture
def served(instance: Instance) -> Instance:
    """Two workers; the zygote has loaded."""
    instance.launch("--engine", "simulator", "--simulator-step-ms", "10", "--workers", "2")
    wait_until(lambda: zygote_of(instance), 10, "there is a zygote")
    return instance


def zygote_of(instance: Instance) -> int | None:
    """Its pid."""
    for child in psutil.Process(instance.pid).children():
        if child.status() != psutil.STATUS_ZOMBIE and child.cmdline()[:1] == [ZYGOTE]:
            return child.pid
    return None


def children(instance: Instance) -> dict[str, int]:
    """`role:index` → pid of all that run."""
    rows = [row for row in look(instance).processes if row.role != "supervisor" and row.state == "RUNNING"]
    return {f"{row.role}:{row.index}": row.pid for row in rows if row.pid is not None}


def replaced(instance: Instance, name: str, pid: int) -> bool:
    return children(instance).get(name, pid) != pid


def test_children_are_the_supervisors_own_and_end_with_it(served: Instance) -> None:
    forked = children(served)
    zygote = zygote_of(served)
    assert len(forked) == 5
    assert zygote is not None
    for pid in forked.values():
        child = psutil.Process(pid)
        assert child.ppid() == served.pid
        assert os.getpgid(pid) == pid
        assert child.exe() == psutil.Process(zygote).exe()
    os.kill(served.pid, signal.SIGKILL)
    wait_until(lambda: all(is_gone(pid) for pid in [*forked.values(), zygote]), 5, "all end with it")
    sweep()  # the segment, as the next launch would


def test_a_killed_zygote_costs_nobody_anything(served: Instance) -> None:
    async def scenario() -> None:
        before, zygote = children(served), zygote_of(served)
        assert zygote is not None
        async with streams_to(served) as opener:
            opened = [opener.start("/generate", **BODY) for _ in range(8)]
            await until(lambda: all(stream.chunks for stream in opened), 20, "all streams run")
            os.kill(zygote, signal.SIGKILL)
            await until(lambda: is_gone(zygote), 5, "it is gone")
            for stream in opened:
                assert (await stream.finish()).events[-1]["meta_info"]["completion_tokens"] == 300
        assert children(served) == before

    asyncio.run(scenario())
    pid = children(served)["tokenizer_worker:0"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: replaced(served, "tokenizer_worker:0", pid), 20, "a worker can be started")
    wait_until(lambda: zygote_of(served), 10, "there is another zygote")
    zombies = [child for child in psutil.Process(served.pid).children() if child.status() == psutil.STATUS_ZOMBIE]
    assert zombies == []


def test_a_stopped_zygote_delays_nobody_for_long(served: Instance) -> None:
    zygote, pid = zygote_of(served), children(served)["tokenizer_worker:1"]
    assert zygote is not None
    os.kill(zygote, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    longest_s = 0.0
    end_s = time.monotonic() + 20
    while not replaced(served, "tokenizer_worker:1", pid):
        assert time.monotonic() < end_s, "it is not replaced"
        asked_s = time.monotonic()
        look(served)
        longest_s = max(longest_s, time.monotonic() - asked_s)
    assert longest_s < FORK_WITHIN_S + 1.0
    assert is_gone(zygote)
    assert "zygote: it does not answer" in served.logs()
    pids = list(children(served).values())
    assert len(pids) == len(set(pids)) == 5
    wait_until(lambda: zygote_of(served) not in (None, zygote), 10, "there is another zygote")
