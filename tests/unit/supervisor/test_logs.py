"""Log lines are whole, bounded and printable, and writing them never waits."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from sglmt.supervisor.logs import (
    MAX_LINE_CHARS,
    RING_BYTES,
    RING_LINES,
    LineAssembler,
    LineWriter,
    LogLine,
    LogSink,
    clean_lines,
    matches_source,
)
from tests.support.wait import wait_until


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    for fd in (read_fd, write_fd):
        try:
            os.close(fd)
        except OSError:
            continue  # closed by the test


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one", ["one"]),
        ("one\ntwo\n", ["one", "two"]),
        ("one\r\ntwo", ["one", "two"]),
        ("10%\r50%\r100%", ["100%"]),
        ("\x1b[31mred\x1b[0m", ["red"]),
        ("\x1b]0;title\x07text", ["text"]),
        ("bell\x07 nul\x00", ["bell\N{REPLACEMENT CHARACTER} nul\N{REPLACEMENT CHARACTER}"]),
        (b"\xff\xfe binary", ["\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER} binary"]),
        ("tab\tstays", ["tab\tstays"]),
        ("a\n\nb", ["a", "", "b"]),
        ("", []),
    ],
)
def test_lines_are_clean(text: str | bytes, lines: list[str]) -> None:
    assert clean_lines(text) == lines


def test_a_long_line_is_cut_and_nothing_of_it_is_lost() -> None:
    text = "x" * (2 * MAX_LINE_CHARS + 5)
    lines = clean_lines(text)
    assert [len(line) for line in lines] == [MAX_LINE_CHARS, MAX_LINE_CHARS, 5]
    assert "".join(lines) == text


def test_assembler_gives_whole_lines_whatever_the_reads() -> None:
    assembler = LineAssembler()
    data = "first\nsecond ünïcode\n".encode() + b"tail"
    lines = [line for offset in range(len(data)) for line in assembler.feed(data[offset : offset + 1])]
    assert lines == [b"first", "second ünïcode".encode()]
    assert assembler.flush() == [b"tail"]
    assert assembler.flush() == []


def test_assembler_is_bounded_by_a_line_without_end() -> None:
    assembler = LineAssembler()
    lines = assembler.feed(b"x" * (3 * MAX_LINE_CHARS + 1))
    assert [len(line) for line in lines] == [MAX_LINE_CHARS] * 3
    assert assembler.flush() == [b"x"]


def test_a_line_has_time_level_and_source() -> None:
    line = LogLine(number=1, at_unix_s=0.1239, level="warning", source="tokenizer_worker:0", text="hm")
    stamp, rest = line.render()[:23], line.render()[23:]
    assert stamp.endswith(".123")
    assert rest == " WARN  tokenizer_worker:0 | hm"


@pytest.mark.parametrize(
    ("source", "wanted", "matches"),
    [
        ("tokenizer_worker:1", "tokenizer_worker:1", True),
        ("tokenizer_worker:1", "tokenizer_worker", True),
        ("tokenizer_worker:11", "tokenizer_worker:1", False),
        ("router", "route", False),
        ("router", None, True),
    ],
)
def test_sources(source: str, wanted: str | None, matches: bool) -> None:
    assert matches_source(source, wanted) is matches


def test_the_ring_keeps_the_last_lines_of_the_wanted_source() -> None:
    sink = LogSink("info")
    sink.log("debug", "router", "not this one")
    for number in range(RING_LINES + 10):
        sink.log("info", f"tokenizer_worker:{number % 2}", f"line {number}")
    assert len(sink.recent()) == RING_LINES
    assert [line.text for line in sink.recent(2, "tokenizer_worker:1")] == ["line 2007", "line 2009"]
    assert sink.recent(0) == []


def test_the_ring_is_bounded_in_bytes_too() -> None:
    sink = LogSink("info")
    for _ in range(200):
        sink.log("info", "router", "x" * MAX_LINE_CHARS)
    assert sum(len(line.text) for line in sink.recent()) <= RING_BYTES
    assert len(sink.recent()) == RING_BYTES // MAX_LINE_CHARS


def test_subscribers_get_lines_until_they_leave() -> None:
    sink = LogSink("info")
    got: list[str] = []
    leave = sink.subscribe(lambda line: got.append(line.text))
    sink.log("info", "router", "one\ntwo")
    leave()
    leave()
    sink.log("info", "router", "three")
    assert got == ["one", "two"]


def test_the_writer_writes_whole_lines(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    writer = LineWriter(write_fd)
    sink = LogSink("info", writer)
    sink.log("info", "router", "hello\nworld")
    assert sink.close(time.monotonic() + 5)
    written = os.read(read_fd, 4096).decode().splitlines()
    assert [line.split(" | ")[1] for line in written] == ["hello", "world"]


def test_a_stuck_reader_costs_lines_and_no_time(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    writer = LineWriter(write_fd, max_bytes=100_000)
    began_s = time.monotonic()
    for _ in range(500):
        writer.write("x" * 1000)
    assert time.monotonic() - began_s < 1.0
    assert writer.dropped > 0
    assert not writer.close(time.monotonic() + 0.05)
    os.close(read_fd)  # the writer's thread ends with a broken pipe
    assert writer.close(time.monotonic() + 5)


def test_a_reader_that_is_gone_costs_lines_only(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    os.close(read_fd)
    writer = LineWriter(write_fd)
    writer.write("to nobody")
    assert writer.close(time.monotonic() + 5)
    assert writer.dropped == 1


def test_a_slow_reader_is_told_what_it_missed(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    writer = LineWriter(write_fd, max_bytes=10_000)
    for _ in range(300):
        writer.write("y" * 999)
    dropped = writer.dropped
    assert dropped > 0
    got = bytearray()

    def read_some() -> bool:
        got.extend(os.read(read_fd, 65536))
        writer.write("still here")
        return b"lines were dropped" in got

    wait_until(read_some, 5, "the notice about dropped lines")
    assert writer.close(time.monotonic() + 5)
    assert all(line.strip(b"y") in (b"", b"still here") or b"dropped" in line for line in got.split(b"\n")[:-1])


def test_a_full_disk_costs_lines_only() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        writer = LineWriter(fd)
        writer.write("does not fit")
        assert writer.close(time.monotonic() + 5)
        assert writer.dropped == 1
    finally:
        os.close(fd)


def test_redirected_lines_go_to_the_new_place(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    first = os.open("/dev/null", os.O_WRONLY)
    writer = LineWriter(first)
    writer.redirect(write_fd)
    os.close(first)
    writer.write("here")
    assert writer.close(time.monotonic() + 5)
    assert os.read(read_fd, 100) == b"here\n"
