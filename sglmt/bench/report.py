"""How results are shown: one JSON line and one table a scenario. Pure: results in, text out."""

from __future__ import annotations

import msgspec

from sglmt.bench.figures import Figure, Result, short

_HEADINGS = ("figure", "median", "min – max", "unit", "n", "bar", "")


def json_line(result: Result) -> str:
    """One line for programs."""
    return msgspec.json.encode(result.as_json()).decode()


def table(result: Result) -> str:
    """A few lines for people."""
    title = f"{result.scenario}  {_settings(result)}".rstrip()
    if result.skipped is not None:
        return f"{title}\n  skipped: {result.skipped}\n"
    rows = [_HEADINGS, *(_row(name, figure) for name, figure in result.figures.items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = [
        "  " + "  ".join(_aligned(row[column], widths[column], column) for column in range(len(row))) for row in rows
    ]
    notes = [f"  note: {note}" for note in result.notes]
    return "\n".join([title, *(line.rstrip() for line in lines), *notes]) + "\n"


def _settings(result: Result) -> str:
    return " ".join(f"{name}={value}" for name, value in result.settings.items())


def _row(name: str, figure: Figure) -> tuple[str, ...]:
    met = "" if figure.bar is None else "met" if figure.bar.is_met(figure.median) else "NOT MET"
    spread = f"{short(min(figure.values))} – {short(max(figure.values))}" if figure.values else ""
    return (name, short(figure.median), spread, figure.unit, str(len(figure.values)), str(figure.bar or ""), met)


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if column in (1, 4) else cell.ljust(width)
