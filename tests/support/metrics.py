"""Reading /metrics in tests."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.instance import Instance

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(instance: Instance, **headers: str) -> Series:
    """Every sample by name and labels, on a connection of its own."""
    answer = httpx.get(instance.url + "/metrics", headers=headers, timeout=20, verify=False)  # quicker to set up
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    """One sample."""
    return series[name, tuple(sorted(labels.items()))]


def counters(series: Series) -> Series:
    """What may only grow."""
    return {key: value for key, value in series.items() if key[0].endswith(("_total", "_bucket", "_count", "_sum"))}
