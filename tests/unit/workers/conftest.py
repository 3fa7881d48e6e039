"""Worlds of real processes on a fake network; see `wired`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from sglmt.server_args import ServerArgs
from tests.unit.workers.wired import World


@pytest.fixture
def world_of(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Make a world of the given server arguments; two workers and two detokenizers unless said otherwise."""
    with ExitStack() as stack:

        def make(bad_ids: int = 0, **options: Any) -> World:
            options = {"workers": 2, "detokenizers": 2, "engine": "simulator", **options}
            return stack.enter_context(closing(World(tmp_path, ServerArgs(**options), bad_ids)))

        yield make
