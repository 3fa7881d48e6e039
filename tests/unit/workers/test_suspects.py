"""Who an engine died on: written down before the call, struck out after it, found by the next life."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglmt.delivery.ledger import Record
from sglmt.workers.admission import AdmissionQueue
from sglmt.workers.suspects import SuspectFile

MAX_KEYS = 4


class Crash(BaseException):
    """The engine takes the process with it."""


@contextmanager
def life(path: Path, max_keys: int = MAX_KEYS) -> Iterator[SuspectFile]:
    """One life of a scheduler with the file at `path`."""
    made = SuspectFile(path, max_keys)
    yield made
    made._mapping.close()


def die_inside(path: Path, keys: set[int], on_trial: bool, max_keys: int = MAX_KEYS) -> None:
    """A life whose engine dies with these unmoved requests in it."""
    with life(path, max_keys) as file, pytest.raises(Crash), file.inside_engine(keys, on_trial):
        raise Crash


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "suspects"


def test_a_first_life_suspects_nobody(path: Path) -> None:
    with life(path) as file:
        assert (file.suspects, file.convicted) == (set(), set())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_unmoved_requests_of_a_call_that_never_returned_are_suspects(path: Path) -> None:
    die_inside(path, {7, 2**64 - 1}, on_trial=False)
    with life(path) as file:
        assert (file.suspects, file.convicted) == ({7, 2**64 - 1}, set())


def test_a_call_that_returned_leaves_no_suspects(path: Path) -> None:
    with life(path) as file, file.inside_engine({7}, on_trial=False):
        assert struct.unpack_from("<IIQ", path.read_bytes()) == (1, 0, 7)
    with life(path) as file:
        assert (file.suspects, file.convicted) == (set(), set())


def test_a_death_outside_the_engine_leaves_no_suspects(path: Path) -> None:
    with life(path) as file:
        with file.inside_engine({7}, on_trial=False):
            pass
        with file.inside_engine(set(), on_trial=False):
            assert struct.unpack_from("<I", path.read_bytes()) == (0,)
    with life(path) as file:
        assert file.suspects == set()


def test_only_a_death_on_trial_convicts(path: Path) -> None:
    die_inside(path, {7, 8}, on_trial=False)
    die_inside(path, {7}, on_trial=True)
    with life(path) as file:
        assert (file.suspects, file.convicted) == (set(), {7})


def test_the_next_life_starts_with_a_clean_file(path: Path) -> None:
    die_inside(path, {7}, on_trial=True)
    with life(path):
        pass
    with life(path) as file:
        assert (file.suspects, file.convicted) == (set(), set())


def test_more_requests_than_the_file_holds_are_cut(path: Path) -> None:
    die_inside(path, set(range(100)), on_trial=False)
    with life(path) as file:
        assert len(file.suspects) == MAX_KEYS
        assert file.suspects <= set(range(100))


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 8, b"\xff" * (8 + 8 * MAX_KEYS), b"\xff" * 1000])
def test_any_content_is_survived(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with life(path) as file:
        assert len(file.suspects | file.convicted) <= MAX_KEYS
    with life(path) as file:
        assert (file.suspects, file.convicted) == (set(), set())


def test_a_changed_limit_starts_anew(path: Path) -> None:
    die_inside(path, {7}, on_trial=False)
    with life(path, MAX_KEYS + 1) as file:
        assert file.suspects == set()


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    path.symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        SuspectFile(path, MAX_KEYS)
    assert (tmp_path / "target").read_bytes() == b"precious"
    assert os.path.islink(path)


# the queue they wait in


def record(key: int, attempt: int = 1) -> Record:
    return Record(key, attempt, f"r{key}", key, None, [])


def popped_keys(queue: AdmissionQueue) -> list[int]:
    """Everything that may be admitted now, in order."""
    return [popped.key for popped in iter(queue.pop, None)]


def test_ordinary_requests_go_by_priority_then_arrival_and_continued_ones_first() -> None:
    queue = AdmissionQueue()
    for key, attempt, priority in ((1, 1, 0), (2, 1, 5), (3, 2, 0), (4, 1, 5), (5, 1, -1)):
        queue.push(record(key, attempt), priority, suspect=False)
    assert popped_keys(queue) == [2, 4, 3, 1, 5]
    assert queue.pop() is None
    assert len(queue) == 0


def test_a_suspect_is_not_overtaken_by_what_came_later() -> None:
    queue = AdmissionQueue()
    queue.push(record(1), 0, suspect=False)
    queue.push(record(2, 2), 0, suspect=True)
    queue.push(record(3), 9, suspect=False)
    queue.push(record(4, 2), 9, suspect=False)  # continued after the same death
    assert popped_keys(queue) == [4]  # 3 has a higher priority than 1, and must wait
    suspect = queue.pop_suspect()
    assert suspect is not None
    assert suspect.key == 2
    assert popped_keys(queue) == [3, 1]


def test_a_suspect_that_was_given_up_holds_nobody_back() -> None:
    queue = AdmissionQueue()
    queue.push(record(1, 2), 0, suspect=True)
    queue.push(record(2), 0, suspect=False)
    assert queue.pop() is None
    queue.discard(1)
    popped = queue.pop()
    assert popped is not None
    assert popped.key == 2
    assert queue.pop_suspect() is None


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2), st.booleans(), st.booleans()), max_size=20))
def test_everything_that_waits_has_its_turn_once(steps: list[tuple[int, int, bool, bool]]) -> None:
    queue, waiting = AdmissionQueue(), {}
    for key, priority, suspect, discard in steps:
        if discard:
            queue.discard(key)
            waiting.pop(key, None)
        else:
            waiting[key] = record(key)
            queue.push(waiting[key], priority, suspect)
    assert len(queue) == len(waiting)
    came = []
    while (popped := queue.pop() or queue.pop_suspect()) is not None:
        came.append(popped)
    assert sorted(came, key=lambda one: one.key) == [waiting[key] for key in sorted(waiting)]


@pytest.mark.parametrize("suspect", [False, True])
def test_discarded_requests_are_not_kept_while_nobody_is_admitted(suspect: bool) -> None:
    queue = AdmissionQueue()
    waiting = Record(1, 1, "a", 1, None, [])
    queue.push(waiting, 0, suspect)
    for key in range(2, 1000):
        queue.push(Record(key, 1, str(key), key, None, []), 0, suspect)
        queue.discard(key)
    assert len(queue._heap) + len(queue._suspects) < 100
    assert (queue.pop_suspect() if suspect else queue.pop()) is waiting
