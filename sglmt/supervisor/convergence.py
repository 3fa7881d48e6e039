"""From the workers there are to the workers that are wanted: what to do next. Pure; used by the supervisor.

Scaling, rolling restarts, reloads and recycling all change what is wanted and let `next_steps` lead there, however
the workers fare meanwhile. A worker is replaced by a successor that serves before the old one is asked to leave,
one at a time, so that there is at most one worker more than wanted; the first successor that fails ends the roll
and the old one stays.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Successor(enum.Enum):
    """The process that is to take a worker's place."""

    NONE = "none"
    STARTING = "starting"
    SERVES = "serves"
    FAILED = "failed"  # its first life ended: it is not tried again


@dataclass(frozen=True)
class Seat:
    """One worker index that has a process. `due`: it is to be replaced."""

    index: int
    due: bool = False
    successor: Successor = Successor.NONE


class Deed(enum.Enum):
    """What can be done about one index."""

    START = "start"  # a process for an index that has none
    RETIRE = "retire"  # ask it to leave, for good, and its successor too
    REPLACE = "replace"  # start a successor beside it
    PROMOTE = "promote"  # its successor takes its place; it is asked to leave
    DISCARD = "discard"  # its successor failed: the roll ends here


@dataclass(frozen=True)
class Step:
    """One deed."""

    deed: Deed
    index: int


def next_steps(wanted: int, seats: Sequence[Seat], replaced_still_leaving: int) -> list[Step]:
    """What to do now for `wanted` workers with indices from 0. `replaced_still_leaving`: old lives of a roll that
    have not ended; the next replacement waits for them."""
    taken = {seat.index for seat in seats}
    steps = [Step(Deed.START, index) for index in range(wanted) if index not in taken]
    surplus = sorted((seat for seat in seats if seat.index >= wanted), key=lambda seat: -seat.index)
    steps += [Step(Deed.RETIRE, seat.index) for seat in surplus]
    staying = sorted((seat for seat in seats if seat.index < wanted), key=lambda seat: seat.index)
    failed = [seat for seat in staying if seat.successor is Successor.FAILED]
    steps += [Step(Deed.DISCARD, seat.index) for seat in failed]
    steps += [Step(Deed.PROMOTE, seat.index) for seat in staying if seat.successor is Successor.SERVES]
    rolling = any(seat.successor is not Successor.NONE for seat in staying)
    if not rolling and not replaced_still_leaving:
        steps += [Step(Deed.REPLACE, seat.index) for seat in staying if seat.due][:1]
    return steps
