"""Log files: bounded, rotated, reopened, and never in the way; lines for people and for machines; `--since`."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from sglmt.control.reading import parse_since
from sglmt.errors import ConfigError, ResourceError
from sglmt.launching.logging_setup import named_file
from sglmt.server_args import ServerArgs
from sglmt.supervisor.log_file import LogFile
from sglmt.supervisor.log_format import notice_of, renderer
from sglmt.supervisor.logs import Descriptor, LineWriter, LogLine, LogSink
from tests.support.wait import wait_until

LINE = LogLine(number=3, at_unix_s=1_780_000_000.25, level="warning", source="tokenizer_worker:1", text='a "b" \u20ac')


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


def text_of(*paths: Path) -> str:
    return "".join(path.read_text() for path in paths)


def test_a_file_is_rotated_and_no_line_is_lost(directory: Path) -> None:
    path = directory / "x.log"
    file = LogFile(path, max_bytes=100, keep=3)
    for number in range(60):
        assert file.write(f"line {number:02d}\n".encode()) == 0
    file.close()
    kept = [path.with_name(f"x.log.{number}") for number in (3, 2, 1)]
    assert sorted(entry.name for entry in directory.iterdir()) == ["x.log", "x.log.1", "x.log.2", "x.log.3"]
    assert all(entry.stat().st_size <= 100 for entry in directory.iterdir())
    assert all(entry.stat().st_mode & 0o777 == 0o600 for entry in directory.iterdir())
    lines = text_of(*kept, path).splitlines()
    assert lines == [f"line {number:02d}" for number in range(60 - len(lines), 60)]
    assert len(lines) > 36


def test_one_large_write_is_spread_over_files_at_line_ends(directory: Path) -> None:
    path = directory / "x.log"
    file = LogFile(path, max_bytes=64, keep=100)
    data = b"".join(b"%03d %s\n" % (number, b"z" * (number % 40)) for number in range(50))
    assert file.write(data) == 0
    file.close()
    files = sorted(directory.iterdir(), key=lambda entry: -int(entry.suffix[1:]) if entry.suffix != ".log" else 0)
    assert text_of(*files).encode() == data
    assert all(entry.stat().st_size <= 64 for entry in files)


def test_a_line_longer_than_the_limit_is_kept_whole(directory: Path) -> None:
    file = LogFile(directory / "x.log", max_bytes=64, keep=1)
    file.write(b"short\n" + b"y" * 200 + b"\nafter\n")
    file.close()
    assert (directory / "x.log").read_bytes() == b"after\n"
    assert (directory / "x.log.1").read_bytes() == b"y" * 200 + b"\n"


def test_without_old_files_the_file_is_cut(directory: Path) -> None:
    file = LogFile(directory / "x.log", max_bytes=64, keep=0)
    for number in range(40):
        file.write(f"line {number:02d}\n".encode())
    file.close()
    assert [entry.name for entry in directory.iterdir()] == ["x.log"]
    assert (directory / "x.log").read_text().endswith("line 39\n")
    assert (directory / "x.log").stat().st_size <= 64


def test_the_limit_holds_where_files_cannot_be_renamed(directory: Path) -> None:
    (directory / "x.log.1" / "inside").mkdir(parents=True)
    file = LogFile(directory / "x.log", max_bytes=64, keep=2)
    (directory / "x.log.2" / "inside").mkdir(parents=True)
    for _ in range(40):
        file.write(b"a line\n")
    file.close()
    assert (directory / "x.log").stat().st_size <= 64


def test_a_moved_file_is_opened_anew(directory: Path) -> None:
    path, moved = directory / "x.log", directory / "moved"
    extra = os.open(os.devnull, os.O_WRONLY)
    file = LogFile(path, follow=(extra,))
    file.write(b"before\n")
    path.rename(moved)
    file.write(b"still there\n")
    assert file.reopen() is None
    file.write(b"after\n")
    os.write(extra, b"from elsewhere\n")
    file.close()
    os.close(extra)
    assert moved.read_text() == "before\nstill there\n"
    assert path.read_text() == "after\nfrom elsewhere\n"


def test_reopening_what_cannot_be_opened_goes_on_with_the_old_file(directory: Path) -> None:
    path = directory / "sub" / "x.log"
    path.parent.mkdir()
    file = LogFile(path)
    path.parent.rename(directory / "away")
    writer = LineWriter(file)
    writer.reopen()
    writer.write("line")
    assert writer.close(time.monotonic() + 5)
    file.close()
    assert "cannot be reopened" in (directory / "away" / "x.log").read_text()
    assert (directory / "away" / "x.log").read_text().endswith("\nline\n")


def test_a_pipe_without_a_reader_is_an_error_and_no_wait(directory: Path) -> None:
    os.mkfifo(directory / "fifo")
    with pytest.raises(ResourceError, match="fifo"):
        LogFile(directory / "fifo")


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip("needs the right to mount")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_full_disk_costs_lines_and_the_log_recovers(tiny_disk: Path) -> None:
    file = LogFile(tiny_disk / "x.log", max_bytes=1 << 20, keep=2)
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(b"\0" * 40_000)
    writer = LineWriter(file)
    for number in range(60):
        writer.write(f"{number:02d} " + "x" * 997)
    assert writer.flush(time.monotonic() + 5)
    assert writer.dropped > 0
    ballast.unlink()
    writer.write("room again")
    assert writer.close(time.monotonic() + 5)
    file.close()
    lines = (tiny_disk / "x.log").read_text().splitlines()
    assert lines[-1] == "room again"
    assert lines[-2] == f"[{writer.dropped} lines were dropped: they could not be written]"
    assert [line[:2] for line in lines[:-3]] == [f"{number:02d}" for number in range(len(lines) - 3)]


def test_a_torn_line_ends_before_the_next_one(directory: Path) -> None:
    """A pipe that takes a part of a line and then nothing any more, as a full disk does."""
    read_fd, write_fd = os.pipe()
    target = Descriptor(write_fd)
    os.close(read_fd)
    assert target.write(b"one\ntwo\n") == 2
    file = os.open(directory / "file", os.O_RDWR | os.O_CREAT)
    target.fd, target._torn = file, True
    assert target.write(b"three\n") == 0
    assert target.write(b"four\n") == 0
    assert (directory / "file").read_bytes() == b"\nthree\nfour\n"
    os.close(file)
    os.close(write_fd)


def test_lines_for_machines() -> None:
    shown = json.loads(renderer("json")(LINE))
    assert shown == {
        "time": "2026-05-28T20:26:40.250Z", "level": "warning", "role": "tokenizer_worker", "index": 1,
        "message": 'a "b" \u20ac',
    }  # fmt: skip
    alone = json.loads(renderer("json")(LogLine(number=1, at_unix_s=0, level="info", source="router", text="x")))
    assert "index" not in alone
    assert json.loads(notice_of("json")("3 lines"))["message"] == "3 lines"
    assert renderer("text")(LINE) == LINE.render()
    assert notice_of("text")("3 lines") == "[3 lines]"


def test_a_sink_writes_to_the_file_whatever_the_terminal_does(directory: Path) -> None:
    file = LogFile(directory / "x.log")
    sink = LogSink("info", None, renderer("json"), LineWriter(file))
    sink.log("info", "router", "shown in a live view only")
    sink.reopen()
    wait_until(lambda: (directory / "x.log").stat().st_size, 5, "the line is written")
    assert sink.close(time.monotonic() + 5)
    file.close()
    assert json.loads((directory / "x.log").read_text())["message"] == "shown in a live view only"


def test_where_the_log_goes(directory: Path) -> None:
    assert named_file(ServerArgs(), None) is None
    args = ServerArgs(name="prod", log_dir=str(directory / "a" / "b"))
    file = named_file(args, None)
    assert file is not None
    file.close()
    assert (directory / "a" / "b" / "prod.log").exists()
    with pytest.raises(ConfigError, match="--log-dir"):
        named_file(args, str(directory / "other"))
    (directory / "file").touch()
    with pytest.raises(ResourceError, match="--log-dir"):
        named_file(ServerArgs(log_dir=str(directory / "file" / "x")), None)


NOW = datetime(2026, 11, 29, 15, 0).timestamp()


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("30s", NOW - 30),
        ("10m", NOW - 600),
        ("1.5h", NOW - 5400),
        ("2d", NOW - 172_800),
        ("14:30", datetime(2026, 11, 29, 14, 30).timestamp()),
        ("14:30:05", datetime(2026, 11, 29, 14, 30, 5).timestamp()),
        ("2026-11-01", datetime(2026, 11, 1).timestamp()),
        ("2026-11-29T14:30:00Z", 1_795_962_600.0),
    ],
)
def test_since(text: str, moment: float) -> None:
    assert parse_since(text, NOW) == moment


@pytest.mark.parametrize("text", ["", "10", "yesterday", "25:00", "-5m", "9" * 30 + "d"])
def test_since_that_means_nothing(text: str) -> None:
    with pytest.raises(ValueError, match="is expected"):
        parse_since(text, NOW)
