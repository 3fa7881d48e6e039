"""The log of a running instance as text lines, from its control socket. Runs in `sglmt logs`."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from sglmt.control.client import ControlClient
from sglmt.control.commands import Logs, Subscribe
from sglmt.control.instances import ANSWER_WITHIN_S, control_socket
from sglmt.control.protocol import RecentLog
from sglmt.supervisor.log_format import renderer
from sglmt.supervisor.logs import RING_LINES, LogLine
from sglmt.supervisor.rundir import FoundInstance

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True)
class LogQuery:
    """Which lines, and how they look. `source` None: all processes; `since_unix_s` is wall-clock time."""

    source: str | None = None
    lines: int = RING_LINES
    since_unix_s: float | None = None
    follow: bool = False
    as_json: bool = False

    def is_recent(self, line: LogLine) -> bool:
        """Whether a line is not too old."""
        return self.since_unix_s is None or line.at_unix_s >= self.since_unix_s


def parse_since(text: str, now_unix_s: float) -> float:
    """The moment meant by `30s`, `10m`, `2h`, `1d` (ago), `14:30` (today) or an ISO date and time, local unless it
    says otherwise. Raises ValueError, saying what is expected."""
    ago = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smhd])", text)
    if ago is not None:
        return now_unix_s - float(ago[1]) * _UNITS_S[ago[2]]
    try:
        if re.fullmatch(r"\d\d:\d\d(:\d\d)?", text):
            text = datetime.fromtimestamp(now_unix_s).strftime("%Y-%m-%dT") + text
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r}: 30s, 10m, 2h, 1d, 14:30 or 2026-11-29T14:30:00 is expected") from None


def log_lines(found: FoundInstance, query: LogQuery) -> Iterator[str]:
    """The last lines that were asked for; with `follow` then new ones until the instance ends.

    Raises NotRunningError or DeadlineError when the instance cannot be asked.
    """
    render = renderer("json" if query.as_json else "text")
    deadline_s = time.monotonic() + ANSWER_WITHIN_S
    with ControlClient(control_socket(found), deadline_s) as client:
        if not query.follow:
            answer: RecentLog = client.call(Logs(lines=RING_LINES, source=query.source), deadline_s)
            recent = [line for line in answer.lines if query.is_recent(line)]
            yield from (render(line) for line in recent[max(0, len(recent) - query.lines) :])
            return
        for event in client.events(Subscribe(source=query.source, backlog=query.lines), deadline_s):
            if event.log is not None and query.is_recent(event.log):
                yield render(event.log)
            if event.lost:
                print(f"[{event.lost} lines lost: this terminal was too slow]", file=sys.stderr)
