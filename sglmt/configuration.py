"""Merges flags, `SGLMT_*` environment variables, a TOML file and the defaults into ServerArgs. Runs in the launcher.

Precedence is flags > environment > file > defaults. Every value keeps its origin, so that a refusal names the
place where somebody has to change something. Keys of the file are the option names, with `-` or `_`; variables
are `SGLMT_` and the option name in capitals. An empty variable counts as not set.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from sglmt.errors import ConfigError
from sglmt.server_args import Flag, ServerArgs, flag_name, flags

ENV_PREFIX = "SGLMT_"
CONFIG_VARIABLE = "SGLMT_CONFIG"
# Variables of ours that are no option of `launch`.
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "SGLMT_COMPLETE"})
MAX_KEY_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class Configuration:
    """The merged result. `origins` says for each option that was set where; `warnings` are for the log."""

    args: ServerArgs
    origins: dict[str, str]
    warnings: list[str]


def load(
    flag_values: Mapping[str, Any], environment: Mapping[str, str], config_file: str | None = None
) -> Configuration:
    """Merge the sources and validate the result.

    `flag_values` maps field names to text (booleans for switches, tuples of text for repeatable options), with
    None for flags not given. Raises ConfigError naming the flag, variable, or file and key, the value, and what
    is expected.
    """
    path = config_file or environment.get(CONFIG_VARIABLE) or None
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    variables, warnings = _from_environment(environment)
    for source in (_from_file(Path(path)) if path else [], variables, _from_flags(flag_values)):
        for field, origin, raw in source:
            values[field] = convert(field, raw, origin)
            origins[field] = origin
    for field, file_field in (("api_key", "api_key_file"), ("admin_key", "admin_key_file")):
        if key_file := values.get(file_field):
            keys = (*values.get(field, ()), *read_key_file(key_file, origins[file_field]))
            values[field] = tuple(dict.fromkeys(keys))
            origins.setdefault(field, origins[file_field])
    args = ServerArgs(**values)
    try:
        args.validate()
    except ConfigError as error:
        raise ConfigError(_with_origin(str(error), origins)) from None
    return Configuration(args, origins, warnings)


def convert(field: str, raw: Any, origin: str) -> Any:
    """`raw` as the field's type and within its limits. Raises ConfigError beginning with `origin`."""
    hint, flag = _hint(field), dict(flags())[field]
    shown = "[redacted]" if flag.secret else _shown(raw)
    if hint == tuple[str, ...] and isinstance(raw, str):
        raw = (raw,)
    if isinstance(raw, str) and hint is bool:
        raw = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(raw.lower(), raw.lower())
    try:
        value = msgspec.convert(raw, hint, strict=not isinstance(raw, str))
    except msgspec.ValidationError:
        raise ConfigError(f"{origin} {shown}: {expectation(field, flag)} is expected") from None
    in_range = not isinstance(value, int | float) or (
        math.isfinite(value)
        and (flag.minimum is None or value >= flag.minimum)
        and (flag.maximum is None or value <= flag.maximum)
    )
    if not in_range:
        raise ConfigError(f"{origin} {shown}: {expectation(field, flag)} is expected")
    return value


def expectation(field: str, flag: Flag) -> str:
    """What an option takes, in words: `an integer between 1 and 1024`."""
    hint = _hint(field)
    kinds = {member for member in get_args(hint) or (hint,) if member is not type(None)}
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    if hint is bool:
        return "true or false"
    if int in kinds or float in kinds:
        noun = "an integer" if int in kinds else "a number"
        if flag.minimum is not None and flag.maximum is not None:
            return f"{noun} between {flag.minimum:g} and {flag.maximum:.15g}"
        return noun
    return "a list of texts" if hint == tuple[str, ...] else "a text"


def read_key_file(path: str, origin: str) -> tuple[str, ...]:
    """Keys, one a line; empty lines and lines that begin with `#` are skipped. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_KEY_FILE_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{origin} {path!r}: cannot be read: {reason}") from None
    if len(content) > MAX_KEY_FILE_BYTES:
        raise ConfigError(f"{origin} {path!r}: more than {MAX_KEY_FILE_BYTES} bytes, not a file of keys")
    lines = (line.strip() for line in text.splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{origin} {path!r}: holds no key; one key a line is expected")
    return keys


def _from_flags(flag_values: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    return [(field, flag_name(field), raw) for field, raw in flag_values.items() if raw is not None and raw != ()]


def _from_environment(environment: Mapping[str, str]) -> tuple[list[tuple[str, str, Any]], list[str]]:
    """(values, warnings about variables that begin like ours and are not)."""
    fields = {ENV_PREFIX + field.upper(): field for field, _flag in flags()}
    values: list[tuple[str, str, Any]] = []
    warnings: list[str] = []
    for variable, text in sorted(environment.items()):
        if not variable.startswith(ENV_PREFIX) or variable in OTHER_VARIABLES or variable.startswith("_"):
            continue
        field = fields.get(variable)
        if field is None:
            warnings.append(f"{variable}: no such option, ignored{_nearest(variable, list(fields))}")
        elif text:
            raw: Any = text
            if _hint(field) == tuple[str, ...]:
                raw = tuple(key.strip() for key in text.split(",") if key.strip())
            values.append((field, variable, raw))
    return values, warnings


def _from_file(path: Path) -> list[tuple[str, str, Any]]:
    """The values of a TOML file. Raises ConfigError for anything it cannot be."""
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {str(path)!r}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {str(path)!r}: not a TOML file: {error}") from None
    known = [field for field, _flag in flags()]
    values: list[tuple[str, str, Any]] = []
    seen: dict[str, str] = {}
    for key, raw in table.items():
        field = key.replace("-", "_")
        origin = f"{path}: {key}"
        if field not in known:
            raise ConfigError(f"{origin}: no such option{_nearest(field, known)}")
        if field in seen:
            raise ConfigError(f"{origin}: given twice, as {seen[field]!r} too")
        seen[field] = key
        hint = _hint(field)
        takes_text = hint in (str, str | None, tuple[str, ...]) or get_origin(hint) is Literal
        if isinstance(raw, str) and not takes_text:  # a file has types of its own: "2" is a text there
            raise ConfigError(f"{origin} {raw!r}: {expectation(field, dict(flags())[field])} is expected")
        values.append((field, origin, raw))
    return values


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _hint(field: str) -> Any:
    """The field's type without the Flag annotation."""
    return get_type_hints(ServerArgs)[field]


def _with_origin(message: str, origins: Mapping[str, str]) -> str:
    """The same refusal, beginning with where the value came from instead of with the flag's name."""
    flag, rest = message, ""
    for end, character in enumerate(message):
        if character in " :":
            flag, rest = message[:end], message[end:]
            break
    field = flag.removeprefix("--").replace("-", "_")
    origin = origins.get(field, flag)
    return origin + rest


def _shown(raw: Any) -> str:
    text = repr(raw)
    return text if len(text) <= 120 else text[:117] + "..."
