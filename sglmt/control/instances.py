"""Instances as commands see them: found in the run directories, asked over their control sockets.

Runs in `sglmt status`, `stop` and `logs`. Owns nothing; an instance whose supervisor is gone is shown as stale,
one whose supervisor runs but does not answer as unreachable. Nothing is guessed from process names.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from sglmt.control.client import ControlClient, call
from sglmt.control.commands import Status, Stop, Subscribe
from sglmt.control.protocol import StopAccepted
from sglmt.errors import AmbiguousInstanceError, DeadlineError, ExitCode, NotRunningError, SglmtError
from sglmt.ipc.addresses import CONTROL_SOCKET
from sglmt.ipc.process_identity import pid_namespace
from sglmt.status.snapshot import InstanceSnapshot, InstanceState, WorkersSnapshot
from sglmt.supervisor.lifecycle import DID_NOT_END
from sglmt.supervisor.rundir import STATE_PAGE, FoundInstance, RunDir, find_instances, read_record

POLL_EVERY_S = 0.02
STOP_GRACE_S = 30.0  # beyond the drain time: stages of the stop order, each with its own limit
ANSWER_WITHIN_S = 5.0
FORCED_ANSWER_WITHIN_S = 2.0

_EXIT_CODES: dict[InstanceState, ExitCode] = {
    "running": ExitCode.OK,
    "starting": ExitCode.STARTING,
    "degraded": ExitCode.DEGRADED,
    "recovering": ExitCode.DEGRADED,
    "draining": ExitCode.STOPPING,
    "stopping": ExitCode.STOPPING,
    "stale": ExitCode.NOT_RUNNING,
    "unreachable": ExitCode.TIMEOUT,
}
_WORST_FIRST: tuple[InstanceState, ...] = (
    "unreachable", "degraded", "recovering", "starting", "stopping", "draining", "running", "stale",
)  # fmt: skip


def control_socket(found: FoundInstance) -> Path:
    """Where an instance answers."""
    return found.path / CONTROL_SOCKET


def find(name: str | None, runtime_dir: str | None) -> list[FoundInstance]:
    """The instances of that name, or all. Raises NotRunningError when a name is given and nothing has it."""
    found = find_instances(runtime_dir)
    if name is None:
        return found
    named = [one for one in found if one.record.name == name]
    if not named:
        known = ", ".join(one.record.name for one in found if one.alive)
        raise NotRunningError(f"no instance named {name!r} runs" + (f"; running are: {known}" if known else ""))
    return named


def find_one(name: str | None, runtime_dir: str | None) -> FoundInstance:
    """The one running instance meant. Raises NotRunningError, or AmbiguousInstanceError listing the choices."""
    alive = [one for one in find(name, runtime_dir) if one.alive]
    if not alive:
        raise NotRunningError("no instance runs" if name is None else f"instance {name!r} does not run any more")
    if len(alive) > 1:
        choices = ", ".join(f"{one.record.name} ({one.record.url or 'starting'})" for one in alive)
        raise AmbiguousInstanceError(f"several instances run; name one of them: {choices}")
    return alive[0]


def ask_status(found: FoundInstance, deadline_s: float) -> InstanceSnapshot:
    """What an instance says of itself; for one that cannot be asked, what its files say."""
    if not found.alive:
        return _from_record(found, "stale", "its supervisor is gone; the next launch sweeps what it left")
    try:
        answer: InstanceSnapshot = call(control_socket(found), Status(), deadline_s)
        return answer
    except NotRunningError:
        if found.record.process.is_proven_gone():
            return _from_record(found, "stale", "its supervisor has just gone")
        return _from_record(found, "starting", "its supervisor does not take commands yet")
    except DeadlineError:
        pid = found.record.process.pid
        return _from_record(found, "unreachable", f"its supervisor (pid {pid}) runs but does not answer")


def status_exit_code(snapshots: list[InstanceSnapshot]) -> ExitCode:
    """Exit code of `sglmt status`: of the worst instance shown; leftovers count only when nothing else is there."""
    if not snapshots:
        return ExitCode.NOT_RUNNING
    worst = min((snapshot.state for snapshot in snapshots), key=_WORST_FIRST.index)
    return _EXIT_CODES[worst]


def stop(found: FoundInstance, drain_s: float | None, now: bool) -> str:
    """Stop an instance and wait until nothing of it runs; a sentence that says how it went.

    Raises DeadlineError, saying what is left, when it does not end in time; with `now`, a supervisor that does
    not even answer is killed, and its processes end with it.
    """
    started_s = time.monotonic()
    name = found.record.name
    answer_by_s = started_s + (FORCED_ANSWER_WITHIN_S if now else ANSWER_WITHIN_S)
    killed: list[str] = []
    try:
        with contextlib.closing(ControlClient(control_socket(found), answer_by_s)) as client:
            accepted: StopAccepted = client.call(Stop(drain_s=drain_s, now=now), answer_by_s)
            limit_s = accepted.drain_s + STOP_GRACE_S
            killed = _killed_meanwhile(client, started_s + limit_s)
    except DeadlineError:
        if not now:
            raise DeadlineError(
                f"{name}: the supervisor (pid {found.record.process.pid}) does not answer; "
                f"`sglmt stop --now {name}` kills it"
            ) from None
        _signal(found, signal.SIGKILL)
        limit_s = STOP_GRACE_S
    except NotRunningError:
        # Too early for its control socket, or just ending: the signal means the same as the command.
        _signal(found, signal.SIGTERM)
        limit_s = (drain_s or 0.0) + STOP_GRACE_S
    if not wait_until_gone(found, started_s + limit_s):
        raise DeadlineError(f"{name}: still running after {limit_s:.0f} s; {_left(found)}")
    took_s = time.monotonic() - started_s
    if _same_run(found):
        return f"{name}: ended after {took_s:.1f} s, by force; {_sweep(found)}"
    by_force = f"; did not end by itself and was killed: {', '.join(killed)}" if killed else ""
    return f"{name}: stopped after {took_s:.1f} s{by_force}"


def _killed_meanwhile(client: ControlClient, until_s: float) -> list[str]:
    """Follow an instance that stops to its end, or to `until_s`; which processes had to be killed."""
    killed: list[str] = []
    with contextlib.suppress(NotRunningError, DeadlineError):
        for event in client.events(Subscribe(source="supervisor"), until_s, until_s):
            if event.log is not None and DID_NOT_END in event.log.text:
                killed.append(event.log.text.partition(f" {DID_NOT_END}")[0])
    return killed


def wait_until_gone(found: FoundInstance, deadline_s: float) -> bool:
    """Wait until the supervisor is gone and its directory with it (or abandoned). False at the deadline."""
    process = found.record.process
    visible = process.pid_namespace == pid_namespace() != 0
    while True:
        if process.is_proven_gone() or (not visible and not _same_run(found)):
            return True
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(POLL_EVERY_S)


def _sweep(found: FoundInstance) -> str:
    """Remove what a killed supervisor left, as the next launch would: processes, files, shared memory."""
    from sglmt.ipc.shared_memory import sweep
    from sglmt.supervisor.leftovers import end_leftovers

    try:
        claimed = RunDir.claim(found.record.name, str(found.path.parent))
    except SglmtError:  # somebody launched under that name in this moment, and sweeps it
        return "a new launch has taken its place"
    try:
        end_leftovers(claimed.path / STATE_PAGE)
        sweep()
    except SglmtError as error:
        return str(error)
    finally:
        claimed.remove()
    return "what it left was swept"


def _same_run(found: FoundInstance) -> bool:
    record = read_record(found.path)
    return record is not None and record.instance_id == found.record.instance_id


def _signal(found: FoundInstance, number: signal.Signals) -> None:
    """Signal the supervisor, if it is still the process that the record means."""
    process = found.record.process
    if process.pid_namespace == pid_namespace() and not process.is_proven_gone():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _left(found: FoundInstance) -> str:
    snapshot = ask_status(found, time.monotonic() + 1.0)
    left = [f"{row.role}:{row.index} (pid {row.pid})" for row in snapshot.processes if row.pid is not None]
    return "left: " + ", ".join(left) if left else f"the supervisor is pid {found.record.process.pid}"


def _from_record(found: FoundInstance, state: InstanceState, reason: str) -> InstanceSnapshot:
    record = found.record
    return InstanceSnapshot(
        name=record.name, instance_id=record.instance_id, pid=record.process.pid, state=state,
        url=record.url or "", engine="", model="", mode="multi",
        workers=WorkersSnapshot(requested=0, ready=0), shm=None, processes=[], reason=reason,
        uptime_s=max(0.0, time.time() - record.started_at_unix_s) if found.alive else 0.0,
    )  # fmt: skip
