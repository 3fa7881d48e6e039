"""What a killed run left behind: processes that are still ending. Runs in the supervisor, before its own children.

Children of a killed supervisor end by themselves within moments. Until they have, they could still unlink or
bind socket paths that the new run uses, so they are waited for, and killed. Who they are is read from the old
state page; a pid counts only when its command line still names the role and index of its slot, and no running
supervisor is its parent.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from pathlib import Path

import psutil

from sglmt.errors import ResourceError
from sglmt.ipc.state_page import GENERATION_WORDS, HEADER_WORDS, MAGIC, SLOT_WORDS, SlotWord
from sglmt.messages.frame import Role
from sglmt.supervisor.rundir import STATE_PAGE, RunDir, list_instances
from sglmt.supervisor.topology import process_name

_SUPERVISOR_TITLE = "sglmt::supervisor"
_MAX_PAGE_BYTES = 64 * 1024 * 1024
_GONE_WITHIN_S = 5.0
_SLOT_HEAD = struct.Struct("<5Q")  # the supervisor's words: role, index, generation, pid, occupied


def end_leftovers(state_page: Path) -> list[str]:
    """Kill the processes an old state page names and wait until they are gone; their names and pids.

    Raises ResourceError, with the pids, when some do not go.
    """
    ours = [(name, process) for pid, name in read_occupants(state_page) if (process := _ours(pid, name))]
    for _, process in ours:
        with contextlib.suppress(psutil.Error):
            process.kill()
    deadline_s = time.monotonic() + _GONE_WITHIN_S
    _, alive = psutil.wait_procs([process for _, process in ours], max(0.0, deadline_s - time.monotonic()))
    if alive:
        pids = ", ".join(str(process.pid) for process in alive)
        raise ResourceError(f"processes of a killed run do not end: pid {pids}; end them and launch again")
    return [f"{name} (pid {process.pid})" for name, process in ours]


def remove_stale(base: Path) -> list[str]:
    """Remove the run directories in `base` whose runs are proven gone, and end their processes; the names."""
    removed: list[str] = []
    for found in list_instances(base):
        if found.alive or not found.record.process.is_proven_gone():
            continue
        with contextlib.suppress(ResourceError):  # somebody claims it just now, or its processes do not end
            stale = RunDir.take(found.path)
            if stale is not None:
                end_leftovers(found.path / STATE_PAGE)
                stale.remove()
                removed.append(found.record.name)
    return removed


def read_occupants(state_page: Path) -> list[tuple[int, str]]:
    """(pid, process name) of every slot that was occupied when the run died. Empty for anything but a page."""
    try:
        fd = os.open(state_page, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            page = file.read(_MAX_PAGE_BYTES)
    except OSError:
        return []
    if len(page) < 8 or struct.unpack_from("<Q", page)[0] != MAGIC:
        return []
    occupants: list[tuple[int, str]] = []
    first = 8 * (HEADER_WORDS + GENERATION_WORDS)
    for offset in range(first, len(page) - _SLOT_HEAD.size + 1, 8 * SLOT_WORDS):
        words = _SLOT_HEAD.unpack_from(page, offset)
        if words[SlotWord.OCCUPIED] and 1 < words[SlotWord.PID] < 2**31 and words[SlotWord.ROLE] in set(Role):
            name = process_name(Role(words[SlotWord.ROLE]), words[SlotWord.INDEX])
            occupants.append((words[SlotWord.PID], name))
    return occupants


def _is_supervised(process: psutil.Process) -> bool:
    """Whether it belongs to a running instance: the pid of a leftover may have been given out again."""
    parent = process.parent()
    return parent is not None and parent.cmdline()[:1] == [_SUPERVISOR_TITLE]


def _ours(pid: int, name: str) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        command = process.cmdline()
        titled = name in command or command[:1] == [f"sglmt::{name}"]
        if titled and process.uids().real == os.getuid() and not _is_supervised(process):
            return process
    except psutil.Error:
        pass
    return None
