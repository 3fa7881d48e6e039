"""What people see: at every width, with every trouble, in every character set."""

from __future__ import annotations

import pytest

from sglmt.status.figures import duration, milliseconds, percent, rate, size
from sglmt.status.output import wants_colour
from sglmt.status.render import (
    SIMULATOR_NOTE,
    Canvas,
    document,
    pick_rows,
    supports_unicode,
    to_text,
)
from sglmt.status.render import instance as render_instance
from sglmt.status.snapshot import InstanceSnapshot, StatusDocument, WorkersSnapshot
from tests.unit.status.samples import instance, killed, process

WIDTHS = (20, 40, 60, 80, 120)


def shown(snapshot: InstanceSnapshot, width: int = 80, unicode: bool = True, max_rows: int | None = None) -> str:
    canvas = Canvas(width, unicode)
    return to_text(render_instance(snapshot, canvas, max_rows), canvas)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("unicode", [True, False])
def test_no_line_is_wider_than_the_terminal(width: int, unicode: bool) -> None:
    wide = instance(processes=[*instance().processes, process("tokenizer_worker", 1023, cpu_percent=100.0)])
    text = shown(wide, width, unicode)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "\x1b" not in text
    assert unicode or text.isascii()


def test_eighty_columns_show_everything() -> None:
    text = shown(instance())
    for words in (
        "demo  DEGRADED  http://127.0.0.1:31000", "up 1h02m", "tokenizer_worker:1 is BACKOFF",
        "model SmolLM2-135M-Instruct.Q4_1.gguf", "engine openvino", "1/2 workers ready",
        "1.2 req/s", "12,800 tok/s", "first token 41 ms", "3 running", "0 queued",
    ):  # fmt: skip
        assert words in text
    rows = [line.split() for line in text.splitlines() if line.startswith(("PROCESS", "scheduler", "tokenizer_worker"))]
    assert rows[0] == ["PROCESS", "PID", "STATE", "UP", "RESTARTS", "CPU", "MEMORY", "IN", "FLIGHT"]
    assert rows[1] == ["scheduler", "4190000", "RUNNING", "3m12s", "0", "3%", "1.5", "GB", "3"]
    assert rows[3] == ["tokenizer_worker:1", "-", "BACKOFF", "-", "3", "-", "-", "3"]


def test_the_reason_of_the_last_end_is_told() -> None:
    text = " ".join(shown(instance()).split())
    assert "tokenizer_worker:1: restarted 3 times, last end: killed by SIGKILL, perhaps out of memory" in text
    assert "next try in 1.3s" in text
    recovered = process("tokenizer_worker", 1, restarts=1, uptime_s=62.0, last_exit=killed().last_exit)
    assert "restarted once, 1m02s ago, last end: killed by SIGKILL" in shown(instance(processes=[recovered]))
    long_ago = process("tokenizer_worker", 1, restarts=1, uptime_s=4000.0, last_exit=killed().last_exit)
    assert "SIGKILL" not in shown(instance(processes=[long_ago]))
    assert "given up" in shown(instance(processes=[killed(state="FATAL")]))


def test_forty_columns_keep_process_pid_and_state() -> None:
    text = shown(instance(), 40)
    rows = [line.split() for line in text.splitlines() if line.startswith("tokenizer_worker")]
    assert rows == [["tokenizer_worker:0", "4190000", "RUNNING"], ["tokenizer_worker:1", "-", "BACKOFF"]]


def test_the_simulator_is_called_what_it_is() -> None:
    assert SIMULATOR_NOTE in shown(instance(simulator=True, engine="simulator"))
    assert SIMULATOR_NOTE not in shown(instance())


def test_stale_and_unreachable_say_why_and_nothing_made_up() -> None:
    for state in ("stale", "unreachable"):
        text = shown(instance(state=state, processes=[], reason="its supervisor is gone", engine="", model=""))
        assert text == f"demo  {state.upper()}  http://127.0.0.1:31000\nwhy: its supervisor is gone\n"


def test_hostile_texts_are_only_text() -> None:
    text = shown(instance(model="[red]x\x1b[2J\n", reason="[bold]a\x07"))
    assert "[red]x?[2J?" in text
    assert "[bold]a?" in text
    assert "\x1b" not in text
    assert "\x07" not in text


def test_a_long_path_keeps_its_end() -> None:
    text = shown(instance(model="/models/" + "very-" * 30 + "long.gguf"))
    assert "very-long.gguf" in text
    assert max(map(len, text.splitlines())) <= 80


def test_rows_that_do_not_fit_are_counted_and_troubles_stay() -> None:
    rows = [process("supervisor"), *(process("tokenizer_worker", index) for index in range(32))]
    rows[20] = killed(19)
    shown_rows, hidden = pick_rows(rows, 10)
    assert len(shown_rows) == 9
    assert rows[20] in shown_rows
    assert all(row.state == "RUNNING" for row in hidden)
    assert [row for row in rows if row in shown_rows] == shown_rows
    assert "and 24 more, all RUNNING" in shown(instance(processes=rows), max_rows=10)
    assert pick_rows(rows, None) == (rows, [])


def test_rows_are_never_lost_when_all_differ() -> None:
    rows = [process("router", state="FATAL"), process("scheduler"), process("detokenizer", state="BACKOFF")]
    kept, hidden = pick_rows(rows, 1)
    assert len(kept) + len(hidden) == 3
    assert {row.state for row in kept} >= {"BACKOFF", "RUNNING"} or {row.state for row in kept} >= {"FATAL"}


def test_documents_of_none_and_of_several() -> None:
    canvas = Canvas()
    assert "sglmt launch" in to_text(document(StatusDocument(instances=[]), canvas), canvas)
    both = StatusDocument(instances=[instance(), instance(name="other", workers=WorkersSnapshot(requested=1, ready=1))])
    text = to_text(document(both, canvas), canvas)
    assert text.index("demo  DEGRADED") < text.index("other  DEGRADED")


def test_colour_only_when_asked() -> None:
    canvas = Canvas()
    assert "\x1b[" in to_text(render_instance(instance(), canvas), canvas, colour=True)


@pytest.mark.parametrize(
    ("environment", "is_terminal", "colour"),
    [
        ({"TERM": "xterm"}, True, True),
        ({"TERM": "xterm"}, False, False),
        ({"TERM": "dumb"}, True, False),
        ({}, True, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_when_there_is_colour(environment: dict[str, str], is_terminal: bool, colour: bool) -> None:
    assert wants_colour(environment, is_terminal) is colour


@pytest.mark.parametrize(
    ("encoding", "unicode"), [("utf-8", True), ("UTF8", True), ("utf_8", True), ("ascii", False), (None, False)]
)
def test_which_encodings_can_show_everything(encoding: str | None, unicode: bool) -> None:
    assert supports_unicode(encoding) is unicode


def test_figures() -> None:
    durations = [None, 0, 0.85, 4.24, 59.4, 59.6, 192, 3600, 18_420, 86_400 * 12 + 10_800]
    assert [duration(value) for value in durations] == [
        "-", "0ms", "850ms", "4.2s", "59s", "1m00s", "3m12s", "1h00m", "5h07m", "12d3h",
    ]  # fmt: skip
    sizes = [None, 0, 999, 1000, 812 << 10, 21 << 20, 1434 << 20, 1 << 40]
    assert [size(value) for value in sizes] == [
        "-", "0 B", "999 B", "1 KB", "812 KB", "21 MB", "1.4 GB", "1024 GB",
    ]  # fmt: skip
    assert [rate(value) for value in (0, 0.44, 38.5, 412.2, 12800)] == ["0", "0.4", "38.5", "412", "12,800"]
    assert [milliseconds(value) for value in (None, 0.94, 41.2, 999.6)] == ["-", "0.9 ms", "41 ms", "1.0 s"]
    assert [percent(value) for value in (None, 0.0, 99.6)] == ["-", "0%", "100%"]
