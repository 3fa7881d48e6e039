"""A child that the zygote has just forked when the supervisor is killed: nobody adopts it, and it holds the port."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from sglmt.errors import ExitCode

WAIT = """
import os, sys
from sglmt.workers.zygote import _wait_for_adoption
_wait_for_adoption(supervisor_pid=int(sys.argv[1]), death_fd=int(sys.argv[2]))
print("adopted")
"""


def start(supervisor_pid: int, death_fd: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WAIT, str(supervisor_pid), str(death_fd)],
        pass_fds=[death_fd], stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_it_ends_as_soon_as_the_supervisor_is_gone() -> None:
    death_fd, alive_fd = os.pipe()
    with start(os.getpid() + 1_000_000, death_fd) as child:  # a parent that never comes
        os.close(death_fd)
        os.close(alive_fd)
        began_s = time.monotonic()
        assert child.wait(20) == ExitCode.CHILD_DEATH
        assert time.monotonic() - began_s < 4, "it waited for its deadline instead"


def test_it_goes_on_when_it_is_adopted() -> None:
    death_fd, alive_fd = os.pipe()
    with start(os.getpid(), death_fd) as child:
        output, _ = child.communicate(timeout=20)
    os.close(death_fd)
    os.close(alive_fd)
    assert (child.returncode, output) == (0, "adopted\n")
