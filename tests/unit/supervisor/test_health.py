"""Hung or not: heartbeats, long steps, slow starts, stopped processes, and a supervisor that was away itself."""

from __future__ import annotations

import pytest

from sglmt.ipc.state_page import Phase
from sglmt.supervisor.health import HealthMonitor, Limits, Vitals

KEY = ("tokenizer_worker:0", 1)
LIMITS = Limits(heartbeat_s=20.0, step_s=300.0, stopped_s=4.0)


def vitals(
    phase: int = Phase.READY,
    since_s: float = 0.0,
    beat_s: float = 0.0,
    ready_s: float | None = 0.0,
    state: str = "S",
) -> Vitals:
    return Vitals(phase, since_s, beat_s, ready_s, state)


def judge_at(now_s: float, seen: Vitals) -> str | None:
    """The verdict of a monitor that has been looking all the time."""
    monitor = HealthMonitor(LIMITS)
    monitor.begin_round(now_s - 0.5, {KEY})
    monitor.begin_round(now_s, {KEY})
    return monitor.judge(KEY, seen, now_s)


@pytest.mark.parametrize("phase", [Phase.READY, Phase.DRAINING, Phase.EXITING])
def test_heartbeat_limit(phase: Phase) -> None:
    assert judge_at(120.0, vitals(phase, beat_s=100.0)) is None
    verdict = judge_at(120.1, vitals(phase, beat_s=100.0))
    assert verdict is not None
    assert "20.1 s without a heartbeat" in verdict


def test_a_step_of_the_engine_has_its_own_limit() -> None:
    assert judge_at(400.0, vitals(Phase.STEPPING, since_s=100.0, beat_s=100.0)) is None
    assert judge_at(400.1, vitals(Phase.STEPPING, since_s=100.0, beat_s=100.0)) is not None


def test_a_step_counts_from_its_beginning_not_from_the_last_ready_phase() -> None:
    assert judge_at(1000.0, vitals(Phase.STEPPING, since_s=990.0, beat_s=990.0)) is None


def test_a_slow_start_is_no_hang() -> None:
    assert judge_at(1000.0, vitals(Phase.LOADING, beat_s=1.0, ready_s=None)) is None
    assert judge_at(1000.0, vitals(Phase.BOOTING, beat_s=0.0, ready_s=None)) is None


def test_a_process_that_never_beats_is_judged_from_its_ready_report() -> None:
    assert judge_at(110.0, vitals(beat_s=0.0, ready_s=100.0)) is None
    assert judge_at(121.0, vitals(beat_s=0.0, ready_s=100.0)) is not None


def test_loading_again_while_running_gets_the_longer_limit() -> None:
    assert judge_at(200.0, vitals(Phase.LOADING, beat_s=0.0)) is None
    assert judge_at(301.0, vitals(Phase.LOADING, beat_s=0.0)) is not None


def test_an_unknown_phase_is_judged_by_the_heartbeat() -> None:
    assert judge_at(21.0, vitals(phase=99)) is not None


def rounds(monitor: HealthMonitor, start_s: float, states: str) -> list[str | None]:
    """One check every half second, with these kernel states."""
    verdicts = []
    for number, state in enumerate(states):
        now_s = start_s + number * 0.5
        monitor.begin_round(now_s, {KEY})
        verdicts.append(monitor.judge(KEY, vitals(beat_s=now_s, ready_s=None, state=state), now_s))
    return verdicts


def test_stopped_for_long_counts_even_while_starting() -> None:
    verdicts = rounds(HealthMonitor(LIMITS), 50.0, "T" * 10)
    assert verdicts[:8] == [None] * 8
    assert verdicts[8] is not None
    assert "state T" in verdicts[8]


def test_stopped_for_a_moment_does_not_count() -> None:
    assert rounds(HealthMonitor(LIMITS), 50.0, "TTTTTTSTTTTTTTS") == [None] * 15


def test_traced_by_a_debugger_is_not_stopped() -> None:
    assert rounds(HealthMonitor(LIMITS), 50.0, "t" * 30) == [None] * 30


def test_a_heartbeat_limit_below_the_stopped_limit_wins() -> None:
    monitor = HealthMonitor(Limits(heartbeat_s=1.0, step_s=300.0))
    assert rounds(monitor, 0.0, "TTTT")[2] is not None


def test_time_in_which_the_supervisor_did_not_run_excuses_everybody() -> None:
    monitor = HealthMonitor(LIMITS)
    monitor.begin_round(100.0, {KEY})
    assert monitor.judge(KEY, vitals(beat_s=99.9), 100.0) is None
    monitor.begin_round(500.0, {KEY})  # both were paused; the child has had no chance to beat yet
    assert monitor.judge(KEY, vitals(beat_s=100.0), 500.0) is None
    monitor.begin_round(500.5, {KEY})
    assert monitor.judge(KEY, vitals(beat_s=100.0), 500.5) is None
    for tick in range(1, 50):
        monitor.begin_round(500.5 + tick * 0.5, {KEY})
    assert monitor.judge(KEY, vitals(beat_s=100.0), 525.0) is not None  # and it never took its chance


def test_a_new_life_does_not_inherit_the_stop_of_the_old_one() -> None:
    monitor = HealthMonitor(LIMITS)
    rounds(monitor, 50.0, "TTTTTTT")
    monitor.begin_round(53.5, {("tokenizer_worker:0", 2)})
    monitor.begin_round(54.0, {KEY})
    assert monitor.judge(KEY, vitals(state="T", beat_s=54.0), 54.0) is None
