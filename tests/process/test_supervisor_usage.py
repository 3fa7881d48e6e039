"""Memory as the status shows it: a process that has just been started is not shown with what it began with."""

from __future__ import annotations

import subprocess
import sys

from sglmt.supervisor.observe import UsageSampler
from tests.support.wait import wait_until

GROWS = "import sys; sys.stdin.readline(); kept = bytearray(b'x' * 40_000_000); sys.stdin.readline()"


def test_a_young_process_is_measured_each_time() -> None:
    with subprocess.Popen([sys.executable, "-c", GROWS], stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        sampler = UsageSampler()

        def pss_bytes() -> int:
            return sampler.look([process.pid])[process.pid].pss_bytes or 0

        first = wait_until(pss_bytes, 5, "it can be measured")
        process.stdin.write("\n")
        process.stdin.flush()
        wait_until(lambda: pss_bytes() > first + 30_000_000, 4, "the growth is seen before the next slow look is due")
        process.stdin.close()
