"""The log of an instance: files that stay bounded, are reopened, and never stop what they tell about."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.instance import COMMAND, Instance
from tests.support.serving import look, supervisor_pid
from tests.support.wait import wait_until

ONE = ("--engine", "simulator", "--workers", "1", "--log-level", "debug")


@contextmanager
def foreground(instance: Instance, out: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """`sglmt launch` in the foreground, its output going to `out`; READY."""
    command = [COMMAND, *instance.launch_arguments(*ONE, *options)]
    with subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL) as launcher:
        try:
            wait_until(lambda: launcher.poll() is not None or is_running(instance), 60, "READY")
            yield launcher
        finally:
            if launcher.poll() is None:
                launcher.kill()


def is_running(instance: Instance) -> bool:
    return bool(supervisor_pid(instance)) and instance.snapshot()["state"] == "running"


def stop(launcher: subprocess.Popen[bytes]) -> int:
    launcher.terminate()
    return launcher.wait(20)


def restart_workers(instance: Instance, times: int) -> None:
    """Something to log about."""
    for _ in range(times):
        done = instance.run("restart", "tokenizer_worker", "--name", instance.name, "--runtime-dir",
                            str(instance.runtime_dir))  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_json_lines_in_a_directory_reopened_and_queried(instance: Instance, tmp_path: Path) -> None:
    directory = tmp_path / "logs"
    instance.launch(*ONE, "--log-dir", str(directory), "--log-format", "json")
    path = directory / f"{instance.name}.log"
    assert [entry.name for entry in directory.iterdir()] == [path.name]
    assert not (instance.runtime_dir / instance.name / "log").exists()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert any(line["message"].startswith("READY") for line in lines)
    assert {"time", "level", "role", "message"} <= set(lines[0])
    moved = tmp_path / "moved"
    path.rename(moved)
    os.kill(instance.pid, signal.SIGUSR1)
    wait_until(lambda: path.exists() and "USR1" in path.read_text(), 5, "the file is there again")
    assert "USR1" not in moved.read_text()

    shown = [json.loads(line) for line in instance.logs("--json", "--since", "10m").splitlines()]
    assert [line["message"] for line in shown][-1].startswith("USR1")
    assert len(shown) >= len(lines)
    assert instance.logs("--json", "--since", "10m", "-n", "1").count("\n") == 1
    future = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 3600))
    assert instance.logs("--since", future) == ""
    assert "is expected" in instance.logs("--since", "whenever")
    assert instance.stop().returncode == 0
    assert json.loads(path.read_text().splitlines()[-1])["message"].endswith("exit code 0")


def test_following_goes_on_to_the_end_of_the_instance(instance: Instance, tmp_path: Path) -> None:
    instance.launch(*ONE)
    follow = [COMMAND, "logs", "-f", "-n", "1", "--json", "--since", "1h", "--name", instance.name]
    shown = tmp_path / "shown"
    with (
        shown.open("wb") as out,
        subprocess.Popen([*follow, "--runtime-dir", instance.runtime_dir], stdout=out) as logs,
    ):
        wait_until(lambda: shown.stat().st_size, 20, "the last line so far")
        (worker,) = instance.processes("tokenizer_worker")
        os.kill(worker["pid"], signal.SIGKILL)
        wait_until(lambda: "SIGKILL" in shown.read_text(), 10, "its death is shown as it happens")
        assert instance.stop().returncode == 0
        assert logs.wait(10) == 0
    lines = [json.loads(line) for line in shown.read_text().splitlines()]
    assert lines[-1]["message"].endswith("exit code 0")


def test_the_log_of_a_detached_instance_is_bounded(instance: Instance) -> None:
    instance.launch(*ONE, "--router", "always", "--log-max-bytes", "65536", "--log-keep", "1")
    directory = instance.runtime_dir / instance.name
    logs = [directory / "log", directory / "log.1"]
    assert logs[0].stat().st_mode & 0o777 == 0o600
    with logs[0].open("ab") as file:  # as if it had been told a lot already
        while file.tell() < 65_400:
            file.write(b"x" * 79 + b"\n")
    restart_workers(instance, 1)
    wait_until(logs[1].exists, 10, "the log is rotated")
    assert all(log.stat().st_size <= 65_536 for log in logs)
    assert "restart" in logs[0].read_text() + logs[1].read_text()
    for number in (1, 2):  # what the interpreter itself would say goes to the same file
        assert os.readlink(f"/proc/{instance.pid}/fd/{number}") == str(logs[0])
    assert instance.stop().returncode == 0


@pytest.mark.parametrize("output", ["full disk", "stuck pipe", "closed pipe"])
def test_output_that_takes_nothing_stops_nothing(instance: Instance, output: str, tmp_path: Path) -> None:
    """The worker is killed and comes back, commands answer, and the file beside has every line."""
    read_fd, write_fd = os.pipe()
    if output == "full disk":
        os.close(write_fd)
        write_fd = os.open("/dev/full", os.O_WRONLY)
    elif output == "stuck pipe":
        os.set_blocking(write_fd, False)
        while True:
            try:
                os.write(write_fd, b"\0" * 4096)
            except BlockingIOError:
                break
        os.set_blocking(write_fd, True)
    else:
        os.close(read_fd)
    try:
        with foreground(instance, write_fd, "--log-dir", str(tmp_path)) as launcher:
            (worker,) = instance.processes("tokenizer_worker")
            os.kill(worker["pid"], signal.SIGKILL)
            wait_until(lambda: look(instance).processes[-1].generation == 2 and is_running(instance), 30, "it is back")
            began_s = time.monotonic()
            look(instance)
            assert time.monotonic() - began_s < 1.0
            assert stop(launcher) == 0
        text = (tmp_path / f"{instance.name}.log").read_text()
        assert "READY" in text
        assert "SIGKILL" in text
    finally:
        os.close(write_fd)
        if output != "closed pipe":
            os.close(read_fd)


def test_launches_with_log_files_that_cannot_be(instance: Instance, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    both = instance.run(*instance.launch_arguments("--detach", *ONE, "--log-dir", str(tmp_path), "--log-file", "x"))
    assert both.returncode == 78
    assert "--log-dir" in both.stderr
    below = instance.run(*instance.launch_arguments("--detach", *ONE, "--log-dir", str(tmp_path / "file" / "x")))
    assert below.returncode == 73
    assert "--log-dir" in below.stderr
    os.mkfifo(tmp_path / "fifo")
    pipe = instance.run(*instance.launch_arguments("--detach", *ONE, "--log-file", str(tmp_path / "fifo")), within_s=20)
    assert pipe.returncode == 73
    assert "fifo" in pipe.stderr
    assert list(instance.runtime_dir.iterdir()) == []
