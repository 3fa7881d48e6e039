"""/dev/shm as it may be: full, tiny, missing, read-only, not ours, of two pid namespaces, filled by the dead."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.instance import COMMAND, Instance
from tests.support.leaks import note_launcher
from tests.support.namespaces import (
    OWN_PIDS,
    inside,
    interpreter_for_all,
    need_namespaces,
    no_shm,
    shm_of,
    titled,
    within,
)
from tests.support.serving import look
from tests.support.wait import wait_until

ONE = ("--engine", "simulator", "--workers", "1", "--simulator-step-ms", "1")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def namespaces() -> None:
    need_namespaces()


def launch_with(instance: Instance, setup: str, *options: str) -> None:
    """Launch in the background behind other mounts, and note what it is."""
    command = [COMMAND, *instance.launch_arguments("--detach", *ONE, *options)]
    done = subprocess.run(within(setup, command), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    snapshot = look(instance)
    instance.url, instance.pid = snapshot.url, snapshot.pid
    note_launcher(snapshot.pid)


def answers(instance: Instance) -> bool:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 2}}
    return httpx.post(f"{instance.url}/generate", json=body, timeout=30).status_code == 200


@pytest.mark.parametrize("place", ["full", "tiny", "missing", "read-only"])
def test_without_shared_memory_the_arguments_lie_in_the_run_directory(
    instance: Instance, tmp_path: Path, place: str
) -> None:
    setup = {
        "full": shm_of("1m", filled=True),
        "tiny": shm_of("64k"),
        "missing": no_shm(tmp_path),
        "read-only": shm_of("1m", options="ro"),
    }[place]
    launch_with(instance, setup)
    snapshot = look(instance)
    assert snapshot.shm is not None
    path = Path(snapshot.shm.path)
    assert path == instance.runtime_dir / instance.name / snapshot.shm.name
    assert path.stat().st_mode & 0o777 == 0o600
    (warning,) = [line for line in instance.logs().splitlines() if str(path) in line]
    assert "WARN" in warning
    assert "262144 bytes are needed" in warning
    assert answers(instance)
    if place == "full":
        path.unlink()  # a cleaner of temporary files; the next life needs it
        (worker,) = instance.processes("tokenizer_worker")
        os.kill(worker["pid"], signal.SIGKILL)
        wait_until(lambda: look(instance).workers.ready == 1 and path.exists(), 20, "the worker is back")
        assert answers(instance)
    assert instance.stop().returncode == 0
    assert list(instance.runtime_dir.iterdir()) == []


def test_shared_memory_that_fills_up_while_it_runs(instance: Instance) -> None:
    """The segment is removed and its room taken: the next life finds it in the run directory."""
    launch_with(instance, shm_of("1m"))
    segment = look(instance).shm
    assert segment is not None
    assert segment.path.startswith("/dev/shm/")
    steal = f"rm {segment.path}; dd if=/dev/zero of=/dev/shm/full bs=4k 2>/dev/null; true"
    subprocess.run(["nsenter", "--mount", "--target", str(instance.pid), "sh", "-c", steal], check=True, timeout=20)
    (worker,) = instance.processes("tokenizer_worker")
    os.kill(worker["pid"], signal.SIGKILL)
    wait_until(lambda: look(instance).processes[-1].generation == 2 and look(instance).workers.ready, 20, "it is back")
    moved = look(instance).shm
    assert moved is not None
    assert Path(moved.path).parent == instance.runtime_dir / instance.name
    assert answers(instance)
    assert instance.stop().returncode == 0
    assert list(instance.runtime_dir.iterdir()) == []


AS_USER = ("setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups")


def as_user(setup: str, scratch: Path, commands: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    """These shell words one after the other, by a user without rights or a home, behind other mounts."""
    return subprocess.run(
        within(f"{interpreter_for_all(scratch)} && {setup}", [*AS_USER, "sh", "-c", " && ".join(commands)]),
        capture_output=True, text=True, timeout=60, check=False, cwd="/",
        env={name: value for name, value in os.environ.items() if name != "HOME"} | environ,
    )  # fmt: skip


def sglmt(verb: str, *options: object) -> str:
    return shlex.join([sys.executable, "-m", "sglmt", verb, *map(str, options)])


def test_another_user_who_may_not_write_there(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    base = tmp_path_factory.mktemp("u")
    for directory in (base, *base.parents):
        if directory.name.startswith(("pytest", "popen")):
            directory.chmod(0o755)
    os.chown(base, 1000, 1000)
    done = as_user(
        shm_of("1m", options="mode=0755"), tmp_path,
        [
            sglmt("launch", "--name", "u", "--port", 0, "--runtime-dir", base, "--detach", *ONE) + " >&2",
            sglmt("status", "u", "--json", "--runtime-dir", base),
            sglmt("stop", "u", "--runtime-dir", base) + " >&2",
        ],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (snapshot,) = json.loads(done.stdout)["instances"]
    assert snapshot["state"] == "running"
    assert snapshot["shm"]["path"].startswith(str(base / "u"))
    assert list(base.iterdir()) == []


def test_without_a_writable_tmp_a_runtime_directory_is_needed_and_enough(tmp_path: Path) -> None:
    """As in a container with a read-only file system and one small tmpfs."""
    setup = "mount --bind /tmp /tmp && mount -o remount,ro,bind /tmp && mount -t tmpfs -o mode=1777 tmpfs /run"
    launch = ("launch", "--name", "u", "--port", 0, "--detach", *ONE)
    refused = as_user(setup, tmp_path, [sglmt(*launch)], TMPDIR="/tmp", XDG_RUNTIME_DIR="/nowhere")
    assert refused.returncode == 73
    assert refused.stderr.count("\n") == 1
    assert all(words in refused.stderr for words in ("--runtime-dir", "/nowhere/sglmt", "/tmp/sglmt-1000"))
    done = as_user(
        setup, tmp_path, [f"{sglmt(*launch)} >&2", sglmt("status", "--json"), f"{sglmt('stop')} >&2", "ls /run"],
        SGLMT_RUNTIME_DIR="/run/instances",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document, left = done.stdout.rstrip().rsplit("\n", 1)
    assert json.loads(document)["instances"][0]["state"] == "running"
    assert left == "instances"


KILLER = """
import os, subprocess, sys, time
counts = []
for number in range(20):
    command = [sys.executable, "-m", "tests.support.supervised", sys.argv[1]]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    end_s = time.monotonic() + 20
    while not any(name.startswith(f"multi_tokenizer_args_{process.pid}_") for name in os.listdir("/dev/shm")):
        assert time.monotonic() < end_s and process.poll() is None
        time.sleep(0.01)
    counts.append(len(os.listdir("/dev/shm")))
    process.kill()
    process.wait()
print(*counts)
"""


def test_launches_that_are_killed_leave_no_growth(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Twenty launches that are killed, with room for four segments: each sweeps what the one before left."""
    base = tmp_path_factory.mktemp("r")
    told = json.dumps({"plan": {}, "args": {"workers": 1, "port": 0, "name": "t", "runtime_dir": str(base)}})
    done = subprocess.run(
        within(shm_of("1m"), [sys.executable, "-c", KILLER, told]),
        capture_output=True, text=True, timeout=120, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"] * 20
    wait_until(lambda: not any(str(base) in line for line in running_commands()), 10, "their children have ended")


def running_commands() -> list[str]:
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_text(errors="replace"))
        except OSError:
            continue
    return lines


def test_two_pid_namespaces_with_one_shm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Both launchers are pid 1 of their own; each keeps its own arguments, also for workers that come later."""
    base = Path(tmp_path_factory.mktemp("r"))
    instances = [Instance(base, name) for name in ("one", "two")]
    commands = [
        [COMMAND, *each.launch_arguments(*ONE, "--served-model-name", f"model-{each.name}", "--no-live")]
        for each in instances
    ]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    setup = shm_of("4m")  # one file system for both: the outer namespace makes it
    outer = within(setup, ["sleep", "120"])
    with subprocess.Popen(outer) as holder:
        try:
            wait_until(lambda: titles_of(holder.pid) == "sleep", 10, "the shared file system is mounted")
            enter = ["nsenter", "--mount", "--target", str(holder.pid)]
            with (
                subprocess.Popen([*enter, *OWN_PIDS, *map(str, commands[0])], **quiet) as first,
                subprocess.Popen([*enter, *OWN_PIDS, *map(str, commands[1])], **quiet) as second,
            ):
                try:
                    for each, process in zip(instances, (first, second), strict=True):
                        check_own_arguments(each, process, holder.pid)
                finally:
                    for process in (first, second):
                        if process.poll() is None:
                            inside(process).terminate()
                        assert process.wait(30) == 0
            assert os.listdir(f"/proc/{holder.pid}/root/dev/shm") == []
        finally:
            holder.kill()
    assert list(base.iterdir()) == []


def titles_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def check_own_arguments(instance: Instance, unshare: subprocess.Popen[bytes], holder: int) -> None:
    def running() -> bool:
        assert unshare.poll() is None
        record = instance.runtime_dir / instance.name / "instance.json"
        return record.exists() and instance.snapshot()["state"] == "running"

    wait_until(running, 60, f"{instance.name} runs")
    snapshot = look(instance)
    assert snapshot.pid == 1
    assert snapshot.shm is not None
    assert snapshot.shm.name.startswith("multi_tokenizer_args_1_")
    assert Path(f"/proc/{holder}/root{snapshot.shm.path}").exists()
    worker = titled(inside(unshare), "sglmt::tokenizer_worker:0")
    assert worker is not None
    worker.kill()
    wait_until(lambda: look(instance).workers.ready == 1 and look(instance).processes[-1].generation == 2, 20, "back")
    models = httpx.get(f"{snapshot.url}/v1/models", timeout=10).json()
    assert [model["id"] for model in models["data"]] == [f"model-{instance.name}"]


def test_paths_that_are_too_long_are_passed_over(tmp_path: Path) -> None:
    long = tmp_path / ("a" * 100)
    long.mkdir()
    short = Path("/tmp") / f"sglmt-{os.getuid()}"
    name = f"long-{os.getpid()}"
    environ = {**os.environ, "TMPDIR": str(long), "XDG_RUNTIME_DIR": str(long)}
    run = [str(COMMAND), "launch", "--name", name, "--port", "0", "--detach", *ONE]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    assert (short / name / "control.sock").exists()
    stop = subprocess.run(
        [str(COMMAND), "stop", name], capture_output=True, text=True, timeout=30, check=False, env=environ
    )
    assert stop.returncode == 0, stop.stderr
    assert not (short / name).exists()
    refused = subprocess.run(
        [str(COMMAND), "launch", "--name", "x", "--port", "0", "--runtime-dir", str(long), *ONE],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert refused.returncode == 78
    assert str(long) in refused.stderr


@pytest.mark.parametrize("what", ["file", "symlink", "fifo", "directory"])
def test_a_base_that_another_user_made_first_is_passed_over(tmp_path: Path, what: str) -> None:
    from sglmt.supervisor.rundir import RunDir

    base = tmp_path / f"sglmt-{os.getuid()}"
    if what == "symlink":
        base.symlink_to(tmp_path)
    elif what == "fifo":
        os.mkfifo(base)
    elif what == "file":
        base.touch()
    else:
        base.mkdir(0o700)
    os.chown(base, 1000, 1000, follow_symlinks=False)
    name = f"other-{os.getpid()}"
    claimed = RunDir.claim(name, None, {"TMPDIR": str(tmp_path)})
    try:
        assert claimed.path == Path("/tmp") / f"sglmt-{os.getuid()}" / name
    finally:
        claimed.remove()
    assert os.lstat(base).st_uid == 1000
