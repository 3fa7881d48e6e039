"""What a measurement is: figures with a spread, the bar they are held against, and a scenario's result. Pure.

Used by every module of `sglmt.bench`; owns nothing. A figure keeps all its values, one a repeat; what is shown is
their median and the lowest and highest of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal


@dataclass(frozen=True)
class Bar:
    """The limit a figure's median is held against, in the figure's unit."""

    kind: Literal["at least", "at most"]
    value: float

    def is_met(self, measured: float) -> bool:
        """Whether a measured value satisfies it."""
        return measured >= self.value if self.kind == "at least" else measured <= self.value

    def __str__(self) -> str:
        return f"{'≥' if self.kind == 'at least' else '≤'} {short(self.value)}"


def at_least(value: float) -> Bar:
    """A bar for what should be high."""
    return Bar("at least", value)


def at_most(value: float) -> Bar:
    """A bar for what should be low."""
    return Bar("at most", value)


@dataclass
class Figure:
    """One quantity of one scenario, a value a repeat."""

    unit: str
    values: list[float] = field(default_factory=list)
    bar: Bar | None = None

    @property
    def median(self) -> float:
        """The median of the repeats; nan without any."""
        return median(self.values) if self.values else math.nan

    def as_json(self) -> dict[str, Any]:
        """Median, spread, count, unit, and how it stands to its bar."""
        shown: dict[str, Any] = {
            "unit": self.unit,
            "median": rounded(self.median),
            "min": rounded(min(self.values, default=math.nan)),
            "max": rounded(max(self.values, default=math.nan)),
            "n": len(self.values),
        }
        if self.bar is not None:
            shown["bar"] = str(self.bar)
            shown["met"] = self.bar.is_met(self.median)
        return shown


@dataclass
class Result:
    """All figures of one scenario, or why it was not measured."""

    scenario: str
    settings: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    skipped: str | None = None

    def add(self, name: str, unit: str, value: float, bar: Bar | None = None) -> None:
        """Append one repeat's value; `bar` is taken from the first."""
        self.figures.setdefault(name, Figure(unit, bar=bar)).values.append(value)

    def as_json(self) -> dict[str, Any]:
        """The JSON line of this scenario."""
        shown: dict[str, Any] = {"scenario": self.scenario}
        if self.skipped is not None:
            return {**shown, "skipped": self.skipped}
        shown["settings"] = self.settings
        shown["figures"] = {name: figure.as_json() for name, figure in self.figures.items()}
        if self.notes:
            shown["notes"] = self.notes
        return shown


def percentile(ordered: Sequence[float], quantile: float) -> float:
    """The value below which `quantile` (0 to 1) of ascending `ordered` lies; nan for none."""
    if not ordered:
        return math.nan
    return ordered[math.floor((len(ordered) - 1) * quantile)]


def rounded(value: float) -> float | None:
    """Four significant digits or whole numbers, as JSON can hold them."""
    if not math.isfinite(value):
        return None
    if abs(value) >= 1000:
        return round(value)
    return float(f"{value:.4g}")


def short(value: float) -> str:
    """A number for people: thousands separated, three significant digits below."""
    if not math.isfinite(value):
        return "–"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
