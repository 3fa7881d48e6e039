"""Whose patience ends: a client that does not read costs itself only, and an engine that stays away ends in a 503."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from urllib.parse import urlsplit

import pytest

from sglmt.status.snapshot import ProcessSnapshot
from tests.support.instance import Instance
from tests.support.metrics import scrape, value
from tests.support.serving import busy, look, post, streams_to
from tests.support.wait import wait_until

MIB = 1024 * 1024


def open_without_reading(instance: Instance, body: dict[str, object]) -> socket.socket:
    """A streaming request whose answer nobody reads; the kernel keeps as little of it as it can."""
    url = urlsplit(instance.url)
    assert url.hostname is not None
    assert url.port is not None
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((url.hostname, url.port))
    payload = json.dumps({**body, "stream": True}).encode()
    connection.sendall(
        b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
        % (len(payload), payload)
    )
    return connection


def worker_rss_bytes(instance: Instance) -> int:
    return max(row.rss_bytes or 0 for row in look(instance).processes if row.role == "tokenizer_worker")


@pytest.mark.timeout(120)
def test_a_client_that_does_not_read_is_given_up_alone(instance: Instance) -> None:
    instance.launch("--engine", "simulator", "--simulator-step-ms", "1", "--workers", "1")
    whole = post(instance, "/generate", text="b", sampling_params={"max_new_tokens": 300}).json()
    before = worker_rss_bytes(instance)
    deaf = open_without_reading(instance, {"text": "a", "sampling_params": {"max_new_tokens": 8000}})

    async def beside() -> None:
        async with streams_to(instance) as streams:
            stream = await streams.start("/generate", text="b", sampling_params={"max_new_tokens": 300}).finish()
            assert stream.events[-1]["output_ids"] == whole["output_ids"]
            assert stream.longest_gap_s < 2.0

    try:
        asyncio.run(beside())
        wait_until(
            lambda: value(scrape(instance), "sglmt_aborts_total", cause="slow_client") == 1, 60, "it is given up"
        )
        wait_until(lambda: not busy(instance), 5, "its slot is free")
        assert worker_rss_bytes(instance) - before < 64 * MIB
    finally:
        deaf.close()


@pytest.mark.timeout(120)
def test_a_request_waits_for_an_engine_that_comes_back_and_not_for_one_that_does_not(instance: Instance) -> None:
    instance.launch("--engine", "simulator", "--engine-wait", "2", "--max-restarts", "1000", "--workers", "2")

    def scheduler() -> ProcessSnapshot:
        return next(row for row in look(instance).processes if row.role == "scheduler")

    def away_for_long() -> bool:
        return (scheduler().next_try_in_s or 0) > 3.5

    killed = 0
    for _ in range(12):  # deaths soon after a start make the pauses longer, until one is longer than anybody waits
        wait_until(lambda: scheduler().pid not in (None, killed) or away_for_long(), 20, "it is back, or away for long")  # noqa: B023
        if away_for_long():
            break
        killed = scheduler().pid or 0
        os.kill(killed, signal.SIGKILL)
        if not away_for_long():
            assert post(instance, "/v1/completions", prompt="a", max_tokens=3).status_code in (200, 503)
    assert away_for_long()
    for stream in (False, True):
        started_s = time.monotonic()
        answer = post(instance, "/v1/completions", prompt="a", max_tokens=3, stream=stream)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_away"
        assert int(answer.headers["retry-after"]) >= 1
        assert 1.9 < time.monotonic() - started_s < 5
        if not away_for_long():
            break
    wait_until(lambda: post(instance, "/v1/completions", prompt="a", max_tokens=3).status_code == 200, 60, "it is back")
