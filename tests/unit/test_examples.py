"""The examples for service managers and containers: what they say is what the program understands."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from sglmt.cli import main
from sglmt.configuration import load
from sglmt.errors import ExitCode
from sglmt.server_args import ServerArgs

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def unit() -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    text = (EXAMPLES / "sglmt.service").read_text().replace("\\\n", "")
    parser.read_string(text)
    return parser["Service"]


def instructions() -> dict[str, list[str]]:
    """Containerfile: instruction → arguments, one text for each time it is used."""
    found: dict[str, list[str]] = {}
    for line in (EXAMPLES / "Containerfile").read_text().replace("\\\n", "").splitlines():
        word, _, rest = line.partition(" ")
        if word and word != "#":
            found.setdefault(word, []).append(rest.strip())
    return found


def parsed(arguments: list[str]) -> dict[str, object]:
    """The options of a `launch`. Raises click.UsageError for one that does not exist."""
    command = main.commands["launch"]
    return command.make_context("launch", arguments, parent=click.Context(main)).params


def test_the_unit_starts_what_there_is_and_is_patient_enough() -> None:
    service = unit()
    program, verb, *arguments = shlex.split(service["ExecStart"])
    assert (Path(program).name, verb) == ("sglmt", "launch")
    options = parsed(arguments)
    drain_s = float(str(options["drain_timeout"]))
    assert service["Type"] == "notify"
    assert float(service["TimeoutStopSec"]) >= drain_s + 30
    assert float(service["TimeoutStartSec"]) > ServerArgs().start_timeout
    assert service["Restart"] == "on-failure"
    never_again = {int(code) for code in service["RestartPreventExitStatus"].split()}
    assert never_again == {ExitCode.USAGE, ExitCode.MODEL, ExitCode.CONFIG}
    assert options["runtime_dir"] == f"/run/{service['RuntimeDirectory']}"
    assert options["log_dir"] == f"/var/log/{service['LogsDirectory']}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_every_line_of_the_unit(tmp_path: Path) -> None:
    text = (EXAMPLES / "sglmt.service").read_text()
    copy = tmp_path / "sglmt.service"
    copy.write_text(text.replace("/opt/sglmt/bin/sglmt", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False, timeout=60
    )  # fmt: skip
    assert "sglmt.service:" not in done.stderr, done.stderr  # how it begins about a line it does not like


def test_the_container_starts_without_an_init_or_a_shell() -> None:
    lines = instructions()
    program, verb, *fixed = json.loads(lines["ENTRYPOINT"][0])
    assert (program, verb) == ("sglmt", "launch")
    options = parsed([*fixed, *json.loads(lines["CMD"][0])])
    environment = dict(word.split("=", 1) for word in shlex.split(lines["ENV"][0]))
    flags = {name: value for name, value in options.items() if name in ServerArgs.__struct_fields__}
    configuration = load(flags, environment)
    assert configuration.warnings == []
    assert configuration.args.host == "0.0.0.0"
    assert configuration.args.log_format == "json"
    assert lines["STOPSIGNAL"] == ["SIGTERM"]
    assert lines["EXPOSE"] == [str(configuration.args.port)]


def test_compose_gives_the_drain_its_time() -> None:
    service = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]["sglmt"]
    environment = dict(word.split("=", 1) for word in shlex.split(instructions()["ENV"][0]))
    grace = re.fullmatch(r"(\d+)s", service["stop_grace_period"])
    assert grace is not None
    assert int(grace[1]) >= float(environment["SGLMT_DRAIN_TIMEOUT"]) + 30
    assert "init" not in service
    known = {f"SGLMT_{field.upper()}" for field in ServerArgs.__struct_fields__}
    assert set(service["environment"]) <= known
    assert set(environment) <= known
    assert service["healthcheck"]["test"][1:] == ["sglmt", "status"]
