"""Real sockets in a short directory: a socket path has at most 107 bytes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglmt.ipc.queues import Transport


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A short private directory."""
    path = Path(tempfile.mkdtemp(prefix="q"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def transport() -> Iterator[Transport]:
    """The queues of one process."""
    made = Transport()
    yield made
    made.poller.close()
