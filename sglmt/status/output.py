"""Writes a status document to stdout: JSON for programs, text for people. The thin shell around `render`."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping

import click
import msgspec

from sglmt.status.snapshot import StatusDocument


def write_status(document: StatusDocument, as_json: bool) -> None:
    """One document; JSON is indented and is the only thing written."""
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=2))
        return
    from sglmt.status.render import Canvas, supports_unicode, to_text
    from sglmt.status.render import document as render_document

    canvas = Canvas(shutil.get_terminal_size((80, 24)).columns, supports_unicode(sys.stdout.encoding))
    colour = wants_colour(os.environ, sys.stdout.isatty())
    click.echo(to_text(render_document(document, canvas), canvas, colour), nl=False, color=colour)


def wants_colour(environment: Mapping[str, str], is_terminal: bool) -> bool:
    """Colour on terminals, unless NO_COLOR or TERM=dumb; FORCE_COLOR asks for it elsewhere. Pure."""
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return is_terminal and environment.get("TERM", "dumb") not in ("dumb", "unknown", "")
