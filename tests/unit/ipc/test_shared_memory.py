"""The argument segment: nobody else's is read, nobody else's is removed, and what is wrong is named."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import sglmt.ipc.shared_memory as module
from sglmt.errors import ResourceError, SegmentError
from sglmt.ipc.process_identity import ProcessIdentity, identity_of, own_identity, pid_namespace
from sglmt.ipc.shared_memory import (
    NAME_PREFIX,
    SEGMENT_BYTES,
    Arguments,
    Segment,
    read_arguments,
    read_header,
    sweep,
)
from sglmt.server_args import PortArgs, SchedulerInfo, ServerArgs

INSTANCE = 0x0123_4567_89AB_CDEF
ARGUMENTS = Arguments(
    server_args=ServerArgs(workers=3),
    port_args=PortArgs(run_dir="/run/x", url="http://127.0.0.1:1", host="127.0.0.1", port=1),
    model_info={"model_path": "m"},
)
SCHEDULER_INFO = SchedulerInfo(
    engine="simulator",
    engine_version="1",
    model_path="m",
    context_length=8,
    vocab_size=9,
    max_running_requests=1,
    max_total_tokens=None,
    capabilities={},
    is_simulator=True,
)


@pytest.fixture
def segment(tmp_path: Path) -> Segment:
    made = Segment.create(INSTANCE, own_identity(), tmp_path)
    made.write(ARGUMENTS)
    return made


def gone() -> ProcessIdentity:
    """A process of this namespace that has ended."""
    child = subprocess.Popen(["true"])
    child.wait()
    return ProcessIdentity(pid=child.pid, start_time_s=12.5, pid_namespace=pid_namespace())


def test_what_is_written_is_read_with_its_revision(segment: Segment, tmp_path: Path) -> None:
    assert read_arguments(segment.name, INSTANCE, tmp_path) == (ARGUMENTS, 1)
    more = msgspec.structs.replace(ARGUMENTS, scheduler_info=SCHEDULER_INFO)
    assert segment.write(more) == 2
    assert read_arguments(segment.name, INSTANCE, tmp_path) == (more, 2)


def test_a_segment_is_private_of_full_size_and_names_its_owner(segment: Segment) -> None:
    status = segment.path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == SEGMENT_BYTES
    assert status.st_blocks * 512 >= SEGMENT_BYTES  # reserved, not only promised
    assert segment.name.startswith(f"{NAME_PREFIX}{os.getpid()}_")
    header = read_header(segment.path)
    assert (header.instance_id, header.uid, header.owner) == (INSTANCE, os.getuid(), own_identity())


def test_a_name_that_exists_is_never_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["a" * 16] * 2 + ["b" * 16] * 2)
    monkeypatch.setattr(module.secrets, "token_hex", lambda _size: next(names))
    first = Segment.create(INSTANCE, own_identity(), tmp_path)
    second = Segment.create(INSTANCE, own_identity(), tmp_path)
    assert (first.name[-16:], second.name[-16:]) == ("a" * 16, "b" * 16)


@pytest.mark.parametrize("kind", ["file", "link", "pipe", "directory"])
def test_whatever_waits_under_the_name_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(module.secrets, "token_hex", lambda _size: "a" * 16)
    trap = tmp_path / f"{NAME_PREFIX}{os.getpid()}_{'a' * 16}"
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    {
        "file": lambda: trap.write_bytes(b"theirs"),
        "link": lambda: trap.symlink_to(target),
        "pipe": lambda: os.mkfifo(trap),
        "directory": trap.mkdir,
    }[kind]()
    with pytest.raises(ResourceError, match="no free segment name"):
        Segment.create(INSTANCE, own_identity(), tmp_path)
    assert target.read_bytes() == b"precious"
    assert trap.lstat()


def test_the_segment_of_another_instance_is_refused_by_name(segment: Segment, tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match=rf"{segment.name}: of instance 0123456789abcdef"):
        read_arguments(segment.name, 5, tmp_path)


def test_damaged_segments_are_refused_by_name(segment: Segment, tmp_path: Path) -> None:
    good = segment.path.read_bytes()
    damaged = {
        "checksum does not match": good[:70] + b"\xee" + good[71:],
        "not a segment of this version": b"\xff" * SEGMENT_BYTES,
        "bytes, a segment has": good[: SEGMENT_BYTES // 2],
        "0 bytes, a segment has": b"",
        "is larger than the segment": good[:48] + b"\xff\xff\xff\xff" + good[52:],
    }
    for message, content in damaged.items():
        segment.path.write_bytes(content)
        with pytest.raises(SegmentError, match=message) as caught:
            read_arguments(segment.name, INSTANCE, tmp_path)
        assert segment.name in str(caught.value)
    segment.path.write_bytes(os.urandom(SEGMENT_BYTES))
    with pytest.raises(SegmentError, match=segment.name):
        read_arguments(segment.name, INSTANCE, tmp_path)


def test_every_byte_of_header_and_content_matters(segment: Segment, tmp_path: Path) -> None:
    """Any changed byte is refused, or changes nothing but who is said to own the segment."""
    good = segment.path.read_bytes()
    used = module._HEADER.size + read_header(segment.path).payload_bytes
    for at in range(0, used, 7):
        segment.path.write_bytes(good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :])
        try:
            arguments, _revision = read_arguments(segment.name, INSTANCE, tmp_path)
        except SegmentError:
            continue
        assert at < module._HEADER.size
        assert arguments == ARGUMENTS


def test_only_a_private_regular_file_of_this_user_is_read(segment: Segment, tmp_path: Path) -> None:
    names = [f"{NAME_PREFIX}{number}_{'0' * 16}" for number in range(4)]
    (tmp_path / names[1]).symlink_to(segment.path)
    os.mkfifo(tmp_path / names[2])
    (tmp_path / names[3]).mkdir()
    for name in names:
        with pytest.raises(SegmentError, match=f"{name}: (No such|Too many|not a regular)"):
            read_arguments(name, INSTANCE, tmp_path)
    for name in ("", "something", f"../{segment.name}", f"{segment.name}x"):
        with pytest.raises(SegmentError, match="not a name of ours"):
            read_arguments(name, INSTANCE, tmp_path)
    segment.path.chmod(0o640)
    with pytest.raises(SegmentError, match=r"open to others \(mode 640\)"):
        read_arguments(segment.name, INSTANCE, tmp_path)


def test_the_segment_of_another_user_is_refused(
    segment: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.os, "getuid", lambda: os.stat(segment.path).st_uid + 1)
    with pytest.raises(SegmentError, match="not a regular file of this user"):
        read_arguments(segment.name, INSTANCE, tmp_path)


def test_a_segment_removed_or_cut_by_somebody_is_made_again(segment: Segment, tmp_path: Path) -> None:
    segment.path.unlink()
    assert segment.write(ARGUMENTS) == 2
    os.truncate(segment.path, 10)
    assert segment.write(ARGUMENTS) == 3
    segment.path.unlink()
    segment.path.symlink_to(tmp_path / "elsewhere")
    assert segment.write(ARGUMENTS) == 4
    assert read_arguments(segment.name, INSTANCE, tmp_path) == (ARGUMENTS, 4)
    assert not (tmp_path / "elsewhere").exists()
    segment.unlink()
    segment.unlink()
    assert list(tmp_path.glob(f"{NAME_PREFIX}*")) == []


def test_arguments_that_do_not_fit_are_refused_with_both_sizes(segment: Segment, tmp_path: Path) -> None:
    large = msgspec.structs.replace(ARGUMENTS, model_info={"x": "y" * SEGMENT_BYTES})
    with pytest.raises(ResourceError, match=rf"bytes, the segment {SEGMENT_BYTES}"):
        segment.write(large)
    assert read_arguments(segment.name, INSTANCE, tmp_path) == (ARGUMENTS, 1)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with less room than a segment needs; skipped where nothing may be mounted."""
    path = tmp_path / "tiny"
    path.mkdir()
    mount = shutil.which("mount")
    size = f"size={SEGMENT_BYTES // 2}"
    if (
        mount is None
        or subprocess.run([mount, "-t", "tmpfs", "-o", size, "none", path], capture_output=True).returncode
    ):
        pytest.skip("no file system can be mounted here")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_full_disk_is_an_error_with_sizes_and_leaves_nothing(tiny_disk: Path) -> None:
    with pytest.raises(
        ResourceError, match=rf"No space left on device; {SEGMENT_BYTES} bytes are needed, \d+ are free"
    ):
        Segment.create(INSTANCE, own_identity(), tiny_disk)
    assert list(tiny_disk.iterdir()) == []


def test_a_reservation_that_fails_is_an_error_with_sizes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fd: int, _offset: int, _size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.os, "posix_fallocate", full)
    with pytest.raises(ResourceError, match=rf"No space left on device; {SEGMENT_BYTES} bytes are needed"):
        Segment.create(INSTANCE, own_identity(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="nowhere"):
        Segment.create(INSTANCE, own_identity(), tmp_path / "nowhere")


# what earlier launchers left


def test_only_segments_of_launchers_proven_gone_are_swept(tmp_path: Path) -> None:
    ended = gone()
    owners = {
        "gone": ended,
        "alive": own_identity(),
        "unknown start": ProcessIdentity(pid=os.getpid(), start_time_s=0.0, pid_namespace=pid_namespace()),
        "other namespace": ProcessIdentity(pid=ended.pid, start_time_s=12.5, pid_namespace=pid_namespace() + 1),
        "unknown namespace": ProcessIdentity(pid=ended.pid, start_time_s=12.5, pid_namespace=0),
        "pid used again": ProcessIdentity(pid=os.getpid(), start_time_s=0.25, pid_namespace=pid_namespace()),
    }
    segments = {}
    for name, owner in owners.items():
        segments[name] = Segment.create(INSTANCE, owner, tmp_path)
        segments[name].write(ARGUMENTS)
    assert sorted(sweep(tmp_path)) == sorted([segments["gone"].name, segments["pid used again"].name])
    left = {name for name, one in segments.items() if one.path.exists()}
    assert left == owners.keys() - {"gone", "pid used again"}


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_segment_has_an_owner_from_its_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unnamed: bool
) -> None:
    """A launcher that is killed before it has written anything leaves one that can be swept."""
    really_open = os.open

    def without_unnamed_files(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return really_open(path, flags, mode)

    if not unnamed:
        monkeypatch.setattr(module.os, "open", without_unnamed_files)
    kept = Segment.create(INSTANCE, own_identity(), tmp_path)
    left = Segment.create(INSTANCE, gone(), tmp_path)
    assert stat.S_IMODE(left.path.stat().st_mode) == 0o600
    assert left.path.stat().st_blocks * 512 >= SEGMENT_BYTES
    assert (read_header(left.path).revision, read_header(left.path).payload_bytes) == (1, 0)
    with pytest.raises(SegmentError):
        read_arguments(kept.name, INSTANCE, tmp_path)
    assert sweep(tmp_path) == [left.name]
    assert kept.write(ARGUMENTS) == 1
    assert read_arguments(kept.name, INSTANCE, tmp_path) == (ARGUMENTS, 1)


def test_what_is_no_segment_is_not_swept(tmp_path: Path) -> None:
    names = [f"{NAME_PREFIX}1_{'a' * 16}", f"{NAME_PREFIX}x_{'a' * 16}", "something", f"{NAME_PREFIX}1_{'b' * 16}"]
    for name in names[:3]:
        (tmp_path / name).write_bytes(b"\0" * SEGMENT_BYTES)
    segment = Segment.create(INSTANCE, gone(), tmp_path)
    segment.write(ARGUMENTS)
    (tmp_path / names[3]).symlink_to(segment.path)
    assert sweep(tmp_path) == [segment.name]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert sweep(tmp_path / "nowhere") == []


def test_a_process_is_itself_and_a_zombie_is_gone() -> None:
    assert not own_identity().is_proven_gone()
    child = subprocess.Popen(["true"], start_new_session=True)
    identity = identity_of(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not yet reaped
    assert identity.is_proven_gone()
    child.wait()
    assert identity.is_proven_gone()


def test_a_reader_waits_for_a_write_in_progress(segment: Segment, tmp_path: Path) -> None:
    """The writer was kept from going on between the content and the header for a while."""
    whole = segment.path.read_bytes()
    segment.path.write_bytes(whole[:200] + b"?" + whole[201:])
    with pytest.raises(SegmentError, match="checksum"):
        read_arguments(segment.name, INSTANCE, tmp_path)
    writer = threading.Timer(0.1, segment.path.write_bytes, (whole,))
    writer.start()
    try:
        assert read_arguments(segment.name, INSTANCE, tmp_path, time.monotonic() + 10)[1] == 1
    finally:
        writer.join()
