"""Keeps a library's lost signal stack from killing the test process.

OpenVINO's CPU plugin gives the thread that loads it an alternate signal stack and frees it when it is unloaded. When
several engines of one process come and go in another order than last in, first out, the thread is left with a freed
one, and the next signal that Python handles is fatal, in some other file's test. Instances are not touched by this:
a scheduler has one engine for its life.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_SS_DISABLE = 2


class _Stack(ctypes.Structure):
    """stack_t of sigaltstack(2)."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


def drop_lost_signal_stack() -> bool:
    """Give up this thread's alternate signal stack when its memory is no longer there; whether that was so."""
    libc = ctypes.CDLL(None)
    current = _Stack()
    libc.sigaltstack(None, ctypes.byref(current))
    if current.flags & _SS_DISABLE or not current.address or _is_mapped(current.address):
        return False
    libc.sigaltstack(ctypes.byref(_Stack(None, _SS_DISABLE, 0)), None)
    return True


def _is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, last = line.split(" ", 1)[0].partition("-")
        if int(first, 16) <= address < int(last, 16):
            return True
    return False
