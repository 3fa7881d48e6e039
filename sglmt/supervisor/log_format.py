"""How a log line looks in a file or on standard output: text for people, or one JSON object a line. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

import msgspec

from sglmt.supervisor.logs import LogLine

LogFormat = Literal["text", "json"]
Render = Callable[[LogLine], str]


class JsonLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line for machines. `time` is UTC, RFC 3339 with milliseconds; processes that exist once have no `index`."""

    time: str
    level: str
    role: str
    index: int | None = None
    message: str


def render_json(line: LogLine) -> str:
    """One JSON object, no newline."""
    role, _, index = line.source.partition(":")
    moment = datetime.fromtimestamp(line.at_unix_s, UTC)
    shown = JsonLine(
        time=moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        level=line.level,
        role=role,
        index=int(index) if index.isdigit() else None,
        message=line.text,
    )
    return msgspec.json.encode(shown).decode()


def renderer(log_format: LogFormat) -> Render:
    """What turns lines into text of this format."""
    return render_json if log_format == "json" else LogLine.render


def notice_of(log_format: LogFormat) -> Callable[[str], str]:
    """What turns a remark about the log itself into a line of this format."""

    def as_json(text: str) -> str:
        return render_json(LogLine(number=0, at_unix_s=time.time(), level="warning", source="supervisor", text=text))

    return as_json if log_format == "json" else "[{}]".format
