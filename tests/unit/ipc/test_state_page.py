"""The state page: one writer a word, foreign pages refused, lives and generations as published."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglmt.errors import SegmentError
from sglmt.ipc.state_page import (
    FIRST_COUNTER,
    GENERATION_WORDS,
    HEADER_WORDS,
    MAX_DETOKENIZERS,
    MAX_WORKERS_ON_PAGE,
    SLOT_WORDS,
    HeaderWord,
    Phase,
    SlotWord,
    StatePage,
)
from sglmt.messages.frame import Role
from sglmt.server_args import MAX_DETOKENIZERS as MOST_DETOKENIZERS
from sglmt.server_args import MAX_WORKERS

INSTANCE = 0xFEDC_BA98_7654_3210
SLOTS = 4


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "page"


@pytest.fixture
def page(path: Path) -> Iterator[StatePage]:
    made = StatePage.create(path, INSTANCE, SLOTS)
    yield made
    made.close()


def occupy(page: StatePage, number: int, role: Role, index: int, generation: int, phase: Phase) -> None:
    page.occupy(number, role, index, generation).enter(phase)


def test_a_page_is_private_and_zero_but_for_its_header(page: StatePage, path: Path) -> None:
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == 8 * (HEADER_WORDS + GENERATION_WORDS + (SLOTS + len(Role)) * SLOT_WORDS)
    assert page.slots == SLOTS
    assert page.header(HeaderWord.READY) == 0
    assert all(page.slot(number)[word] == 0 for number in range(SLOTS) for word in SlotWord)


def test_an_existing_file_or_link_is_never_reused(page: StatePage, path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    for taken in (path, link):
        with pytest.raises(FileExistsError):
            StatePage.create(taken, INSTANCE, SLOTS)


def test_what_one_process_writes_another_reads(page: StatePage, path: Path) -> None:
    child = StatePage.open(path, INSTANCE)
    child.slot(2)[SlotWord.IN_FLIGHT] = 7
    child.slot(2).add(SlotWord.ROWS_IN, 3)
    child.slot(2).add(SlotWord.ROWS_IN)
    page.set_header(HeaderWord.CONTROL_VERSION, 9)
    page.publish_generation(Role.SCHEDULER, 0, 4)
    assert page.slot(2)[SlotWord.IN_FLIGHT] == 7
    assert page.slot(2)[SlotWord.ROWS_IN] == 4
    assert child.header(HeaderWord.CONTROL_VERSION) == 9
    assert child.generation(Role.SCHEDULER, 0) == 4
    child.close()


def test_the_page_of_another_instance_is_refused_by_name(page: StatePage, path: Path) -> None:
    with pytest.raises(SegmentError, match=r"page belongs to another instance"):
        StatePage.open(path, INSTANCE + 1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes"),
        (b"\0" * 8 * HEADER_WORDS, "too few"),
        (b"\0" * 8 * (HEADER_WORDS + GENERATION_WORDS), "another instance or version"),
        (b"\xff" * 8 * (HEADER_WORDS + GENERATION_WORDS), "another instance or version"),
    ],
)
def test_what_is_no_page_is_refused_by_name(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(SegmentError, match=message):
        StatePage.open(path, INSTANCE)


def test_a_page_that_is_shorter_than_it_says_is_refused(page: StatePage, path: Path) -> None:
    size = path.stat().st_size
    for wrong in (size - 8, size + 8):
        os.truncate(path, wrong)
        with pytest.raises(SegmentError, match=f"has {wrong} bytes, a page of 4 slots {size}"):
            StatePage.open(path, INSTANCE)


def test_missing_files_links_and_pipes_are_refused_by_name(tmp_path: Path, page: StatePage, path: Path) -> None:
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name in ("missing", "link", "pipe", "directory"):
        with pytest.raises(SegmentError, match=name):
            StatePage.open(tmp_path / name, INSTANCE)


def test_slots_outside_the_page_are_an_error(page: StatePage) -> None:
    for number in (-1, SLOTS):
        with pytest.raises(IndexError):
            page.slot(number)


def test_a_life_is_live_until_its_slot_is_given_back(page: StatePage) -> None:
    occupy(page, 0, Role.TOKENIZER_WORKER, 0, 1, Phase.DRAINING)
    occupy(page, 1, Role.TOKENIZER_WORKER, 0, 2, Phase.READY)
    occupy(page, 2, Role.DETOKENIZER, 0, 5, Phase.READY)
    assert page.live(Role.TOKENIZER_WORKER) == {(0, 1), (0, 2)}
    assert page.live(Role.DETOKENIZER) == {(0, 5)}
    page.slot(0).clear()
    assert page.live(Role.TOKENIZER_WORKER) == {(0, 2)}


def test_a_slot_is_handed_over_clean(page: StatePage) -> None:
    occupy(page, 3, Role.ROUTER, 0, 1, Phase.READY)
    page.slot(3).add(SlotWord.MESSAGES_IN, 5)
    page.slot(3)[SlotWord.OCCUPIED] = 0
    slot = page.occupy(3, Role.DETOKENIZER, 2, 9)
    assert (slot[SlotWord.ROLE], slot[SlotWord.INDEX], slot[SlotWord.GENERATION]) == (Role.DETOKENIZER, 2, 9)
    assert (slot[SlotWord.MESSAGES_IN], slot[SlotWord.PHASE]) == (0, Phase.EMPTY)
    assert page.live(Role.DETOKENIZER) == {(2, 9)}


def test_the_totals_of_a_role_are_no_slot_of_a_life(page: StatePage) -> None:
    for role in Role:
        page.totals(role).add(SlotWord.ROWS_IN, 10 + role)
    assert [page.totals(role)[SlotWord.ROWS_IN] for role in Role] == [10 + role for role in Role]
    assert all(page.slot(number)[SlotWord.ROWS_IN] == 0 for number in range(SLOTS))


def test_only_ready_and_stepping_lives_serve(page: StatePage) -> None:
    for number, phase in enumerate((Phase.LOADING, Phase.READY, Phase.STEPPING, Phase.DRAINING)):
        occupy(page, number, Role.SCHEDULER, number, 1, phase)
    assert [slot.number for slot in page.serving_slots(Role.SCHEDULER)] == [1, 2]
    page.slot(1)[SlotWord.OCCUPIED] = 0
    assert [slot.number for slot in page.serving_slots(Role.SCHEDULER)] == [2]
    assert page.serving_slots(Role.ROUTER) == []


def test_clearing_a_slot_leaves_its_neighbours(page: StatePage) -> None:
    for number in range(SLOTS):
        page.slot(number)[SlotWord.ROLE] = page.slot(number)[max(SlotWord)] = 1
    page.slot(1).clear()
    assert [page.slot(number)[SlotWord.ROLE] for number in range(SLOTS)] == [1, 0, 1, 1]
    assert [page.slot(number)[max(SlotWord)] for number in range(SLOTS)] == [1, 0, 1, 1]


def test_every_role_and_index_has_a_generation_of_its_own(page: StatePage) -> None:
    places = [
        (Role.SUPERVISOR, 0),
        (Role.ROUTER, 0),
        (Role.SCHEDULER, 0),
        *((Role.DETOKENIZER, index) for index in range(MAX_DETOKENIZERS)),
        *((Role.TOKENIZER_WORKER, index) for index in range(MAX_WORKERS_ON_PAGE)),
    ]
    for number, (role, index) in enumerate(places, 1):
        page.publish_generation(role, index, number)
    assert [page.generation(role, index) for role, index in places] == list(range(1, len(places) + 1))
    assert all(page.slot(0)[word] == 0 for word in SlotWord)
    assert page.slots == SLOTS


def test_the_page_has_room_for_what_may_be_asked_for() -> None:
    assert MAX_WORKERS_ON_PAGE >= MAX_WORKERS
    assert MAX_DETOKENIZERS >= MOST_DETOKENIZERS


def test_words_of_a_slot_do_not_overlap_and_fit() -> None:
    assert len({int(word) for word in SlotWord}) == len(SlotWord)
    assert max(SlotWord) < SLOT_WORDS
    assert SlotWord.OCCUPIED < 8 <= SlotWord.PHASE < FIRST_COUNTER


def test_phase_and_heartbeat_are_monotonic_times(page: StatePage) -> None:
    slot = page.slot(0)
    slot.enter(Phase.LOADING)
    since = slot[SlotWord.PHASE_SINCE_NS]
    assert slot[SlotWord.PHASE] == Phase.LOADING
    assert slot[SlotWord.HEARTBEAT_NS] == since > 0
    slot.beat()
    assert slot[SlotWord.HEARTBEAT_NS] >= since == slot[SlotWord.PHASE_SINCE_NS]
