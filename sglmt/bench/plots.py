"""Plots of results as SVG, written by hand: horizontal bars, one a scenario or role. Pure: results in, text out.

Colours carry meaning only beside their labels, and text takes the reader's own colour, so that a plot can be read
on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from sglmt.bench.figures import Result, short

_WIDTH, _LABEL, _VALUE = 720, 210, 110  # pixels: the plot, its labels, the numbers behind the bars
_ROW, _TOP, _BOTTOM = 26, 44, 16
_COLOURS = ("#3b7dd8", "#d97b2b", "#4aa564", "#a46ac2", "#c2504a", "#7f8c8d", "#b8a12f")

# Other front ends doing the same job (256 streams, 20 ms, 128 tokens each), as multiples of the floor that was measured
# beside them: machines differ, the ratio to a bare server much less. CPU seconds a million tokens, floor 29.1.
PEER_FLOOR = 29.1
PEER_CPU = {"SGLang, Python, 2 workers": 192.0, "vLLM, Python": 202.0, "SGLang, Rust": 51.0, "vLLM, Rust": 33.0}


class Segment(NamedTuple):
    """A part of a bar."""

    name: str
    value: float


class Row(NamedTuple):
    """One bar, from its segments; `whisker` is the lowest and highest total."""

    label: str
    segments: Sequence[Segment]
    whisker: tuple[float, float] | None = None

    @property
    def total(self) -> float:
        """The length of the bar."""
        return sum(segment.value for segment in self.segments)


def bar_chart(title: str, unit: str, rows: Sequence[Row]) -> str:
    """An SVG document. Equal segment names get equal colours, and a legend when there are several."""
    names = list(dict.fromkeys(segment.name for row in rows for segment in row.segments))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    legend = _legend(colours) if len(names) > 1 else []
    top = _TOP + (22 if legend else 0)
    height = top + _ROW * len(rows) + _BOTTOM
    longest = max((max(row.total, (row.whisker or (0.0, 0.0))[1]) for row in rows), default=0.0) or 1.0
    scale = (_WIDTH - _LABEL - _VALUE) / longest
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="currentColor" role="img">',
        f"<title>{escape(title)}</title>",
        "<style>svg{color:#222}@media (prefers-color-scheme:dark){svg{color:#ddd}}</style>",
        f'<text x="8" y="24" font-size="15" font-weight="600">{escape(title)}</text>',
        *legend,
    ]
    for number, row in enumerate(rows):
        parts += _bar(row, top + number * _ROW, scale, unit, colours)
    return "\n".join([*parts, "</svg>", ""])


def _bar(row: Row, y: int, scale: float, unit: str, colours: Mapping[str, str]) -> list[str]:
    middle = y + _ROW / 2
    parts = [f'<text x="{_LABEL - 8}" y="{middle + 4:g}" text-anchor="end">{escape(row.label)}</text>']
    x = float(_LABEL)
    for segment in row.segments:
        width = segment.value * scale
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="{_ROW - 8}" fill="{colours[segment.name]}">'
            f"<title>{escape(segment.name)}: {short(segment.value)} {escape(unit)}</title></rect>"
        )
        x += width
    if row.whisker is not None:
        low, high = (_LABEL + value * scale for value in row.whisker)
        parts.append(
            f'<path d="M{low:.1f} {middle - 5:g}v10M{low:.1f} {middle:g}H{high:.1f}M{high:.1f} {middle - 5:g}v10" '
            'stroke="currentColor" fill="none"/>'
        )
        x = max(x, high)
    parts.append(f'<text x="{x + 6:.1f}" y="{middle + 4:g}">{short(row.total)} {escape(unit)}</text>')
    return parts


def _legend(colours: Mapping[str, str]) -> list[str]:
    parts: list[str] = []
    x = 8
    for name, colour in colours.items():
        parts.append(f'<rect x="{x}" y="36" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{x + 15}" y="46">{escape(name)}</text>')
        x += 31 + 7 * len(name)
    return parts


def plots(results: Sequence[Result]) -> dict[str, str]:
    """File name → SVG of everything these results can show."""
    measured = {result.scenario: result for result in results if result.figures}
    charts = {
        "cpu-times-floor.svg": (
            "CPU a token, 256 streams, as a multiple of a bare server's",
            "×",
            _peer_rows(measured),
        ),
        "cpu-by-role.svg": ("Where the CPU goes, by process", "µs a token", _role_rows(measured)),
        "throughput.svg": ("Delivered tokens a second", "tok/s", _figure_rows(measured, "tokens")),
        "short-requests.svg": ("Requests a second, one token out", "req/s", _figure_rows(measured, "requests")),
    }
    return {name: bar_chart(title, unit, rows) for name, (title, unit, rows) in charts.items() if rows}


def _figure_rows(measured: Mapping[str, Result], figure: str) -> list[Row]:
    return [
        Row(name, [Segment(figure, found.median)], (min(found.values), max(found.values)))
        for name, result in measured.items()
        if (found := result.figures.get(figure)) is not None
    ]


def _peer_rows(measured: Mapping[str, Result]) -> list[Row]:
    result = measured.get("paced-256")
    if result is None:
        return []
    ours = result.figures["times_floor"]
    peers = sorted(PEER_CPU.items(), key=lambda item: item[1])
    return [
        Row("bare uvicorn (floor)", [Segment("all", 1.0)]),
        Row("sglmt, 2 workers", [Segment("all", ours.median)], (min(ours.values), max(ours.values))),
        *(Row(label, [Segment("all", value / PEER_FLOOR)]) for label, value in peers),
    ]


def _role_rows(measured: Mapping[str, Result]) -> list[Row]:
    rows: list[Row] = []
    for name, result in measured.items():
        if not name.startswith(("paced", "free")) or "cpu_all" not in result.figures:
            continue
        segments = [
            Segment(figure_name.removeprefix("cpu_"), figure.median)
            for figure_name, figure in result.figures.items()
            if figure_name.startswith("cpu_") and figure_name not in ("cpu_all", "cpu_floor", "cpu_client")
        ]
        rows.append(Row(name, segments))
        if (floor := result.figures.get("cpu_floor")) is not None:
            rows.append(Row("its floor", [Segment("floor", floor.median)]))
    return rows
