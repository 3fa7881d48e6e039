"""Which chat template counts: one given by the user, or one of several that a model names.

Used in the resolver only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sglmt.errors import ModelError


def choose_template(templates: Mapping[str, str]) -> str | None:
    """One template out of named ones: "default" (or the only one); "tool_use" is joined in, for requests with
    tools.
    """
    default = templates.get("default")
    if default is None and len(templates) == 1:
        return next(iter(templates.values()))
    tool_use = templates.get("tool_use")
    if default is None or tool_use is None:
        return default
    # A line break after a block tag, and one at the end of a template, are dropped by the template language.
    # The empty expression keeps spaces at the end of the first template from being trimmed with the tag.
    return "".join(
        ("{% if tools %}\n", tool_use.removesuffix("\n"), "{{ '' }}{% else %}\n", default.removesuffix("\n"),
         "{{ '' }}{% endif %}")
    )  # fmt: skip


def given_template(value: str) -> str:
    """The template of `--chat-template`: a path, or the template itself. Raises ModelError."""
    if "{{" in value or "{%" in value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"--chat-template {value!r} is neither a readable file nor a template ({error}); "
            "give the path of a Jinja template"
        ) from error
