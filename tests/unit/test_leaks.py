"""The leak fixture's own eyes: it sees what a test must not leave."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import psutil

from tests.support import leaks
from tests.support.wait import wait_until


def test_a_child_and_a_descriptor_are_seen() -> None:
    before = leaks.take_stock()
    fd = os.open(__file__, os.O_RDONLY)
    with subprocess.Popen(["sleep", "600"]) as child:
        left = leaks.differences(before, leaks.take_stock())
        child.kill()
    os.close(fd)
    assert any("sleep 600" in one and str(child.pid) in one for one in left)
    assert any(one.startswith(f"descriptor {fd} ") for one in left)
    assert leaks.differences(before, leaks.take_stock()) == []


def test_a_process_that_left_the_family_is_seen() -> None:
    before = leaks.take_stock()
    done = subprocess.run(
        ["sh", "-c", "setsid sleep 601 >/dev/null 2>&1 & echo $!"], capture_output=True, text=True, check=True
    )
    pid = int(done.stdout)
    left = wait_until(lambda: leaks.differences(before, leaks.take_stock()), 5, "the orphan is seen")
    os.kill(pid, signal.SIGKILL)
    assert any(str(pid) in one for one in left)
    wait_until(lambda: not psutil.pid_exists(pid) or leaks.differences(before, leaks.take_stock()) == [], 5, "it ended")


def test_a_segment_of_a_dead_launcher_is_seen() -> None:
    before = leaks.take_stock()
    with subprocess.Popen(["true"]) as dead:
        pass
    segment = Path(leaks.SHM_DIR) / f"{leaks.SEGMENT_PREFIX}{dead.pid}_{'0' * 16}"
    segment.write_bytes(b"")
    somebody_elses = leaks.differences(before, leaks.take_stock())
    leaks.note_launcher(dead.pid)
    left = leaks.differences(before, leaks.take_stock())
    segment.unlink()
    assert somebody_elses == []
    assert left == [f"shared memory {segment.name}"]
