"""The process title of the launcher and the supervisor: `ps` shows it instead of the command line, keys included."""

from __future__ import annotations

import os

import setproctitle

SUPERVISOR_TITLE = "sglmt::supervisor"
LAUNCHER_TITLE = "sglmt launch"

_NO_ENVIRONMENT = "SPT_NOENV"


def set_title(title: str) -> None:
    """Replace the command line; the environment, which lies behind it, stays readable for its owner."""
    before = os.environ.get(_NO_ENVIRONMENT)
    os.environ[_NO_ENVIRONMENT] = "1"
    setproctitle.setproctitle(title)
    if before is None:
        del os.environ[_NO_ENVIRONMENT]
