"""Snapshots as text for people: one instance, several, the live view's block. Pure: data in, rich objects out.

Nothing here knows a terminal: width, the characters that can be shown and the number of rows come in as
parameters. Everything that did not come from us (names, paths, reasons) is data to rich, never markup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sglmt.status.figures import MISSING, duration, percent, size, totals_words
from sglmt.status.snapshot import InstanceSnapshot, ProcessSnapshot, StatusDocument

SIMULATOR_NOTE = "engine simulator (makes up tokens)"
OLD_NEWS_S = 3600.0  # a restart this long ago is no longer told; it stays counted
NARROW = 60  # columns below which a row shows less

_STATE_STYLES = {
    "RUNNING": "green", "STARTING": "yellow", "DRAINING": "yellow", "STOPPING": "yellow", "BACKOFF": "red",
    "FATAL": "bold red", "STOPPED": "dim", "DEGRADED": "bold yellow", "RECOVERING": "yellow",
    "STALE": "dim", "UNREACHABLE": "bold red",
}  # fmt: skip


@dataclass(frozen=True)
class Canvas:
    """What can be drawn on: columns, and whether more than ASCII can be shown."""

    width: int = 80
    unicode: bool = True

    @property
    def ellipsis(self) -> str:
        """Marks text that was cut."""
        return "…" if self.unicode else "..."

    @property
    def bullet(self) -> str:
        """Begins a line about one process."""
        return "•" if self.unicode else "*"

    @property
    def separator(self) -> str:
        """Between facts on one line."""
        return " · " if self.unicode else " | "

    def fit(self, text: str, columns: int) -> str:
        """`text` in at most `columns` columns, its end kept: the end of a path says which one it is."""
        if not self.unicode:
            text = text.encode("ascii", "replace").decode()
        text = "".join(character if character.isprintable() else "?" for character in text)
        if len(text) <= columns:
            return text
        return self.ellipsis + text[-(max(1, columns - len(self.ellipsis))) :]


@dataclass(frozen=True)
class Column:
    """One column of the process table: its heading, what it shows, and whether a narrow table has it."""

    heading: str
    cell: Callable[[ProcessSnapshot], str]
    narrow: bool = False
    right: bool = True


def process_name(process: ProcessSnapshot) -> str:
    """`tokenizer_worker:0`; roles there is one of are named without an index."""
    alone = process.role in ("supervisor", "router", "scheduler")
    return process.role if alone else f"{process.role}:{process.index}"


def _memory_bytes(process: ProcessSnapshot) -> int | None:
    """PSS, which adds up over processes; RSS where the kernel does not tell."""
    if process.pid is None:
        return None
    return process.pss_bytes if process.pss_bytes is not None else process.rss_bytes


COLUMNS = (
    Column("PROCESS", process_name, narrow=True, right=False),
    Column("PID", lambda process: MISSING if process.pid is None else str(process.pid), narrow=True),
    Column("STATE", lambda process: process.state, narrow=True, right=False),
    Column("UP", lambda process: duration(process.uptime_s if process.pid is not None else None)),
    Column("RESTARTS", lambda process: str(process.restarts)),
    Column("CPU", lambda process: percent(process.cpu_percent if process.pid is not None else None)),
    Column("MEMORY", lambda process: size(_memory_bytes(process))),
    Column("IN FLIGHT", lambda process: MISSING if process.role == "supervisor" else str(process.in_flight)),
)


def document(status: StatusDocument, canvas: Canvas) -> RenderableType:
    """All instances, one under the other; a sentence when there is none."""
    if not status.instances:
        return Text("no instance is running; `sglmt launch` starts one")
    blocks: list[RenderableType] = []
    for snapshot in status.instances:
        if blocks:
            blocks.append(Text())
        blocks.append(instance(snapshot, canvas))
    return Group(*blocks)


def instance(snapshot: InstanceSnapshot, canvas: Canvas, max_rows: int | None = None) -> RenderableType:
    """One instance: headline, facts, totals, processes, troubles. At most `max_rows` process rows."""
    parts: list[RenderableType] = [headline(snapshot, canvas), *facts(snapshot, canvas)]
    if snapshot.processes:
        shown, hidden = pick_rows(snapshot.processes, max_rows)
        parts += [Text(), process_table(shown, canvas)]
        if hidden:
            parts.append(Text(f"{canvas.ellipsis} and {len(hidden)} more, all {hidden[0].state}", style="dim"))
    troubles = trouble_lines(snapshot, canvas)
    if troubles:
        parts += [Text(), *troubles]
    return Group(*parts)


def headline(snapshot: InstanceSnapshot, canvas: Canvas) -> Text:
    """Name, state, address, uptime."""
    state = snapshot.state.upper()
    line = Text(canvas.fit(snapshot.name, 32), style="bold")
    line.append("  ")
    line.append(state, style=_STATE_STYLES.get(state, ""))
    if snapshot.url:
        line.append("  " + canvas.fit(snapshot.url, max(16, canvas.width - 4)))
    if snapshot.state not in ("stale", "unreachable"):
        up = f"up {duration(snapshot.uptime_s)}"
        line.append(("  " if len(line) + 2 + len(up) <= canvas.width else "\n") + up, style="dim")
    return line


def facts(snapshot: InstanceSnapshot, canvas: Canvas) -> list[Text]:
    """Why it is not simply running; what serves; totals. Only what is known."""
    lines: list[Text] = []
    if snapshot.reason:
        lines.append(Text("why: " + canvas.fit(snapshot.reason, 1000), style="yellow"))
    if snapshot.operation:
        lines.append(Text("now: " + canvas.fit(snapshot.operation, 1000)))
    if not snapshot.engine:  # nobody has told us more than its files do
        return lines
    engine = SIMULATOR_NOTE if snapshot.simulator else f"engine {snapshot.engine}"
    ready = f"{snapshot.workers.ready}/{snapshot.workers.requested} workers ready"
    model = "model " + canvas.fit(PurePath(snapshot.model).name or snapshot.model, max(20, canvas.width - 8))
    lines += _flow([model, engine, ready, f"{snapshot.mode} mode"], canvas)
    lines += _flow(totals_words(snapshot.totals), canvas)
    return lines


def process_table(processes: Sequence[ProcessSnapshot], canvas: Canvas) -> Table:
    """One row per process; in a narrow terminal only what matters most."""
    columns = [column for column in COLUMNS if column.narrow or canvas.width >= NARROW]
    longest = max((len(process_name(process)) for process in processes), default=0)
    gap = 1 if longest > 18 and canvas.width < 90 else 2
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        table.add_column(column.heading, justify="right" if column.right else "left", no_wrap=True, overflow="crop")
    spare = canvas.width - 20 if len(columns) == 3 else 24
    for process in processes:
        cells = [Text(canvas.fit(column.cell(process), max(8, spare))) for column in columns]
        cells[2].stylize(_STATE_STYLES.get(process.state, ""))
        table.add_row(*cells)
    return table


def trouble_lines(snapshot: InstanceSnapshot, canvas: Canvas) -> list[Text]:
    """For each process that was restarted or is not up: how it last ended, and when it is tried again."""
    lines = []
    for process in snapshot.processes:
        told = _trouble(process)
        if told is not None:
            line = Text(f"{canvas.bullet} {process_name(process)}: ")
            line.append(canvas.fit(told, 300), style=_STATE_STYLES.get(process.state, ""))
            lines.append(line)
    return lines


def _trouble(process: ProcessSnapshot) -> str | None:
    parts = []
    if process.state == "RUNNING" and process.uptime_s > OLD_NEWS_S:
        return None
    if process.restarts:
        times = "once" if process.restarts == 1 else f"{process.restarts} times"
        ago = f", {duration(process.uptime_s)} ago" if process.state == "RUNNING" else ""
        parts.append(f"restarted {times}{ago}")
    if process.last_exit is not None and (process.restarts or process.state in ("BACKOFF", "FATAL")):
        last = process.last_exit
        how = last.signal or (f"exit code {last.exit_code}" if last.exit_code is not None else "")
        told = last.reason if how in last.reason else f"{how}, {last.reason}" if last.reason else how
        parts.append(f"last end: {told}")
    if process.next_try_in_s is not None:
        parts.append(f"next try in {duration(max(0.0, process.next_try_in_s))}")
    if process.state == "FATAL":
        parts.append("given up")
    return ", ".join(parts) or None


def pick_rows(
    processes: Sequence[ProcessSnapshot], max_rows: int | None
) -> tuple[list[ProcessSnapshot], list[ProcessSnapshot]]:
    """(shown, hidden): when there are too many, hides from the end rows in the commonest state only."""
    if max_rows is None or len(processes) <= max_rows:
        return list(processes), []
    states = [process.state for process in processes]
    common = max(sorted(set(states)), key=states.count)
    excess = len(processes) - max(1, max_rows - 1)  # one line says what is hidden
    candidates = [row for row, process in enumerate(processes) if process.state == common]
    hidden = set(candidates[-excess:])
    return (
        [process for row, process in enumerate(processes) if row not in hidden],
        [process for row, process in enumerate(processes) if row in hidden],
    )


def to_text(renderable: RenderableType, canvas: Canvas, colour: bool = False) -> str:
    """What a terminal of this width would show, lines ending in newlines, without trailing spaces."""
    console = Console(
        width=canvas.width, force_terminal=colour, color_system="standard" if colour else None,
        legacy_windows=False, highlight=False, markup=False, emoji=False,
    )  # fmt: skip
    with console.capture() as capture:
        console.print(renderable)
    return "".join(line.rstrip() + "\n" for line in capture.get().splitlines())


def supports_unicode(encoding: str | None) -> bool:
    """Whether a stream of this encoding can show more than ASCII."""
    return (encoding or "").lower().replace("-", "").replace("_", "").startswith("utf")


def _flow(facts_: Sequence[str], canvas: Canvas) -> list[Text]:
    """Facts side by side, as many on a line as fit."""
    lines: list[str] = []
    for fact in facts_:
        if lines and len(lines[-1]) + len(canvas.separator) + len(fact) <= canvas.width:
            lines[-1] += canvas.separator + fact
        else:
            lines.append(fact)
    return [Text(line) for line in lines]
