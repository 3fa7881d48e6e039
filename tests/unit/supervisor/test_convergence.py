"""However workers fare and whatever is wanted meanwhile: one successor at a time, nobody asked to leave too soon."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglmt.supervisor.convergence import Deed, Seat, Step, Successor, next_steps

MOST = 6


def test_missing_are_started_and_surplus_leaves_from_the_top() -> None:
    assert next_steps(3, [Seat(1)], 0) == [Step(Deed.START, 0), Step(Deed.START, 2)]
    assert next_steps(1, [Seat(0), Seat(1), Seat(3)], 0) == [Step(Deed.RETIRE, 3), Step(Deed.RETIRE, 1)]
    assert next_steps(2, [Seat(0), Seat(1)], 0) == []


def test_one_is_replaced_at_a_time_and_the_old_one_has_to_be_gone() -> None:
    seats = [Seat(0, due=True), Seat(1, due=True)]
    assert next_steps(2, seats, 0) == [Step(Deed.REPLACE, 0)]
    assert next_steps(2, seats, 1) == []
    assert next_steps(2, [Seat(0, True, Successor.STARTING), Seat(1, True)], 0) == []
    assert next_steps(2, [Seat(0, True, Successor.SERVES), Seat(1, True)], 0) == [Step(Deed.PROMOTE, 0)]


def test_a_failed_successor_is_discarded_and_nobody_follows_it() -> None:
    seats = [Seat(0), Seat(1, True, Successor.FAILED), Seat(2, True)]
    assert next_steps(3, seats, 0) == [Step(Deed.DISCARD, 1)]


@dataclass
class Worker:
    due: bool = False
    successor: Successor = Successor.NONE


class Fleet(RuleBasedStateMachine):
    """The steps are carried out on a small model; successors start, serve or fail as they please."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted = 2
        self.seats: dict[int, Worker] = {}
        self.leaving = 0
        self.failed = False

    def converge(self) -> None:
        seats = [Seat(index, worker.due, worker.successor) for index, worker in self.seats.items()]
        for step in next_steps(self.wanted, seats, self.leaving):
            match step.deed:
                case Deed.START:
                    assert step.index not in self.seats
                    self.seats[step.index] = Worker()
                case Deed.RETIRE:
                    assert step.index >= self.wanted
                    del self.seats[step.index]
                case Deed.REPLACE:
                    assert self.seats[step.index] == Worker(due=True)
                    self.seats[step.index].successor = Successor.STARTING
                case Deed.PROMOTE:
                    assert self.seats[step.index].successor is Successor.SERVES
                    self.seats[step.index] = Worker()
                    self.leaving += 1
                case Deed.DISCARD:
                    self.failed = True
                    for worker in self.seats.values():
                        worker.due = False
                    self.seats[step.index].successor = Successor.NONE

    @rule(count=st.integers(1, MOST))
    def scale(self, count: int) -> None:
        self.wanted = count
        self.converge()

    @rule()
    def roll(self) -> None:
        self.failed = False
        for worker in self.seats.values():
            worker.due = True
        self.converge()

    @precondition(lambda self: any(each.successor is Successor.STARTING for each in self.seats.values()))
    @rule(outcome=st.sampled_from([Successor.SERVES, Successor.FAILED]))
    def successor_gets_on(self, outcome: Successor) -> None:
        for worker in self.seats.values():
            if worker.successor is Successor.STARTING:
                worker.successor = outcome
        self.converge()

    @precondition(lambda self: self.leaving)
    @rule()
    def an_old_one_ends(self) -> None:
        self.leaving -= 1
        self.converge()

    @invariant()
    def at_most_one_more_than_wanted(self) -> None:
        successors = [each for each in self.seats.values() if each.successor is not Successor.NONE]
        assert len(successors) + self.leaving <= 1

    def teardown(self) -> None:
        """Left alone, with successors that serve, it comes to what is wanted and replaces all that are due."""
        for _ in range(3 * MOST + 3):
            for worker in self.seats.values():
                if worker.successor is Successor.STARTING:
                    worker.successor = Successor.SERVES
            self.converge()
            self.leaving = 0
        assert sorted(self.seats) == list(range(self.wanted))
        assert all(worker == Worker() for worker in self.seats.values())


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
