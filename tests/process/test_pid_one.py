"""The launcher as pid 1 of a container without an init: reaps everybody, stops in seconds, ends truthfully."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from sglmt.errors import ExitCode
from tests.support.instance import COMMAND, Instance
from tests.support.namespaces import as_pid_one, inside, need_namespaces, titled
from tests.support.serving import look
from tests.support.wait import wait_until

OPTIONS = ("--engine", "simulator", "--no-live", "--max-restarts", "1000", "--restart-backoff-max", "0.1")
ORPHANS = "(sleep 0.5 & sleep 1 &)"  # their parent is gone when the launcher takes over as pid 1


@pytest.fixture(autouse=True)
def namespaces() -> None:
    need_namespaces()


def zombies(init: psutil.Process) -> list[int]:
    found = []
    for process in init.children(recursive=True):
        try:
            found += [process.pid] if process.status() == psutil.STATUS_ZOMBIE else []
        except psutil.NoSuchProcess:
            continue
    return found


def commands(init: psutil.Process) -> list[str]:
    return [process.name() for process in init.children() if process.is_running()]


def test_a_life_as_pid_one(instance: Instance, tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [COMMAND, *instance.launch_arguments(*OPTIONS)]
    with log.open("wb") as out, as_pid_one(command, ORPHANS, stdout=out, stderr=out) as unshare:
        wait_until(lambda: b"READY" in log.read_bytes() or unshare.poll() is not None, 60, "READY")
        init = inside(unshare)
        assert look(instance).pid == 1
        fork_twice(init.pid)
        wait_until(lambda: "sleep" not in commands(init) and not zombies(init), 10, "strangers are reaped")
        for generation in range(2, 7):
            worker = titled(init, "sglmt::tokenizer_worker:0")
            assert worker is not None
            worker.kill()
            wait_until(lambda wanted=generation: serves_with(instance, wanted), 20, "the worker is back")
        zygote = titled(init, "sglmt::zygote")
        assert zygote is not None
        zygote.kill()
        wait_until(lambda: titled(init, "sglmt::zygote") not in (None, zygote), 10, "there is another zygote")
        wait_until(lambda: not zombies(init), 5, "no zombie is left")
        began_s = time.monotonic()
        os.kill(init.pid, signal.SIGTERM)
        assert unshare.wait(20) == 0
        assert time.monotonic() - began_s < 10
    text = log.read_text()
    assert "SIGTERM: stopping" in text
    assert text.rstrip().endswith("exit code 0")  # the last words of the last process are in the log
    assert list(instance.runtime_dir.iterdir()) == []


def fork_twice(init: int) -> None:
    """As a helper of a worker may do: a process whose parent ends at once."""
    enter = ["nsenter", "--pid", "--mount", "--target", str(init), "sh", "-c", "(sleep 0.2 &) ; exit 0"]
    subprocess.run(enter, check=True, timeout=10)


def serves_with(instance: Instance, generation: int) -> bool:
    snapshot = look(instance)
    generations = [row.generation for row in snapshot.processes if (row.role, row.index) == ("tokenizer_worker", 0)]
    return generations == [generation] and snapshot.workers.ready == 2


def test_its_exit_code_is_the_container_s(instance: Instance) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [COMMAND, *instance.launch_arguments(*OPTIONS, "--port", port)]
        with as_pid_one(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as unshare:
            _, errors = unshare.communicate(timeout=30)
    assert unshare.returncode == ExitCode.PORT
    assert errors.decode().startswith("sglmt: error: ")
