"""The state page: one small mmap file in the run directory through which an instance knows itself.

The supervisor creates it, publishes the current generation of every (role, index) and the control version in
it, and reads the rest; each process life has one slot of aligned 8-byte words and is the only writer of it.
Reading and writing cost nanoseconds and never wait. Nothing here is trusted for memory safety: a torn or
absurd value can only be a wrong number.

Layout in words: header [0, 64), generations [64, 64 + GENERATION_WORDS), then SLOT_WORDS a slot, and at the end
one slot a role with the counters of all its lives that are gone (the supervisor writes them).
"""

from __future__ import annotations

import enum
import mmap
import os
import time
from pathlib import Path

from sglmt.errors import SegmentError
from sglmt.messages.frame import Role

MAGIC = 0x5347_4C4D_5453_5431  # "SGLMTST1"
HEADER_WORDS = 64
MAX_DETOKENIZERS = 64
MAX_WORKERS_ON_PAGE = 1024
_GENERATION_BASE = {
    Role.SUPERVISOR: 0,
    Role.ROUTER: 1,
    Role.SCHEDULER: 2,
    Role.DETOKENIZER: 8,
    Role.TOKENIZER_WORKER: 8 + MAX_DETOKENIZERS,
}
GENERATION_WORDS = 8 + MAX_DETOKENIZERS + MAX_WORKERS_ON_PAGE
SLOT_WORDS = 384
UNTIL_STOPPED_NS = (1 << 63) - 1  # a drain without a deadline: `sglmt drain`
_MASK = (1 << 64) - 1


class HeaderWord(enum.IntEnum):
    """Words of the header; the supervisor is their only writer."""

    MAGIC = 0
    INSTANCE_ID = 1
    SLOTS = 2
    CONTROL_VERSION = 5
    WORKERS_REQUESTED = 6
    SEGMENT_REVISION = 7
    DETOKENIZERS = 8
    READY = 10  # 1 while requests can be served
    DRAIN_DEADLINE_NS = 11  # of the whole instance; monotonic, UNTIL_STOPPED_NS: no limit; 0 when not draining
    SLOTS_EVER_USED = 12  # slots at and above this number were never taken: nobody needs to look there
    FOLD_SEQUENCE = 32  # odd while the counters of a dead life move into the totals of its role


class Phase(enum.IntEnum):
    """What a process life says it is doing."""

    EMPTY = 0
    BOOTING = 1
    LOADING = 2  # engine or tokenizer
    READY = 3
    STEPPING = 4  # scheduler: inside the engine
    DRAINING = 5
    EXITING = 6


class SlotWord(enum.IntEnum):
    """Words of a slot. The first eight are the supervisor's, written before the spawn (PID after it)."""

    ROLE = 0
    INDEX = 1
    GENERATION = 2
    PID = 3
    OCCUPIED = 4  # 1 from before the spawn until the life is reaped
    DRAIN_DEADLINE_NS = 5  # monotonic; set just before a drain of this life is asked for, 0 otherwise
    # written by the life itself
    PHASE = 8
    PHASE_SINCE_NS = 9
    HEARTBEAT_NS = 10
    IN_FLIGHT = 11
    CONNECTIONS = 12
    QUEUED = 14
    RUNNING = 15
    BACKLOG_BYTES = 16
    CONTROL_VERSION_APPLIED = 17
    RECOVERING = 18  # scheduler: what is left until everything of an earlier life continues; 0: nothing
    RETAINED = 19  # scheduler: requests of which something is kept, ended ones too; detokenizer: the same
    WORKERS_UNHEARD = 20  # how many of RECOVERING are workers that have not named their requests yet
    # counters: only ever grow within a life; the supervisor folds those of the dead into totals
    REQUESTS_TOTAL = 32
    REQUESTS_OK = 33
    REQUESTS_REFUSED = 34  # 4xx
    REQUESTS_FAILED = 35  # 5xx and error finishes
    REQUESTS_ABORTED = 36
    PROMPT_TOKENS = 37
    OUTPUT_TOKENS = 38
    CACHED_TOKENS = 39
    TTFT_COUNT = 40
    TTFT_SUM_US = 41
    ITL_SUM_US = 42
    E2E_SUM_US = 43
    RESTARTS = 44  # in the totals of a role only, written by the supervisor
    CONNECTIONS_TOTAL = 45
    MESSAGES_IN = 48
    MESSAGES_OUT = 49
    ROWS_IN = 50
    ROWS_OUT = 51
    UNROUTABLE = 52  # no return address, or one that cannot be
    UNDECODABLE = 53  # wrong version, instance, kind, size or content
    LATE_ROWS = 54  # for a request or worker life that is gone: expected after aborts
    DUPLICATE_ROWS = 55
    GAP_ROWS = 56
    DROPPED_MESSAGES = 57
    RESUMES = 58
    RESUBMISSIONS = 59
    STALE_ATTEMPT_ROWS = 60
    APPROXIMATE_RESUMES = 61
    CLIENT_ABORTS = 62
    SLOW_CLIENT_ABORTS = 63
    TTFT_BUCKETS = 64  # 32 words: histogram, see status.histograms
    ITL_BUCKETS = 96
    E2E_BUCKETS = 128
    ABORTS = 160  # 16 words: by cause, see status.metric_words
    ROUTES = 176  # 4 words a route: by outcome, see status.metric_words
    ENCODE_HITS = 376  # prompts whose ids were known
    ENCODE_MISSES = 377
    ENCODED_TOKENS = 378
    REUSED_TOKENS = 379  # ids that came from the tokenization cache


FIRST_COUNTER = SlotWord.REQUESTS_TOTAL


# Looked up once: finding a member of an enumeration costs more than writing a word.
_HEARTBEAT_NS, _PHASE, _PHASE_SINCE_NS = (
    int(word) for word in (SlotWord.HEARTBEAT_NS, SlotWord.PHASE, SlotWord.PHASE_SINCE_NS)
)


class Slot:
    """One process life's words. `words[SlotWord.X]` reads; only the owner writes."""

    __slots__ = ("_base", "_words", "number")

    def __init__(self, words: memoryview, number: int, base: int) -> None:
        self._words = words
        self._base = base
        self.number = number

    def __getitem__(self, word: int) -> int:
        value: int = self._words[self._base + word]
        return value

    def __setitem__(self, word: int, value: int) -> None:
        self._words[self._base + word] = value & _MASK

    def add(self, word: int, amount: int = 1) -> None:
        """Add to a counter (owner only)."""
        self._words[self._base + word] += amount

    def beat(self) -> None:
        """Write the heartbeat: called by the loop that does the work."""
        self._words[self._base + _HEARTBEAT_NS] = time.monotonic_ns()

    def enter(self, phase: Phase) -> None:
        """Write the phase, since when, and a heartbeat."""
        now_ns = time.monotonic_ns()
        self._words[self._base + _PHASE_SINCE_NS] = now_ns
        self._words[self._base + _HEARTBEAT_NS] = now_ns
        self._words[self._base + _PHASE] = int(phase)

    def values(self) -> list[int]:
        """All words at once."""
        values: list[int] = self._words[self._base : self._base + SLOT_WORDS].tolist()
        return values

    def clear(self) -> None:
        """Zero all words (supervisor, before it hands the slot to a new life)."""
        for word in range(SLOT_WORDS):
            self._words[self._base + word] = 0


def _size_bytes(slots: int) -> int:
    """Size of a page of `slots` slots: behind them, the totals of each role."""
    return 8 * (HEADER_WORDS + GENERATION_WORDS + (slots + len(Role)) * SLOT_WORDS)


class StatePage:
    """The mapped page. The supervisor creates it; children open it."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._words = memoryview(mapping).cast("Q")

    @classmethod
    def create(cls, path: Path, instance_id: int, slots: int) -> StatePage:
        """Create the file exclusively, reserve its size, map it. Raises OSError."""
        size = _size_bytes(slots)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size)
            page = cls(mmap.mmap(fd, size))
        finally:
            os.close(fd)
        page.set_header(HeaderWord.INSTANCE_ID, instance_id)
        page.set_header(HeaderWord.SLOTS, slots)
        page.set_header(HeaderWord.MAGIC, MAGIC)
        return page

    @classmethod
    def open(cls, path: Path, instance_id: int) -> StatePage:
        """Map an existing page. Raises SegmentError when it is not the page of this instance."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise SegmentError(f"state page {path} cannot be opened: {error.strerror}") from error
        try:
            size = os.fstat(fd).st_size
            if size < 8 * (HEADER_WORDS + GENERATION_WORDS):
                raise SegmentError(f"state page {path} has {size} bytes, too few to be one")
            page = cls(mmap.mmap(fd, size))
        finally:
            os.close(fd)
        if page.header(HeaderWord.MAGIC) != MAGIC or page.header(HeaderWord.INSTANCE_ID) != instance_id:
            page.close()
            raise SegmentError(f"state page {path} belongs to another instance or version")
        if size != _size_bytes(page.slots):
            slots = page.slots
            page.close()
            raise SegmentError(f"state page {path} has {size} bytes, a page of {slots} slots {_size_bytes(slots)}")
        return page

    def header(self, word: HeaderWord) -> int:
        """One header word."""
        value: int = self._words[word]
        return value

    def set_header(self, word: HeaderWord, value: int) -> None:
        """Supervisor only."""
        self._words[word] = value & _MASK

    def generation(self, role: Role, index: int) -> int:
        """The current generation of a (role, index); 0 when there is none (not started, dead, or leaving)."""
        value: int = self._words[HEADER_WORDS + _GENERATION_BASE[role] + index]
        return value

    def publish_generation(self, role: Role, index: int, generation: int) -> None:
        """Supervisor only: from now on this life is the one to talk to; 0: nobody."""
        self._words[HEADER_WORDS + _GENERATION_BASE[role] + index] = generation

    @property
    def slots(self) -> int:
        """How many slots the page has."""
        return self.header(HeaderWord.SLOTS)

    def slot(self, number: int) -> Slot:
        """Slot `number`. Raises IndexError outside the page."""
        if not 0 <= number < self.slots:
            raise IndexError(f"slot {number} of {self.slots}")
        return Slot(self._words, number, HEADER_WORDS + GENERATION_WORDS + number * SLOT_WORDS)

    def occupy(self, number: int, role: Role, index: int, generation: int) -> Slot:
        """Supervisor only: hand slot `number` to a life that is about to be spawned."""
        slot = self.slot(number)
        slot.clear()
        if number >= self.header(HeaderWord.SLOTS_EVER_USED):
            self.set_header(HeaderWord.SLOTS_EVER_USED, number + 1)
        slot[SlotWord.ROLE] = role
        slot[SlotWord.INDEX] = index
        slot[SlotWord.GENERATION] = generation
        slot[SlotWord.OCCUPIED] = 1
        return slot

    def totals(self, role: Role) -> Slot:
        """The counters of the lives of `role` that are gone; only the supervisor writes them."""
        number = self.slots + role
        return Slot(self._words, number, HEADER_WORDS + GENERATION_WORDS + number * SLOT_WORDS)

    def live(self, role: Role) -> set[tuple[int, int]]:
        """(index, generation) of every life of `role` that is not yet reaped, draining ones included."""
        words = self._words
        first = HEADER_WORDS + GENERATION_WORDS
        return {
            (words[base + SlotWord.INDEX], words[base + SlotWord.GENERATION])
            for base in range(first, first + self.header(HeaderWord.SLOTS_EVER_USED) * SLOT_WORDS, SLOT_WORDS)
            if words[base + SlotWord.OCCUPIED] and words[base + SlotWord.ROLE] == role
        }

    def slots_of(self, role: Role) -> list[Slot]:
        """The slots of the lives of `role` that are not yet reaped."""
        slots = (self.slot(number) for number in range(self.header(HeaderWord.SLOTS_EVER_USED)))
        return [slot for slot in slots if slot[SlotWord.OCCUPIED] and slot[SlotWord.ROLE] == role]

    def serving_slots(self, role: Role) -> list[Slot]:
        """The slots of the lives of `role` that are ready (or inside the engine)."""
        return [slot for slot in self.slots_of(role) if slot[SlotWord.PHASE] in (Phase.READY, Phase.STEPPING)]

    def close(self) -> None:
        """Unmap. Slots taken from this page must not be used afterwards."""
        self._words.release()
        self._mapping.close()
