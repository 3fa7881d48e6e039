"""Which processes, in which order, with which limits; spawn turns; stop order; the state of the whole."""

from __future__ import annotations

import pytest

from sglmt.errors import ExitCode
from sglmt.messages.frame import Role
from sglmt.server_args import ServerArgs
from sglmt.supervisor.instance_state import Member, backend_is_up, judge_instance
from sglmt.supervisor.lifecycle import DrainRequested, State, StopRequested
from sglmt.supervisor.spawn_turns import SpawnTurns
from sglmt.supervisor.stopping import ABORT_ANSWERS_S, StopPlan
from sglmt.supervisor.topology import slots_needed, tree_code, wanted_processes

W, D, R, S = Role.TOKENIZER_WORKER, Role.DETOKENIZER, Role.ROUTER, Role.SCHEDULER


def names(args: ServerArgs) -> list[str]:
    return [spec.name for spec in wanted_processes(args)]


def test_multi_mode() -> None:
    assert names(ServerArgs(workers=2, detokenizers=2)) == [
        "scheduler", "detokenizer:0", "detokenizer:1", "router", "tokenizer_worker:0", "tokenizer_worker:1",
    ]  # fmt: skip


def test_single_mode_has_no_router_unless_asked_for() -> None:
    assert names(ServerArgs(workers=1)) == ["scheduler", "detokenizer:0", "tokenizer_worker:0"]
    assert "router" in names(ServerArgs(workers=1, router="always"))


def test_limits_come_from_the_arguments() -> None:
    args = ServerArgs(max_restarts=7, restart_window=33, start_timeout=44, heartbeat_timeout=9)
    for spec in wanted_processes(args):
        policy = spec.policy
        assert (policy.max_restarts, policy.restart_window_s) == (7, 33)
        assert (policy.start_timeout_s, policy.heartbeat_timeout_s) == (44, 9)
        assert policy.fatal_when_spent == spec.essential == (spec.role is not W)


def test_slots_suffice_for_two_lives_of_everybody() -> None:
    args = ServerArgs(workers=8, detokenizers=3)
    assert slots_needed(args) >= 2 * len(wanted_processes(args)) + 16


@pytest.mark.parametrize(
    ("child", "tree"), [(None, 70), (0, 70), (1, 70), (3, 70), (66, 66), (73, 73), (78, 78), (69, 69), (130, 70)]
)
def test_exit_code_of_the_tree(child: int | None, tree: int) -> None:
    assert tree_code(child) == tree


def test_spawn_turns_cap_what_boots_at_once() -> None:
    turns = SpawnTurns(2, turn_s=3.0)
    for name in "abcd":
        turns.request(name)
    turns.request("a")
    assert turns.due(0.0) == ["a", "b"]
    assert turns.due(1.0) == []
    turns.finished("a")
    assert turns.due(1.0) == ["c"]
    assert turns.due(2.9) == []
    assert turns.due(3.0) == ["d"]  # b has had its time


def test_cancelled_turn_is_not_due() -> None:
    turns = SpawnTurns(1)
    turns.request("a")
    turns.request("b")
    assert turns.cancel("a")
    assert not turns.cancel("a")
    assert turns.due(0.0) == ["b"]


def test_stop_goes_stage_by_stage() -> None:
    plan = StopPlan(drain_deadline_s=30.0)
    assert plan.advance({W, D, R, S}, 0.0) == [(W, DrainRequested(30.0 + ABORT_ANSWERS_S))]
    assert plan.advance({W, D, R, S}, 1.0) == []
    assert not plan.past_workers
    assert plan.advance({D, R, S}, 2.0) == [(D, StopRequested(7.0))]
    assert plan.past_workers
    assert plan.advance({R, S}, 3.0) == [(R, StopRequested(8.0))]
    assert not plan.is_done({S})
    assert plan.advance({S}, 4.0) == [(S, StopRequested(9.0))]
    plan.advance(set(), 5.0)
    assert plan.is_done(set())


def test_stop_skips_stages_that_are_empty() -> None:
    plan = StopPlan(0.0)
    commands = plan.advance({S}, 0.0)
    assert [role for role, _ in commands] == [W, D, R, S]
    assert plan.advance(set(), 1.0) == []
    assert plan.is_done(set())


def test_second_request_only_brings_the_end_nearer() -> None:
    plan = StopPlan(drain_deadline_s=30.0)
    assert plan.bring_nearer(40.0) is None
    assert plan.bring_nearer(10.0) == DrainRequested(10.0 + ABORT_ANSWERS_S)
    assert plan.drain_deadline_s == 10.0


def members(**states: State) -> list[Member]:
    roles = {"s": S, "d": D, "r": R, "w": W}
    return [Member(roles[name[0]], name, state, state is State.RUNNING) for name, state in states.items()]


RUN, DEAD = State.RUNNING, State.BACKOFF


def test_instance_is_running_when_everybody_serves() -> None:
    verdict = judge_instance(members(s=RUN, d0=RUN, r=RUN, w0=RUN, w1=RUN), was_ready=False)
    assert (verdict.state, verdict.ready, verdict.reason) == ("running", True, None)


def test_instance_is_starting_until_it_was_ready_once() -> None:
    verdict = judge_instance(members(s=RUN, d0=RUN, w0=State.STARTING), was_ready=False)
    assert (verdict.state, verdict.ready) == ("starting", False)
    assert verdict.reason == "w0 is STARTING"


def test_one_worker_of_several_down_is_degraded_but_ready() -> None:
    verdict = judge_instance(members(s=RUN, d0=RUN, r=RUN, w0=RUN, w1=DEAD), was_ready=True)
    assert (verdict.state, verdict.ready) == ("degraded", True)


@pytest.mark.parametrize("down", ["s", "r", "d0"])
def test_not_ready_without_a_part_that_every_request_needs(down: str) -> None:
    states = {"s": RUN, "d0": RUN, "r": RUN, "w0": RUN} | {down: DEAD}
    verdict = judge_instance(members(**states), was_ready=True)
    assert (verdict.state, verdict.ready) == ("degraded", False)
    assert verdict.reason is not None
    assert "not ready" in verdict.reason


def test_not_ready_without_any_worker() -> None:
    assert not judge_instance(members(s=RUN, d0=RUN, w0=DEAD, w1=DEAD), was_ready=True).ready


def test_an_instance_that_recovers_is_not_ready_and_says_so_before_what_else_is_missing() -> None:
    verdict = judge_instance(members(s=RUN, d0=RUN, r=RUN, w0=RUN), True, "3 requests continue")
    assert (verdict.state, verdict.ready, verdict.reason) == ("recovering", False, "3 requests continue")
    verdict = judge_instance(members(s=RUN, d0=RUN, r=RUN, w0=RUN, w1=DEAD), True, "3 requests continue")
    assert (verdict.state, verdict.ready) == ("recovering", False)
    assert verdict.reason == "3 requests continue; w1 is BACKOFF"
    verdict = judge_instance(members(s=RUN, d0=RUN, r=DEAD, w0=RUN), True, "3 requests continue")
    assert (verdict.state, verdict.ready) == ("degraded", False)
    verdict = judge_instance(members(s=RUN, d0=RUN, r=RUN, w0=RUN), False, "3 requests continue")
    assert (verdict.state, verdict.ready, verdict.reason) == ("starting", False, "3 requests continue")


def test_one_detokenizer_of_two_down_is_degraded_but_ready() -> None:
    verdict = judge_instance(members(s=RUN, d0=RUN, d1=DEAD, w0=RUN), was_ready=True)
    assert (verdict.state, verdict.ready) == ("degraded", True)


def test_probes_can_come_back_only_with_the_whole_backend() -> None:
    assert backend_is_up(members(s=RUN, d0=RUN, r=RUN, w0=DEAD))
    assert not backend_is_up(members(s=RUN, d0=RUN, d1=DEAD, r=RUN, w0=RUN))


def test_failure_exit_codes_are_documented_ones() -> None:
    assert {tree_code(code) for code in range(256)} <= {int(code) for code in ExitCode}
