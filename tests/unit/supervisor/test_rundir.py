"""The run directory: where it is, whose it is, what a dead run left, and what makes it impossible."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sglmt.errors import ConfigError, ResourceError
from sglmt.ipc.process_identity import ProcessIdentity, own_identity
from sglmt.ipc.state_page import SlotWord, StatePage
from sglmt.messages.frame import Role
from sglmt.supervisor.leftovers import read_occupants
from sglmt.supervisor.rundir import InstanceRecord, RunDir, base_directories, find_instances, list_instances


def record(name: str, process: ProcessIdentity) -> InstanceRecord:
    return InstanceRecord(name=name, instance_id="ab", process=process, url="http://127.0.0.1:1", started_at_unix_s=1.0)


def gone() -> ProcessIdentity:
    """This very pid, but of a process that started at another time."""
    own = own_identity()
    return ProcessIdentity(pid=own.pid, start_time_s=own.start_time_s + 5000, pid_namespace=own.pid_namespace)


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r")


def test_claim_and_remove(base: Path) -> None:
    run = RunDir.claim("demo", str(base))
    assert run.path == base / "demo"
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    run.write_record(record("demo", own_identity()))
    (found,) = list_instances(base)
    assert (found.record.name, found.alive) == ("demo", True)
    run.remove()
    assert list(base.iterdir()) == []


def test_claimed_name_is_refused_with_the_holder_pid(base: Path) -> None:
    run = RunDir.claim("demo", str(base))
    run.write_record(record("demo", own_identity()))
    with pytest.raises(ResourceError, match=rf"'demo' is in use by pid {os.getpid()}"):
        RunDir.claim("demo", str(base))
    run.remove()
    RunDir.claim("demo", str(base)).remove()


def test_names_do_not_meet(base: Path) -> None:
    first, second = RunDir.claim("a", str(base)), RunDir.claim("b", str(base))
    first.remove()
    assert second.path.is_dir()
    second.remove()


def test_what_a_dead_run_left_is_taken_over_and_wiped(base: Path) -> None:
    run = RunDir.claim("demo", str(base))
    run.write_record(record("demo", gone()))
    (run.path / "w0.1").touch()
    (run.path / "cache").mkdir()
    (run.path / "cache" / "file").touch()
    os.close(run._lock_fd)  # what the kernel does when a process is killed
    assert [found.alive for found in list_instances(base)] == [False]
    again = RunDir.claim("demo", str(base))
    assert again.leftover is not None
    assert (again.path / "w0.1").exists()  # its processes are looked for first
    again.wipe()
    assert [path.name for path in again.path.iterdir()] == ["lock"]
    again.remove()


def test_live_run_whose_lock_file_was_deleted_is_left_alone(base: Path) -> None:
    run = RunDir.claim("demo", str(base))
    parent = ProcessIdentity(
        pid=os.getppid(),
        start_time_s=_start_of(os.getppid()),
        pid_namespace=own_identity().pid_namespace,
    )
    run.write_record(record("demo", parent))
    (run.path / "lock").unlink()
    with pytest.raises(ResourceError, match=f"pid {os.getppid()}"):
        RunDir.claim("demo", str(base))
    run.remove()


def _start_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def test_record_of_another_pid_namespace_is_judged_by_the_lock(base: Path) -> None:
    run = RunDir.claim("demo", str(base))
    run.write_record(record("demo", ProcessIdentity(pid=1, start_time_s=1.0, pid_namespace=4)))
    assert [found.alive for found in list_instances(base)] == [True]
    os.close(run._lock_fd)
    assert [found.alive for found in list_instances(base)] == [False]
    RunDir.claim("demo", str(base)).remove()


def test_broken_record_counts_as_none(base: Path) -> None:
    run = RunDir.claim("demo", str(base))
    for content in (b"", b"{", b'{"name": 3}', b"\xff\xfe"):
        (run.path / "instance.json").write_bytes(content)
        assert list_instances(base) == []
    (run.path / "instance.json").unlink()
    os.mkfifo(run.path / "instance.json")
    assert list_instances(base) == []
    run.remove()


def test_file_or_link_in_the_place_of_the_directory_is_refused(base: Path) -> None:
    (base / "file").touch()
    (base / "elsewhere").mkdir()
    (base / "link").symlink_to(base / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(ResourceError, match=name):
            RunDir.claim(name, str(base))


def test_lock_that_is_a_link_is_refused(base: Path) -> None:
    (base / "demo").mkdir()
    (base / "demo" / "lock").symlink_to(base / "target")
    with pytest.raises(ResourceError, match="lock"):
        RunDir.claim("demo", str(base))
    assert not (base / "target").exists()


def test_path_that_is_too_long_for_sockets_is_refused_by_name(base: Path) -> None:
    deep = base / ("d" * 90)
    with pytest.raises(ConfigError, match=r"d{90}.*107"):
        RunDir.claim("demo", str(deep))
    assert not deep.exists()


def test_length_counts_bytes(base: Path) -> None:
    with pytest.raises(ConfigError, match="107"):
        RunDir.claim("demo", str(base / ("é" * 45)))


def test_long_temp_dir_is_passed_over(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = base / ("t" * 100)
    long.mkdir()
    short = base / "x"
    short.mkdir()
    environ = {"XDG_RUNTIME_DIR": str(long), "TMPDIR": str(short)}
    run = RunDir.claim("demo", None, environ)
    assert run.path == short / f"sglmt-{os.getuid()}" / "demo"
    run.write_record(record("demo", own_identity()))
    assert [found.path for found in find_instances(None, environ) if found.path == run.path] == [run.path]
    run.remove()


def test_order_of_bases() -> None:
    environ = {"XDG_RUNTIME_DIR": "/run/user/7", "TMPDIR": "/var/tmp"}
    uid = os.getuid()
    assert base_directories(None, environ) == [
        Path("/run/user/7/sglmt"), Path(f"/var/tmp/sglmt-{uid}"), Path(f"/tmp/sglmt-{uid}")
    ]  # fmt: skip
    assert base_directories("/x", environ) == [Path("/x")]
    assert base_directories(None, {"XDG_RUNTIME_DIR": "relative", "TMPDIR": "/tmp"}) == [Path(f"/tmp/sglmt-{uid}")]


def test_base_that_cannot_be_made_is_named(base: Path) -> None:
    (base / "file").touch()
    with pytest.raises(ResourceError, match="file"):
        RunDir.claim("demo", str(base / "file" / "below"))


def test_implied_base_that_is_open_to_others_is_refused(base: Path) -> None:
    mine = base / f"sglmt-{os.getuid()}"
    mine.mkdir()
    mine.chmod(0o777)
    xdg = base / "xdg"
    (xdg / "sglmt").mkdir(parents=True)
    (xdg / "sglmt").chmod(0o755)
    run = RunDir.claim("demo", None, {"XDG_RUNTIME_DIR": str(xdg), "TMPDIR": str(base)})
    try:
        assert base not in run.path.parents  # neither of the two: the last resort
    finally:
        run.remove()


def test_named_base_that_others_may_write_is_refused(base: Path) -> None:
    base.chmod(0o777)
    with pytest.raises(ResourceError, match="others may write"):
        RunDir.claim("demo", str(base))


def test_occupants_of_an_old_state_page(base: Path) -> None:
    page = StatePage.create(base / "state", 7, 4)
    for number, (role, index, pid, occupied) in enumerate(
        [(Role.SCHEDULER, 0, 4242, 1), (Role.TOKENIZER_WORKER, 3, 4243, 1), (Role.ROUTER, 0, 4244, 0)]
    ):
        slot = page.slot(number)
        slot[SlotWord.ROLE], slot[SlotWord.INDEX] = role, index
        slot[SlotWord.PID], slot[SlotWord.OCCUPIED] = pid, occupied
    page.close()
    assert read_occupants(base / "state") == [(4242, "scheduler"), (4243, "tokenizer_worker:3")]


def test_anything_but_a_state_page_has_no_occupants(base: Path) -> None:
    assert read_occupants(base / "none") == []
    for content in (b"", b"short", os.urandom(65536)):
        (base / "state").write_bytes(content)
        assert read_occupants(base / "state") == []
