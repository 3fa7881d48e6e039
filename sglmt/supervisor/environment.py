"""What a child inherits besides descriptors: environment and limits. Used by the supervisor before it spawns.

Children are told everything through the bootstrap pipe and the segment, so none of our variables is passed on:
`/proc/<pid>/environ` of a child holds no secret of ours, and a service manager's socket is not theirs.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path

from sglmt.messages.frame import Role
from sglmt.supervisor.topology import FRONT_END_ROLES

_NOT_FOR_CHILDREN = frozenset(
    {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"}
)
_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
_SITE_DIRECTORIES = frozenset({"site-packages", "dist-packages"})
MAX_OPEN_FILES = 1 << 20


def child_environment(role: Role | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child of `role`; None: a helper that is no process of the topology."""
    child = {
        name: value
        for name, value in environ.items()
        if not name.startswith("SGLMT_") and name not in _NOT_FOR_CHILDREN
    }
    child["TOKENIZERS_PARALLELISM"] = "false"
    child["PYTHONUNBUFFERED"] = "1"  # the last words of a child that is killed
    if role is None or role in FRONT_END_ROLES:
        child.update(dict.fromkeys(_ONE_THREAD, "1"))
        child["CUDA_VISIBLE_DEVICES"] = ""
    root = package_root()
    if not _SITE_DIRECTORIES.intersection(root.parts):
        # A checkout: children start with -P, so that nothing in the working directory can shadow a module.
        child["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), child.get("PYTHONPATH"))))
    return child


def package_root() -> Path:
    """The directory this package is imported from."""
    return Path(__file__).resolve().parents[2]


def raise_open_files_limit() -> int:
    """Raise the soft limit of open files to the hard one, for this process and its children; the result."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):
        return soft
    return wanted


def seal_inherited_descriptors() -> None:
    """Mark every descriptor above 2 close-on-exec, and see that 0, 1 and 2 exist.

    A shell's redirection (`9>lock`) would otherwise live on in every child, and a pipe of ours could become
    somebody's standard output.
    """
    while (fd := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2:
                os.set_inheritable(int(name), False)
        except OSError:  # the descriptor of the listing itself
            continue
