"""/metrics from the state page: exact, monotonic over deaths, the same series for everybody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglmt.ipc.state_page import HeaderWord, Phase, Slot, SlotWord, StatePage
from sglmt.messages.frame import Role
from sglmt.status.counters import read_counts
from sglmt.status.histograms import LATENCY_BUCKETS, observe
from sglmt.status.metric_words import (
    MAX_ROUTES,
    ROUTES,
    AbortCause,
    Outcome,
    abort_word,
    count_early_end,
    outcome_of,
    route_word,
)
from sglmt.status.metrics import BuildInfo, exposition
from sglmt.supervisor.slots import SlotTable

BUILD = BuildInfo(version="1", engine="simulator", model='m"\n', mode="multi")
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def page(tmp_path: Path) -> Iterator[StatePage]:
    made = StatePage.create(tmp_path / "state", instance_id=7, slots=6)
    yield made
    made.close()


def scrape(page: StatePage) -> Series:
    """Every sample by name and labels; parsing is the library's."""
    text = exposition(read_counts(page), BUILD).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    return series[name, tuple(sorted(labels.items()))]


def worker(table: SlotTable, index: int, generation: int = 1) -> Slot:
    slot = table.occupy(Role.TOKENIZER_WORKER, index, generation)
    slot.enter(Phase.READY)
    return slot


def test_two_workers_are_summed_and_gauges_are_of_the_living(page: StatePage) -> None:
    table = SlotTable(page)
    slots = [worker(table, 0), worker(table, 1)]
    scheduler = table.occupy(Role.SCHEDULER, 0, 1)
    scheduler.enter(Phase.STEPPING)
    scheduler[SlotWord.RUNNING], scheduler[SlotWord.QUEUED] = 3, 4
    for number, slot in enumerate(slots, start=1):
        slot.add(route_word("/generate", Outcome.OK), number)
        slot.add(SlotWord.OUTPUT_TOKENS, 10 * number)
        slot[SlotWord.IN_FLIGHT] = number
        slot.add(abort_word(AbortCause.DEADLINE))
    series = scrape(page)
    assert value(series, "sglmt_http_requests_total", route="/generate", outcome="ok") == 3
    assert value(series, "sglmt_generated_tokens_total") == 30
    assert value(series, "sglmt_requests_in_flight") == 3
    assert value(series, "sglmt_requests_running") == 3
    assert value(series, "sglmt_requests_queued") == 4
    assert value(series, "sglmt_aborts_total", cause="deadline") == 2
    assert value(series, "sglmt_processes_up", role="tokenizer_worker") == 2
    assert value(series, "sglmt_processes_up", role="router") == 0
    assert value(
        series, "sglmt_build_info", version="1", engine="simulator", model='m"\n', mode="multi",
        python=next(dict(labels)["python"] for name, labels in series if name == "sglmt_build_info"),
    ) == 1  # fmt: skip


def test_a_death_changes_gauges_and_no_counter(page: StatePage) -> None:
    table = SlotTable(page)
    doomed, other = worker(table, 0), worker(table, 1)
    for slot in (doomed, other):
        slot.add(route_word("/generate", Outcome.OK), 5)
        slot[SlotWord.IN_FLIGHT] = 2
        observe(slot, SlotWord.TTFT_BUCKETS, 900, LATENCY_BUCKETS)
        slot.add(SlotWord.TTFT_SUM_US, 900)
    before = scrape(page)
    table.release(doomed)
    dead = scrape(page)
    assert [key for key in dead if key[0].endswith(("_total", "_bucket", "_sum")) and dead[key] != before[key]] == []
    assert value(dead, "sglmt_processes_up", role="tokenizer_worker") == 1
    table.count_restarts(Role.TOKENIZER_WORKER, 1)
    worker(table, 0, 2).add(route_word("/generate", Outcome.OK))
    after = scrape(page)
    assert value(after, "sglmt_requests_in_flight") == 2
    assert value(after, "sglmt_restarts_total", role="tokenizer_worker") == 1
    assert value(after, "sglmt_http_requests_total", route="/generate", outcome="ok") == 11
    assert value(after, "sglmt_time_to_first_token_seconds_count") == 2
    assert value(after, "sglmt_time_to_first_token_seconds_sum") == pytest.approx(0.0018)
    counters = [key for key in before if key[0].endswith(("_total", "_bucket", "_count", "_sum"))]
    assert len(counters) > 100
    assert [key for key in counters if after[key] < before[key]] == []
    assert after.keys() == before.keys()


def test_the_same_series_with_nobody_there(page: StatePage, tmp_path: Path) -> None:
    empty = scrape(page)
    table = SlotTable(page)
    for index in range(4):
        worker(table, index).add(route_word("/nowhere", Outcome.REFUSED))
    full = scrape(page)
    assert full.keys() == empty.keys()
    assert value(full, "sglmt_http_requests_total", route="other", outcome="refused") == 4


def test_a_reading_during_a_fold_is_repeated(page: StatePage, monkeypatch: pytest.MonkeyPatch) -> None:
    table = SlotTable(page)
    slot = worker(table, 0)
    slot.add(SlotWord.OUTPUT_TOKENS, 8)
    page.totals(Role.TOKENIZER_WORKER).add(SlotWord.OUTPUT_TOKENS, 8)  # counted twice for a moment
    page.set_header(HeaderWord.FOLD_SEQUENCE, 1)
    waits: list[int] = []

    def the_supervisor_goes_on() -> None:
        waits.append(1)
        slot.clear()
        page.set_header(HeaderWord.FOLD_SEQUENCE, 2)

    monkeypatch.setattr("os.sched_yield", the_supervisor_goes_on)
    assert read_counts(page).roles[Role.TOKENIZER_WORKER].words[SlotWord.OUTPUT_TOKENS] == 8
    assert waits == [1]


def test_a_supervisor_that_never_finishes_a_fold_stops_nobody(page: StatePage) -> None:
    page.set_header(HeaderWord.FOLD_SEQUENCE, 1)
    assert read_counts(page).total(SlotWord.OUTPUT_TOKENS) == 0


def test_histograms_are_cumulative_and_bounds_belong_to_their_bucket(page: StatePage) -> None:
    slot = worker(SlotTable(page), 0)
    for value_us in (0, 500, 501, LATENCY_BUCKETS[-1], LATENCY_BUCKETS[-1] + 1):
        observe(slot, SlotWord.ITL_BUCKETS, value_us, LATENCY_BUCKETS)
    series = scrape(page)
    name = "sglmt_inter_token_latency_seconds_bucket"
    assert value(series, name, le="0.0005") == 2
    assert value(series, name, le="0.001") == 3
    assert value(series, name, le="120.0") == 4
    assert value(series, name, le="+Inf") == 5
    assert value(series, "sglmt_inter_token_latency_seconds_count") == 5


def test_the_tables_fit_into_a_slot() -> None:
    assert len(ROUTES) <= MAX_ROUTES
    assert len(set(ROUTES)) == len(ROUTES)
    assert abort_word(max(AbortCause)) < SlotWord.ROUTES
    words = {route_word(path, outcome) for path in ROUTES for outcome in Outcome}
    assert len(words) == len(ROUTES) * len(Outcome)
    assert SlotWord.E2E_BUCKETS + len(LATENCY_BUCKETS) < SlotWord.ABORTS


@pytest.mark.parametrize(
    ("code", "status", "cause"),
    [
        ("aborted", 499, AbortCause.ABORT_REQUEST),
        ("deadline_exceeded", 504, AbortCause.DEADLINE),
        ("engine_died", 500, AbortCause.ENGINE_ERROR),
        ("queue_full", 429, AbortCause.QUEUE_FULL),
        ("something_new", 503, AbortCause.OTHER),
        (None, None, AbortCause.OTHER),
        ("duplicate_rid", 400, None),
    ],
)
def test_causes(page: StatePage, code: str | None, status: int | None, cause: AbortCause | None) -> None:
    slot = worker(SlotTable(page), 0)
    count_early_end(slot, code, status)
    counted = [each for each in AbortCause if slot[abort_word(each)]]
    assert counted == ([] if cause is None else [cause])


def test_outcomes() -> None:
    assert [outcome_of(status) for status in (200, 204, 400, 429, 499, 500, 503)] == [
        Outcome.OK, Outcome.OK, Outcome.REFUSED, Outcome.REFUSED, Outcome.ABORTED, Outcome.FAILED, Outcome.FAILED,
    ]  # fmt: skip
