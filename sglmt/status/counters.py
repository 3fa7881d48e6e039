"""The state page as numbers: counters of every role (the dead included) and what the living do now.

Any process of an instance reads the same page and so tells the same truth. Reading never waits: while the supervisor
moves the counters of a dead life into its role's totals the reading is repeated, and given up after `MAX_TRIES`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from sglmt.ipc.state_page import FIRST_COUNTER, SLOT_WORDS, HeaderWord, Phase, SlotWord, StatePage
from sglmt.messages.frame import Role

MAX_TRIES = 1000  # a fold takes microseconds; only a stopped supervisor takes longer

_UP = frozenset({Phase.READY, Phase.STEPPING, Phase.DRAINING})


@dataclass(frozen=True)
class RoleCounts:
    """One role. `words` are the counters of all its lives, by SlotWord; the rest is about the living."""

    words: list[int]
    up: int = 0
    in_flight: int = 0
    connections: int = 0
    queued: int = 0
    running: int = 0
    backlog_bytes: int = 0


@dataclass(frozen=True)
class Counts:
    """All roles, and whether requests can be served."""

    roles: dict[Role, RoleCounts]
    ready: bool
    workers_requested: int

    def total(self, word: int) -> int:
        """A counter summed over all roles."""
        return sum(counts.words[word] for counts in self.roles.values())


def read_counts(page: StatePage) -> Counts:
    """One consistent reading of the page."""
    for _ in range(MAX_TRIES):
        sequence = page.header(HeaderWord.FOLD_SEQUENCE)
        if sequence % 2:
            os.sched_yield()
            continue
        counts = _read(page)
        if page.header(HeaderWord.FOLD_SEQUENCE) == sequence:
            return counts
    return _read(page)


def _read(page: StatePage) -> Counts:
    living: dict[Role, list[list[int]]] = {role: [] for role in Role}
    for number in range(page.header(HeaderWord.SLOTS_EVER_USED)):
        slot = page.slot(number)
        if slot[SlotWord.OCCUPIED]:
            words = slot.values()
            if words[SlotWord.ROLE] in living:
                living[Role(words[SlotWord.ROLE])].append(words)
    return Counts(
        roles={role: _role(page.totals(role).values(), lives) for role, lives in living.items()},
        ready=bool(page.header(HeaderWord.READY)),
        workers_requested=page.header(HeaderWord.WORKERS_REQUESTED),
    )


def _role(dead: list[int], lives: list[list[int]]) -> RoleCounts:
    words = [0] * FIRST_COUNTER + [
        dead[word] + sum(life[word] for life in lives) for word in range(FIRST_COUNTER, SLOT_WORDS)
    ]
    return RoleCounts(
        words=words,
        up=sum(life[SlotWord.PHASE] in _UP for life in lives),
        in_flight=sum(life[SlotWord.IN_FLIGHT] for life in lives),
        connections=sum(life[SlotWord.CONNECTIONS] for life in lives),
        queued=sum(life[SlotWord.QUEUED] for life in lives),
        running=sum(life[SlotWord.RUNNING] for life in lives),
        backlog_bytes=sum(life[SlotWord.BACKLOG_BYTES] for life in lives),
    )
