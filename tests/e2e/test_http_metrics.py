"""/metrics of a running instance: one truth whoever answers, exact, and never less after deaths."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.support.instance import Instance
from tests.support.metrics import Series, counters, scrape, value
from tests.support.serving import look, post
from tests.support.wait import wait_until

SIMULATOR = ("--engine", "simulator", "--simulator-step-ms", "1")
REQUESTS = 100
TOKENS = 4


def ask(client: httpx.Client, number: int) -> int:
    """One of the generation routes, on a fresh connection."""
    if number % 2:
        body = {"prompt": "hello", "max_tokens": TOKENS, "ignore_eos": True}
        return client.post("/v1/completions", json=body).status_code
    sampling = {"max_new_tokens": TOKENS, "ignore_eos": True}
    return client.post("/generate", json={"text": "hello", "sampling_params": sampling, "stream": True}).status_code


def client_of(instance: Instance) -> httpx.Client:
    """It keeps no connection, so that every worker gets some."""
    return httpx.Client(base_url=instance.url, limits=httpx.Limits(max_keepalive_connections=0), timeout=20)


def ended(series: Series) -> float:
    routes = ("/v1/completions", "/generate")
    return sum(value(series, "sglmt_http_requests_total", route=route, outcome="ok") for route in routes)


def test_four_workers_tell_one_truth(instance: Instance) -> None:
    instance.launch(*SIMULATOR, "--workers", "4")
    before = scrape(instance)
    assert ended(before) == 0
    assert value(before, "sglmt_generated_tokens_total") == 0
    with ThreadPoolExecutor(8) as pool, client_of(instance) as client:
        assert set(pool.map(lambda number: ask(client, number), range(REQUESTS))) == {200}
    after = scrape(instance)
    assert ended(after) == REQUESTS
    assert value(after, "sglmt_generated_tokens_total") == REQUESTS * TOKENS
    for name in ("time_to_first_token", "request_latency"):
        assert value(after, f"sglmt_{name}_seconds_count") == REQUESTS
    assert value(after, "sglmt_inter_token_latency_seconds_count") == REQUESTS * (TOKENS - 1)
    assert value(after, "sglmt_processes_up", role="tokenizer_worker") == 4
    scrapes = [scrape(instance) for _ in range(20)]
    about_requests = [
        {key: number for key, number in counters(each).items() if "generat" in str(key) or "latency" in key[0]}
        for each in scrapes
    ]
    assert all(each == about_requests[0] for each in about_requests)
    grown = [value(each, "sglmt_http_requests_total", route="/metrics", outcome="ok") for each in scrapes]
    assert grown == [grown[0] + number for number in range(len(grown))]


def test_one_worker_has_the_same_series(instance: Instance, tmp_path: Path) -> None:
    instance.launch(*SIMULATOR, "--workers", "1")
    post(instance, "/v1/completions", prompt="hello", max_tokens=1)
    assert httpx.put(instance.url + "/nowhere").status_code == 404
    alone = scrape(instance)
    assert value(alone, "sglmt_http_requests_total", route="other", outcome="refused") == 1
    with Instance(tmp_path) as other:
        other.launch(*SIMULATOR, "--workers", "3", "--detokenizers", "2")
        several = scrape(other)
    assert {key for key in alone if key[0] != "sglmt_build_info"} == {
        key for key in several if key[0] != "sglmt_build_info"
    }


def test_counters_survive_killed_workers(instance: Instance) -> None:
    instance.launch(*SIMULATOR, "--workers", "2", "--max-restarts", "100")
    state_size = (instance.runtime_dir / instance.name / "state").stat().st_size
    done = 0
    last = scrape(instance)
    for kills in range(1, 5):
        with client_of(instance) as client:
            done += sum(ask(client, number) == 200 for number in range(6))
        victim = next(row for row in look(instance).processes if row.role == "tokenizer_worker" and row.pid)
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        wait_until(lambda: look(instance).workers.ready == 2 and restarts(instance) >= kills, 30, "it is back")  # noqa: B023
        now = scrape(instance)
        assert [key for key, number in counters(last).items() if now[key] < number] == []
        last = now
    assert ended(last) == done == 24
    assert value(last, "sglmt_processes_up", role="tokenizer_worker") == 2
    assert value(last, "sglmt_requests_in_flight") == 0
    assert (instance.runtime_dir / instance.name / "state").stat().st_size == state_size


def restarts(instance: Instance) -> float:
    return value(scrape(instance), "sglmt_restarts_total", role="tokenizer_worker")


def test_aborts_and_refusals_are_told_apart(instance: Instance) -> None:
    instance.launch("--engine", "simulator", "--simulator-step-ms", "20", "--workers", "2")
    sampling = {"max_new_tokens": 3000, "ignore_eos": True}
    body = {"text": "a", "sampling_params": sampling, "stream": True}
    with httpx.stream("POST", instance.url + "/generate", json={**body, "rid": "mine"}, timeout=20) as answer:
        lines = answer.iter_lines()
        next(lines)
        post(instance, "/abort_request", rid="mine")
        assert '"type":"abort"' in "".join(lines)
    with httpx.stream("POST", instance.url + "/generate", json=body, timeout=20) as answer:
        next(answer.iter_lines())
    late = post(instance, "/generate", text="a", sampling_params=sampling, timeout_s=0.2)
    assert late.status_code == 504
    assert post(instance, "/generate", text="").status_code == 400

    def settled() -> Series | None:
        series = scrape(instance)
        return series if value(series, "sglmt_aborts_total", cause="client_disconnected") else None

    series = wait_until(settled, 5, "the client that left is counted")
    outcomes = {
        outcome: value(series, "sglmt_http_requests_total", route="/generate", outcome=outcome)
        for outcome in ("ok", "refused", "failed", "aborted")
    }
    assert outcomes == {"ok": 0, "refused": 1, "failed": 1, "aborted": 2}
    causes = {
        cause: value(series, "sglmt_aborts_total", cause=cause) for cause in ("abort_request", "deadline", "other")
    }
    assert causes == {"abort_request": 1, "deadline": 1, "other": 0}
