"""Orphans that became our children are reaped, our own children are not; tried as a subreaper instead of pid 1."""

from __future__ import annotations

import subprocess
import sys

ADOPTER = """
import ctypes, os, subprocess, sys, time
from sglmt.supervisor.reaper import exit_status, has_ended, reap_strangers
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
end_s = time.monotonic() + 10

def until(predicate):
    while not predicate():
        assert time.monotonic() < end_s
        time.sleep(0.01)

own = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 7"], os.environ)
until(lambda: has_ended(own))
assert reap_strangers(lambda pid: pid == own) == []
assert exit_status(own) == (7, None)
assert exit_status(own) == (None, None)
middle = os.posix_spawn("/bin/sh", ["sh", "-c", "for i in 1 2 3; do sh -c 'exit 5' & done; exit 0"], os.environ)
os.waitpid(middle, 0)
strangers = []
until(lambda: strangers.extend(reap_strangers(lambda pid: False)) or len(strangers) == 3)
own = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 3"], os.environ)
until(lambda: has_ended(own))
middle = os.posix_spawn("/bin/sh", ["sh", "-c", "for i in 1 2; do sh -c 'exit 5' & done; exit 0"], os.environ)
os.waitpid(middle, 0)
strangers = []
until(lambda: strangers.extend(reap_strangers(lambda pid: pid == own)) or len(strangers) == 2)
assert exit_status(own) == (3, None)  # nobody had reaped it yet, and the strangers behind it were taken all the same
killed = os.posix_spawn("/bin/sh", ["sh", "-c", "kill -9 $$"], os.environ)
until(lambda: has_ended(killed))
assert exit_status(killed) == (None, 9)
assert reap_strangers(lambda pid: False) == []
print("fine")
"""


def test_strangers_are_reaped_and_children_of_our_own_are_left_to_their_owner() -> None:
    done = subprocess.run([sys.executable, "-c", ADOPTER], capture_output=True, text=True, timeout=30, check=False)
    assert (done.stdout, done.stderr) == ("fine\n", "")
