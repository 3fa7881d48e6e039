"""Changes to a running instance, as commands see them: begin one, show its progress, end as it ended.

Runs in `sglmt scale`, `restart`, `reload` and `drain`. Leaving early (Ctrl-C) does not end the operation.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sglmt.control.client import ControlClient, call
from sglmt.control.commands import Command, Drain, Progress, Status
from sglmt.control.instances import ANSWER_WITHIN_S, control_socket
from sglmt.control.protocol import OperationBegun, OperationReport, ServerSideError
from sglmt.errors import DeadlineError, NotRunningError
from sglmt.status.snapshot import InstanceSnapshot
from sglmt.supervisor.rundir import FoundInstance

NEWS_WITHIN_S = 2.0
POLL_EVERY_S = 0.1


def carry_out(found: FoundInstance, command: Command, say: Callable[[str], None]) -> None:
    """Begin `command` and wait for its end; `say` gets each line of progress.

    Raises ServerSideError when it was refused or failed, with the exit code it asks for; NotRunningError when the
    instance ends meanwhile; DeadlineError when the supervisor does not answer.
    """
    with ControlClient(control_socket(found), time.monotonic() + ANSWER_WITHIN_S) as client:
        begun: OperationBegun = client.call(command, time.monotonic() + ANSWER_WITHIN_S)
        seen = 0
        while True:
            question = Progress(number=begun.number, seen=seen, within_s=NEWS_WITHIN_S)
            report: OperationReport = client.call(question, time.monotonic() + NEWS_WITHIN_S + ANSWER_WITHIN_S)
            seen = report.seen
            for line in report.lines:
                say(line)
            if report.done:
                break
    if report.error is not None:
        raise ServerSideError(f"{report.what}: {report.error}", report.exit_code)


def drain(found: FoundInstance, wait_s: float | None, say: Callable[[str], None]) -> None:
    """Have it take no more work; with `wait_s`, wait until nothing runs any more.

    Raises DeadlineError when requests still run then; NotRunningError or DeadlineError when it cannot be asked.
    """
    call(control_socket(found), Drain(), time.monotonic() + ANSWER_WITHIN_S)
    until_s = time.monotonic() + (wait_s or 0.0)
    told = -1
    while True:
        try:
            running = _running(call(control_socket(found), Status(), time.monotonic() + ANSWER_WITHIN_S))
        except NotRunningError:
            say("it was stopped")
            return
        if running != told:
            say(f"draining; {running} requests run" if running else "draining; nothing runs")
            told = running
        if not running or wait_s is None:
            return
        if time.monotonic() >= until_s:
            raise DeadlineError(f"{running} requests still run after {wait_s:g} s; it goes on draining")
        time.sleep(POLL_EVERY_S)


def _running(snapshot: InstanceSnapshot) -> int:
    """Requests that have not been answered: as the workers count them."""
    return sum(row.in_flight for row in snapshot.processes if row.role == "tokenizer_worker")
