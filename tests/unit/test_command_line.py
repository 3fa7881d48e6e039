"""The command line: options follow from ServerArgs, errors are one line, verbs import only what they need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from sglmt.cli import main
from sglmt.command_line import GroupedOption, fail, one_line
from sglmt.errors import ExitCode
from sglmt.server_args import flag_name, flags

LIGHT_VERBS = ("status", "stop", "logs", "version", "completion")


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("SGLMT_RUNTIME_DIR", str(tmp_path))
    return CliRunner()


def launch_options() -> dict[str, GroupedOption]:
    options = [option for option in main.commands["launch"].params if isinstance(option, GroupedOption)]
    return {name: option for option in options for name in option.opts}


def test_every_option_of_server_args_is_offered_in_a_group() -> None:
    options = launch_options()
    for field, _flag in flags():
        assert flag_name(field) in options
        assert options[flag_name(field)].group


def test_help_of_every_verb_shows_examples_or_options(runner: CliRunner) -> None:
    for verb in main.commands:
        result = runner.invoke(main, [verb, "--help"])
        assert result.exit_code == 0
        assert all(len(line) <= 100 for line in result.output.splitlines())
    text = runner.invoke(main, ["launch", "--help"]).output
    for heading in ("Processes:", "Model:", "Exit codes:", "Signals:", "Examples:"):
        assert heading in text
    for field, flag in flags():
        assert flag.hidden or flag_name(field) in text


def test_documented_exit_codes_are_the_real_ones(runner: CliRunner) -> None:
    text = runner.invoke(main, ["launch", "--help"]).output
    for code in (ExitCode.MODEL, ExitCode.PORT, ExitCode.CHILD_DEATH, ExitCode.RESOURCE, ExitCode.CONFIG):
        assert f" {int(code)}  " in text


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["launch", "--workers", "many"], ExitCode.CONFIG, "--workers 'many'"),
        (["launch", "--config", "/nowhere.toml"], ExitCode.CONFIG, "/nowhere.toml"),
        (["launch", "--model-path", "/nowhere"], ExitCode.CONFIG, "/nowhere"),
        (["launch", "--no-such-option"], ExitCode.USAGE, "--no-such-option"),
        (["status", "nobody"], ExitCode.NOT_RUNNING, "nobody"),
        (["stop"], ExitCode.NOT_RUNNING, "no instance runs"),
        (["stop", "nobody"], ExitCode.NOT_RUNNING, "nobody"),
        (["stop", "one", "--all"], ExitCode.USAGE, "not both"),
        (["logs"], ExitCode.NOT_RUNNING, "no instance runs"),
    ],
)
def test_errors_are_short_and_have_their_exit_code(
    runner: CliRunner, arguments: list[str], code: ExitCode, words: str
) -> None:
    result = runner.invoke(main, arguments)
    assert result.exit_code == code
    assert result.stdout == ""
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    if code is not ExitCode.USAGE:
        assert result.stderr.startswith("sglmt: error: ")
        assert result.stderr.count("\n") == 1


def test_debug_output_shows_the_traceback(runner: CliRunner) -> None:
    result = runner.invoke(main, ["stop"], env={"SGLMT_LOG_LEVEL": "debug"})
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("sglmt: error: ")


def test_an_unexpected_exception_is_one_line_too(runner: CliRunner) -> None:
    @click.command()
    def broken() -> None:
        raise RuntimeError("the sky\nfell")

    main.add_command(broken, "broken")
    try:
        result = runner.invoke(main, ["broken"])
    finally:
        del main.commands["broken"]
    assert result.exit_code == ExitCode.FAILURE
    assert result.stderr.startswith("sglmt: error: internal error: RuntimeError: the sky")
    assert "Traceback" not in result.stderr


def test_status_without_instances(runner: CliRunner) -> None:
    shown = runner.invoke(main, ["status"])
    assert (shown.exit_code, shown.stderr) == (ExitCode.NOT_RUNNING, "")
    assert "no instance is running" in shown.stdout
    as_json = runner.invoke(main, ["status", "--json"])
    assert as_json.exit_code == ExitCode.NOT_RUNNING
    assert '"instances": []' in as_json.stdout


def test_error_text_cannot_control_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        fail("bad \x1b[31m name\nlast words", ExitCode.MODEL)
    assert caught.value.code == ExitCode.MODEL
    assert capsys.readouterr().err == "sglmt: error: bad  [31m name\n  last words\n"
    assert one_line("a\tb\x00") == "a b"


def test_completion_scripts(runner: CliRunner) -> None:
    for shell in ("bash", "zsh", "fish"):
        result = runner.invoke(main, ["completion", shell])
        assert result.exit_code == 0
        assert "_SGLMT_COMPLETE" in result.stdout


def test_version_names_what_matters(runner: CliRunner) -> None:
    result = runner.invoke(main, ["version"])
    assert result.exit_code == 0
    assert {line.split()[0] for line in result.stdout.splitlines()} >= {"sglmt", "python", "uvloop", "tokenizers"}


@pytest.mark.parametrize("verb", LIGHT_VERBS)
def test_verbs_that_only_ask_import_nothing_heavy(verb: str, tmp_path: Path) -> None:
    arguments = [verb, "bash"] if verb == "completion" else [verb]
    program = (
        "import sys\nfrom sglmt.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'tokenizers', 'transformers', 'uvicorn', 'uvloop', 'asyncio', 'jinja2', 'numpy'}\n"
        "sys.exit(repr(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False,
        env={"SGLMT_RUNTIME_DIR": str(tmp_path), "PATH": "/usr/bin"}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
