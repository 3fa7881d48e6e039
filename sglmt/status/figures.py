"""Numbers as people read them: durations, sizes, rates. Pure."""

from __future__ import annotations

from sglmt.status.snapshot import TotalsSnapshot

MISSING = "-"


def duration(seconds: float | None) -> str:
    """At most two units: `850ms`, `4.2s`, `3m12s`, `5h07m`, `12d3h`."""
    if seconds is None or seconds < 0:
        return MISSING
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600}h"


def size(count_bytes: int | None) -> str:
    """`0 B`, `812 KB`, `21 MB`, `1.4 GB`; units of 1024."""
    if count_bytes is None:
        return MISSING
    value = float(count_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 999.5 or unit == "GB":
            return f"{value:.1f} {unit}" if unit == "GB" and value < 100 else f"{value:.0f} {unit}"
        value /= 1024
    raise AssertionError("unreachable: GB ends the loop")


def rate(per_s: float) -> str:
    """`0`, `0.4`, `38.5`, `412`, `12,800`."""
    if per_s <= 0:
        return "0"
    return f"{per_s:.1f}" if per_s < 99.95 else f"{per_s:,.0f}"


def percent(value: float | None) -> str:
    """`3%`."""
    return MISSING if value is None else f"{value:.0f}%"


def milliseconds(value: float | None) -> str:
    """`8.2 ms`, `41 ms`, `1.9 s`."""
    if value is None:
        return MISSING
    if value >= 999.5:
        return f"{value / 1000:.1f} s"
    return f"{value:.1f} ms" if value < 9.95 else f"{value:.0f} ms"


def totals_words(totals: TotalsSnapshot) -> list[str]:
    """The instance's totals, a few words each: what it does per second, what waits."""
    return [
        f"{rate(totals.requests_per_s)} req/s",
        f"{rate(totals.tokens_per_s)} tok/s",
        f"first token {milliseconds(totals.ttft_ms_mean)}",
        f"{totals.running} running",
        f"{totals.queued} queued",
    ]
