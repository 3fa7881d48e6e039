"""The log of a running instance as text lines, from its control socket. Runs in `sglmt logs`."""

from __future__ import annotations

import time
from collections.abc import Iterator

from sglmt.control.client import ControlClient
from sglmt.control.commands import Logs, Subscribe
from sglmt.control.instances import ANSWER_WITHIN_S, control_socket
from sglmt.control.protocol import RecentLog
from sglmt.supervisor.rundir import FoundInstance


def log_lines(found: FoundInstance, source: str | None, lines: int, follow: bool) -> Iterator[str]:
    """The last `lines` lines of `source` (all when None); with `follow` then new ones until the instance ends.

    Raises NotRunningError or DeadlineError when the instance cannot be asked.
    """
    deadline_s = time.monotonic() + ANSWER_WITHIN_S
    with ControlClient(control_socket(found), deadline_s) as client:
        if not follow:
            answer: RecentLog = client.call(Logs(lines=lines, source=source), deadline_s)
            yield from (line.render() for line in answer.lines)
            return
        for event in client.events(Subscribe(source=source, backlog=lines), deadline_s):
            if event.log is not None:
                yield event.log.render()
            if event.lost:
                yield f"[{event.lost} lines lost: this terminal was too slow]"
