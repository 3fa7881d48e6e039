"""What click does not do by itself: options made from ServerArgs, help in groups, errors in one line.

Runs in every `sglmt` command. Each option of `launch` is declared on its field in `sglmt.server_args`; texts
are handed on unconverted, because `sglmt.configuration` converts values of all sources the same way.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

import click
from click.shell_completion import CompletionItem

from sglmt.errors import ExitCode, SglmtError
from sglmt.server_args import Flag, ServerArgs, flag_name, flags

# A group begins at the field named and holds all that follow, up to the next beginning.
_GROUPS = {
    "workers": "Processes",
    "host": "Listening",
    "model_path": "Model",
    "engine": "Engine",
    "max_running_requests": "Admission",
    "start_timeout": "Life of the processes",
    "api_key": "Access",
    "log_level": "Output and files",
}
LAUNCHER_GROUP = "The launch itself"


class GroupedOption(click.Option):
    """An option that knows which part of the help it belongs to."""

    def __init__(self, *args: Any, group: str = LAUNCHER_GROUP, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class ManualCommand(click.Command):
    """A command whose help has grouped options and sections like a manual page."""

    sections: Sequence[tuple[str, str]] = ()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Options under the headings of their groups, in the order of declaration."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                group = parameter.group if isinstance(parameter, GroupedOption) else "Options"
                groups.setdefault(group, []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records, col_max=34)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The sections, each a heading and a text whose lines stay as they are."""
        for heading, text in self.sections:
            with formatter.section(heading):
                for line in text.strip("\n").splitlines():
                    formatter.write(" " * formatter.current_indent + line + "\n" if line else "\n")


def manual(*sections: tuple[str, str]) -> type[ManualCommand]:
    """A command class with these sections at the end of its help."""
    return type("ManualCommand", (ManualCommand,), {"sections": sections})


def server_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate with every option of ServerArgs."""
    hints = get_type_hints(ServerArgs)
    group = ""
    options: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = []
    for field, flag in flags():
        group = _GROUPS.get(field, group)
        options.append(_option(field, flag, hints[field], group))
    for option in reversed(options):
        function = option(function)
    return function


def _option(field: str, flag: Flag, hint: Any, group: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    name = flag_name(field)
    common: dict[str, Any] = {
        "cls": GroupedOption,
        "group": group,
        "default": None,
        "hidden": flag.hidden,
        "help": _help(field, flag, hint),
    }
    if hint is bool:
        return click.option(f"{name}/--no-{name[2:]}", field, **common)
    if hint == tuple[str, ...]:
        return click.option(name, field, multiple=True, metavar=flag.metavar or "TEXT", **common)
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    return click.option(
        name,
        field,
        metavar=flag.metavar or _metavar(field, hint, choices),
        shell_complete=_complete(choices) if choices else None,
        type=click.Path() if field.endswith(("_path", "file", "_dir", "_template")) else str,
        **common,
    )


def _help(field: str, flag: Flag, hint: Any) -> str:
    text = flag.help.replace("`", "")
    default = getattr(_DEFAULTS, field)
    if default is not None and hint is not bool and default != ():
        shown = f"{default:g}" if isinstance(default, float) else str(default)
        text += f" [default: {shown}]"
    return text


def _metavar(field: str, hint: Any, choices: Sequence[str]) -> str:
    if choices:
        return "|".join(choices)
    kinds = get_args(hint) or (hint,)
    if int in kinds:
        return "N"
    if float in kinds:
        return "MS" if field.endswith("_ms") else "S"
    for ending, metavar in (("_path", "PATH"), ("file", "FILE"), ("_template", "FILE"), ("_dir", "DIR")):
        if field.endswith(ending):
            return metavar
    return "TEXT"


def _complete(choices: Sequence[str]) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    def complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(choice) for choice in choices if choice.startswith(incomplete)]

    return complete


class Program(click.Group):
    """The `sglmt` group: turns our errors into one line and the documented exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb. A traceback is shown only to those who asked for debug output."""
        try:
            return super().invoke(ctx)
        except SglmtError as error:
            fail(str(error), error.exit_code)
        except KeyboardInterrupt:
            fail("interrupted", ExitCode.KILLED_NOW)
        except BrokenPipeError:  # `sglmt status | head -1`: the reader has what it wanted
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            ctx.exit(0)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            hint = "" if wants_traceback() else "; run it again with SGLMT_LOG_LEVEL=debug for the traceback"
            fail(f"internal error: {what}{hint}", ExitCode.FAILURE)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of declaration: by what people do first."""
        return list(self.commands)


def fail(message: str, exit_code: ExitCode | int) -> NoReturn:
    """Print `sglmt: error: …` on stderr and exit. Raises SystemExit, always."""
    if wants_traceback() and sys.exc_info()[0] is not None:
        traceback.print_exc()
    first, *more = message.splitlines() or [""]
    click.echo(f"sglmt: error: {one_line(first)}", err=True)
    for line in more:  # a child's last words
        click.echo(f"  {one_line(line)}", err=True)
    sys.exit(int(exit_code))


def one_line(message: str) -> str:
    """`message` without newlines and control characters: it may quote anything."""
    return "".join(character if character.isprintable() else " " for character in message).strip()


def wants_traceback() -> bool:
    """Whether debug output was asked for, by flag or variable."""
    arguments = sys.argv[1:]
    follows = ["--log-level", "debug"]
    asked = any(arguments[at : at + 2] == follows for at in range(len(arguments)))
    return asked or "--log-level=debug" in arguments or os.environ.get("SGLMT_LOG_LEVEL", "").lower() == "debug"


_DEFAULTS = ServerArgs()
