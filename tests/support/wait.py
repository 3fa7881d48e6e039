"""Waiting in tests: for a condition, with a deadline, saying why. The only place where tests pass time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
POLL_EVERY_S = 0.02


def wait_until(predicate: Callable[[], T], deadline_s: float, why: str) -> T:
    """Call `predicate` until its result is true and return it.

    `deadline_s` is how many seconds it may take. Raises AssertionError with `why` and the last result.
    """
    end_s = time.monotonic() + deadline_s
    while True:
        result = predicate()
        if result:
            return result
        if time.monotonic() >= end_s:
            raise AssertionError(f"not within {deadline_s:g} s: {why}; last seen: {result!r}")
        time.sleep(POLL_EVERY_S)
