"""For every test: nothing is left behind, and options of ours in the developer's environment do not leak in."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.instance import Instance
from tests.support.leaks import leaks_since, mark_descendants, take_stock
from tests.support.signal_stack import drop_lost_signal_stack


def pytest_configure(config: pytest.Config) -> None:
    """Before any test: mark what we start, forget the developer's own settings."""
    mark_descendants()
    for variable in [name for name in os.environ if name.startswith("SGLMT_")]:
        del os.environ[variable]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves a process, descriptor, shared-memory segment or run directory behind."""
    before = take_stock()
    yield
    if "openvino" in sys.modules:
        drop_lost_signal_stack()
    left = leaks_since(before)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture
def instance(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Instance]:
    """An instance of the installed command, not yet launched; stopped at the end, its log shown on failure."""
    with Instance(runtime_dir=Path(tmp_path_factory.mktemp("r"))) as made:
        yield made
