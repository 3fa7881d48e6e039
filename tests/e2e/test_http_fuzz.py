"""A short fuzz run, every time; scripts/fuzz is the long one."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.support.fuzz.run import LAUNCH_OPTIONS, fuzz, judge_instance
from tests.support.instance import Instance


@pytest.mark.parametrize(("control", "requests"), [(False, 800), (True, 150)])
def test_hostile_requests(control: bool, requests: int, instance: Instance) -> None:
    instance.launch("--engine", "simulator", *LAUNCH_OPTIONS)
    findings = asyncio.run(fuzz(instance.url, requests, seed=20, control=control, connections=4))
    assert findings.complaints == []
    assert judge_instance(instance) == []
    assert findings.statuses.total() + findings.left == requests
    assert len(findings.statuses) >= 5  # of all kinds
    assert findings.statuses[200] > requests / 20
    httpx.post(instance.url + "/continue_generation", timeout=20)
    answer = httpx.post(instance.url + "/v1/completions", json={"prompt": "hi", "max_tokens": 2}, timeout=20)
    assert answer.status_code == 200
