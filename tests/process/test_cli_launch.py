"""`sglmt launch`, `status`, `logs` and `stop` as a user runs them, on the engine simulator."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sglmt.errors import ExitCode
from tests.support.instance import COMMAND, Instance
from tests.support.leaks import note_launcher
from tests.support.wait import wait_until

SIMULATOR = ("--engine", "simulator")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """One running instance for the tests that only look."""
    with Instance(runtime_dir=Path(tmp_path_factory.mktemp("s"))) as made:
        yield made.launch(*SIMULATOR)


def supervisor_pid(instance: Instance) -> int:
    """Pid from the run directory, 0 as long as there is none."""
    try:
        record = json.loads((instance.runtime_dir / instance.name / "instance.json").read_bytes())
        note_launcher(int(record["process"]["pid"]))
        return int(record["process"]["pid"])
    except OSError:
        return 0


def test_status_for_machines(shared: Instance) -> None:
    done = shared.run("status", shared.name, "--json", "--runtime-dir", str(shared.runtime_dir))
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    (snapshot,) = document["instances"]
    assert (snapshot["state"], snapshot["mode"], snapshot["simulator"]) == ("running", "multi", True)
    assert snapshot["workers"] == {"requested": 2, "ready": 2}
    roles = [row["role"] for row in snapshot["processes"]]
    assert sorted(set(roles)) == ["detokenizer", "router", "scheduler", "supervisor", "tokenizer_worker"]
    assert all(psutil.pid_exists(row["pid"]) and row["state"] == "RUNNING" for row in snapshot["processes"])
    assert snapshot["model"] == "SmolLM2-135M-Instruct.Q4_1.gguf"  # nobody named one
    segment = Path("/dev/shm") / snapshot["shm"]["name"]
    assert snapshot["shm"]["path"] == str(segment)
    assert segment.stat().st_mode & 0o777 == 0o600


def test_status_for_people_and_pipes(shared: Instance) -> None:
    done = shared.run("status", "--runtime-dir", str(shared.runtime_dir))
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "engine simulator (makes up tokens)" in done.stdout
    assert "tokenizer_worker:1" in done.stdout


def test_status_in_a_locale_without_utf8(shared: Instance) -> None:
    plain = Instance(shared.runtime_dir, shared.name, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"})
    done = plain.run("status", "--runtime-dir", str(shared.runtime_dir))
    assert done.returncode == 0
    assert done.stdout.isascii()


def test_status_answers_quickly_from_start_to_end(shared: Instance) -> None:
    times_s = []
    for _ in range(5):
        began_s = time.monotonic()
        shared.snapshot()
        times_s.append(time.monotonic() - began_s)
    assert min(times_s) < 1.0


def test_logs_whole_and_by_source(shared: Instance) -> None:
    everything = shared.logs()
    assert "READY" in everything
    assert all(" | " in line for line in everything.splitlines())
    own = shared.logs("supervisor", "-n", "1").splitlines()
    assert len(own) == 1
    assert " supervisor | " in own[0]
    assert shared.logs("nobody:7") == ""


def test_a_name_is_used_once(shared: Instance) -> None:
    done = shared.run(*shared.launch_arguments("--detach", *SIMULATOR))
    assert done.returncode == ExitCode.RESOURCE
    assert str(shared.pid) in done.stderr
    check = shared.run(*shared.launch_arguments("--check", *SIMULATOR))
    assert check.returncode == ExitCode.RESOURCE


def test_several_instances_need_a_name(shared: Instance) -> None:
    with Instance(shared.runtime_dir).launch("--workers", "1", *SIMULATOR) as second:
        stop = second.run("stop", "--runtime-dir", str(shared.runtime_dir))
        assert stop.returncode == ExitCode.AMBIGUOUS
        assert shared.name in stop.stderr
        assert second.name in stop.stderr
        both = second.run("status", "--json", "--runtime-dir", str(shared.runtime_dir))
        assert {one["name"] for one in json.loads(both.stdout)["instances"]} == {shared.name, second.name}
        single = next(one for one in json.loads(both.stdout)["instances"] if one["name"] == second.name)
        assert single["mode"] == "single"
        assert "router" not in {row["role"] for row in single["processes"]}
        done = second.stop()
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.count("\n") == 1
        assert not (second.runtime_dir / second.name).exists()
        assert second.stop().returncode == ExitCode.NOT_RUNNING


def test_check_says_what_would_start_and_starts_nothing(instance: Instance) -> None:
    done = instance.run(*instance.launch_arguments("--check", "--workers", "3", *SIMULATOR))
    assert done.returncode == 0, done.stderr
    assert "3 tokenizer_workers" in done.stdout
    assert "nothing was started" in done.stdout
    assert list(instance.runtime_dir.iterdir()) == []


@pytest.mark.parametrize("how", ["--check", "--detach"])
def test_a_taken_port_fails_at_once(instance: Instance, how: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = instance.run("launch", "--name", instance.name, "--runtime-dir", str(instance.runtime_dir),
                            "--port", port, how, *SIMULATOR)  # fmt: skip
    assert done.returncode == ExitCode.PORT
    assert done.stderr.startswith("sglmt: error: ")
    assert port in done.stderr
    assert not (instance.runtime_dir / instance.name).exists()


def test_a_broken_model_is_told_by_the_waiting_command(instance: Instance, tmp_path: Path) -> None:
    model = tmp_path / "broken.gguf"
    model.write_bytes(b"GGUF" + b"\xff" * 64)
    done = instance.run(*instance.launch_arguments("--detach", *SIMULATOR, "--model-path", str(model)))
    assert done.returncode == ExitCode.MODEL
    assert "broken.gguf" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(instance.runtime_dir.iterdir()) == []


def test_a_supervisor_killed_while_starting_is_told(instance: Instance) -> None:
    with subprocess.Popen(
        [COMMAND, *instance.launch_arguments("--detach", *SIMULATOR)], stderr=subprocess.PIPE, text=True
    ) as command:
        pid = wait_until(lambda: supervisor_pid(instance), 20, "the run directory's record")
        os.kill(pid, signal.SIGKILL)
        _, errors = command.communicate(timeout=30)
    assert command.returncode == ExitCode.FAILURE
    assert "died before it was ready" in errors
    status = instance.run("status", "--runtime-dir", str(instance.runtime_dir))
    assert status.returncode == ExitCode.NOT_RUNNING
    assert "STALE" in status.stdout
    sweep(instance)


def is_gone(pid: int) -> bool:
    """Whether it has ended; that init has not reaped it yet is not its fault."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def sweep(instance: Instance) -> None:
    """Launch once more under the name of a killed run: that sweeps what it left."""
    instance.launch("--workers", "1", *SIMULATOR)
    assert instance.stop().returncode == 0
    assert list(instance.runtime_dir.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_the_waiting_command_stops_the_instance(instance: Instance, number: signal.Signals) -> None:
    with subprocess.Popen(
        [COMMAND, *instance.launch_arguments("--detach", *SIMULATOR)], stderr=subprocess.PIPE, text=True
    ) as command:
        pid = wait_until(lambda: supervisor_pid(instance), 20, "the run directory's record")
        command.send_signal(number)
        _, errors = command.communicate(timeout=30)
    assert command.returncode == ExitCode.KILLED_NOW
    assert "interrupted" in errors
    assert is_gone(pid)
    assert list(instance.runtime_dir.iterdir()) == []


def test_a_detached_instance_has_no_terminal_and_logs_to_its_directory(instance: Instance) -> None:
    instance.launch("--workers", "1", *SIMULATOR)
    pid = instance.pid
    assert os.getsid(pid) != os.getsid(0)
    assert os.readlink(f"/proc/{pid}/fd/0") == "/dev/null"
    log = instance.runtime_dir / instance.name / "log"
    assert os.readlink(f"/proc/{pid}/fd/1") == os.readlink(f"/proc/{pid}/fd/2") == str(log)
    assert "READY" in log.read_text()


def test_a_log_file_of_ones_own(instance: Instance, tmp_path: Path) -> None:
    log = tmp_path / "own.log"
    log.write_text("earlier\n")
    instance.launch("--workers", "1", "--log-file", str(log), *SIMULATOR)
    assert instance.stop().returncode == 0
    text = log.read_text()
    assert text.startswith("earlier\n")
    assert "READY" in text
    assert log.stat().st_mode & 0o777 == 0o644  # it was there before: its mode is its owner's matter
    refused = instance.run(*instance.launch_arguments("--detach", "--log-file", "/nowhere/log", *SIMULATOR))
    assert refused.returncode == ExitCode.RESOURCE


def test_a_stopped_supervisor_is_unreachable_and_can_be_ended_by_force(instance: Instance) -> None:
    instance.launch("--workers", "1", *SIMULATOR)
    children = [row["pid"] for row in instance.processes()]
    os.kill(instance.pid, signal.SIGSTOP)
    status = instance.run("status", "--runtime-dir", str(instance.runtime_dir))
    assert status.returncode == ExitCode.TIMEOUT
    assert "UNREACHABLE" in status.stdout
    polite = instance.stop()
    assert polite.returncode == ExitCode.TIMEOUT
    assert "--now" in polite.stderr
    forced = instance.stop("--now")
    assert forced.returncode == 0
    assert "by force" in forced.stdout
    assert all(is_gone(pid) for pid in children)
    assert list(instance.runtime_dir.iterdir()) == []
