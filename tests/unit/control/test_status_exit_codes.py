"""`sglmt status` answers scripts with its exit code: of the worst instance shown."""

from __future__ import annotations

import pytest

from sglmt.control.instances import status_exit_code
from sglmt.errors import ExitCode
from sglmt.status.snapshot import InstanceSnapshot, InstanceState, WorkersSnapshot


def snapshot(state: InstanceState) -> InstanceSnapshot:
    return InstanceSnapshot(
        name="t", instance_id="0", pid=1, state=state, url="", engine="", model="", mode="multi",
        workers=WorkersSnapshot(requested=1, ready=0), shm=None, processes=[],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ([], ExitCode.NOT_RUNNING),
        (["running"], ExitCode.OK),
        (["starting"], ExitCode.STARTING),
        (["degraded"], ExitCode.DEGRADED),
        (["draining"], ExitCode.STOPPING),
        (["stopping"], ExitCode.STOPPING),
        (["stale"], ExitCode.NOT_RUNNING),
        (["unreachable"], ExitCode.TIMEOUT),
        (["running", "stale"], ExitCode.OK),
        (["running", "starting", "degraded"], ExitCode.DEGRADED),
        (["running", "draining"], ExitCode.STOPPING),
        (["degraded", "unreachable"], ExitCode.TIMEOUT),
    ],
)
def test_the_worst_instance_counts(states: list[InstanceState], code: ExitCode) -> None:
    assert status_exit_code([snapshot(state) for state in states]) is code
