"""The result table of `sglmt bench`. Pure: an outcome in, something rich can draw out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.box import ASCII2, Box
from rich.table import Table

from sglmt.bench.client_run import Outcome
from sglmt.bench.figures import short

_TIMES = (("first token", "first_token_ms"), ("inter-token", "inter_token_ms"), ("request", "request_ms"))


def outcome_table(outcome: Outcome, box: Box = ASCII2) -> Table:
    """Rates, then times with their percentiles, then what failed."""
    found = outcome.as_json()
    table = Table(box=box, show_edge=False, pad_edge=False)
    table.add_column("")
    for heading in ("p50", "p90", "p99"):
        table.add_column(heading, justify="right")
    for label, name in _TIMES:
        table.add_row(f"{label}, ms", *_cells(found[name]))
    table.add_section()
    prompt = found["mean_prompt_tokens"]
    for label, value in (
        ("requests/s", found["requests_per_s"]),
        ("output tokens/s", found["tokens_per_s"]),
        ("output tokens", found["output_tokens"]),
        ("prompt tokens, mean", prompt),
        ("requests", found["requests"]),
        ("failed", found["failed"]),
        ("seconds", found["wall_s"]),
    ):
        if value is not None:
            table.add_row(label, short(float(value)))
    return table


def _cells(quantiles: Mapping[str, Any]) -> list[str]:
    return ["-" if value is None else short(float(value)) for value in quantiles.values()]
