"""The live view of `sglmt launch` on a terminal. A process of its own: `python -m sglmt.status.live SOCKET`.

A client of the control socket and nothing more: it draws what the supervisor sends, log lines above, the
table below, and ends when the connection does. When the terminal is blocked (Ctrl-S, a stopped pane) this
process waits and the supervisor does not; when it dies the supervisor goes back to plain lines. It sits in a
process group of its own so that Ctrl-C reaches the supervisor alone.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from sglmt.control.client import ControlClient
from sglmt.control.commands import Subscribe
from sglmt.control.protocol import Event
from sglmt.errors import SglmtError
from sglmt.status.render import Canvas, instance, supports_unicode
from sglmt.status.snapshot import InstanceSnapshot
from sglmt.supervisor.logs import LogLine

CONNECT_WITHIN_S = 10.0
REFRESH_S = 1.0
BACKLOG_LINES = 200
HEADER_LINES = 12  # headline, facts, blank lines, headings and troubles: what is not a process row

_LINE_STYLES = {"error": "red", "warning": "yellow", "debug": "dim"}


class Screen:
    """The block that is redrawn: the latest snapshot, drawn to the width and height of the moment."""

    def __init__(self, unicode: bool) -> None:
        self._unicode = unicode
        self.snapshot: InstanceSnapshot | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.snapshot is None:
            yield Text("starting")
            return
        canvas = Canvas(options.max_width, self._unicode)
        rows = max(3, console.size.height - HEADER_LINES)
        yield Text()
        yield instance(self.snapshot, canvas, max_rows=rows)


def log_text(line: LogLine) -> Text:
    """One log line, coloured by its level."""
    return Text(line.render(short=True), style=_LINE_STYLES.get(line.level, ""), overflow="fold")


def show(event: Event, screen: Screen, live: Live) -> None:
    """Draw one event."""
    if event.log is not None:
        live.console.print(log_text(event.log))
    if event.lost:
        live.console.print(Text(f"[{event.lost} lines not shown: the terminal was too slow]", style="dim"))
    if event.snapshot is not None:
        screen.snapshot = event.snapshot
        live.refresh()


def main(socket_path: str) -> int:
    """Draw until the instance ends. Exit code 0, also when there was nobody to draw for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides when it is over
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # `stty tostop` would stop a background group's writes
    console = Console(highlight=False, markup=False, emoji=False, legacy_windows=False)
    screen = Screen(supports_unicode(console.encoding))
    wanted = Subscribe(backlog=BACKLOG_LINES, snapshot_every_s=REFRESH_S)
    deadline_s = time.monotonic() + CONNECT_WITHIN_S
    try:
        client = ControlClient(Path(socket_path), deadline_s)
    except SglmtError:
        return 0
    live = Live(screen, console=console, auto_refresh=False, transient=True)
    with client, contextlib.suppress(SglmtError), live:
        for event in client.events(wanted, deadline_s):
            show(event, screen, live)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
