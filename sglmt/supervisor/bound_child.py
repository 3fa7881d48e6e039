"""Runs a module as a helper that cannot outlive its parent: `python -m sglmt.supervisor.bound_child PPID MODULE`.

For short-lived helpers that are not `sglmt.workers.child`. The kernel kills this process when the thread that
spawned it ends; if the parent has already gone, the module is not run at all.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

from sglmt.errors import ExitCode

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then be the module."""
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(ExitCode.CHILD_DEATH)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is the supervisor's matter
    sys.argv[:] = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
