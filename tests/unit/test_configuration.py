"""Where values come from, and what is said when one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglmt.configuration import load
from sglmt.errors import ConfigError
from sglmt.server_args import ServerArgs, flags


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(text: str) -> str:
        path = tmp_path / "sglmt.toml"
        path.write_text(text)
        return str(path)

    return write_file


def refusal(flag_values: dict[str, Any], environment: dict[str, str], config: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(flag_values, environment, config)
    return str(caught.value)


def test_defaults_when_nothing_is_given() -> None:
    configuration = load({field: None for field, _flag in flags()}, {})
    assert configuration.args == ServerArgs()
    assert configuration.origins == {}
    assert configuration.warnings == []


def test_flags_beat_environment_beats_file(write: Any) -> None:
    config = write("workers = 3\nport = 1003\nmax-restarts = 13\nhost = '::1'\n")
    environment = {"SGLMT_WORKERS": "4", "SGLMT_PORT": "1004"}
    args = load({"workers": "5"}, environment, config).args
    assert (args.workers, args.port, args.max_restarts, args.host) == (5, 1004, 13, "::1")


def test_the_file_may_be_named_by_the_environment(write: Any) -> None:
    config = write("workers = 3\n")
    assert load({}, {"SGLMT_CONFIG": config}).args.workers == 3
    assert load({}, {"SGLMT_CONFIG": "/nowhere"}, config).args.workers == 3


@pytest.mark.parametrize("key", ["max-queued-requests", "max_queued_requests"])
def test_keys_of_the_file_with_either_sign(write: Any, key: str) -> None:
    assert load({}, {}, write(f"{key} = 7\n")).args.max_queued_requests == 7


@pytest.mark.parametrize(("text", "value"), [("1", True), ("yes", True), ("ON", True), ("false", False), ("no", False)])
def test_switches_in_the_environment(text: str, value: bool) -> None:
    assert load({}, {"SGLMT_TRUST_REMOTE_CODE": text}).args.trust_remote_code is value


def test_a_switch_that_was_not_given_does_not_hide_the_environment() -> None:
    assert load({"trust_remote_code": None}, {"SGLMT_TRUST_REMOTE_CODE": "1"}).args.trust_remote_code is True
    assert load({"trust_remote_code": False}, {"SGLMT_TRUST_REMOTE_CODE": "1"}).args.trust_remote_code is False


def test_an_empty_variable_is_not_set() -> None:
    assert load({}, {"SGLMT_PORT": "", "SGLMT_MODEL_PATH": ""}).args == ServerArgs()


@pytest.mark.parametrize(
    ("flag_values", "environment", "words"),
    [
        ({"workers": "two"}, {}, ("--workers", "'two'", "an integer between 1 and 1024")),
        ({"workers": "0"}, {}, ("--workers", "'0'", "between 1 and 1024")),
        ({}, {"SGLMT_WORKERS": "1.5"}, ("SGLMT_WORKERS", "'1.5'", "an integer")),
        ({}, {"SGLMT_PORT": "70000"}, ("SGLMT_PORT", "'70000'", "between 0 and 65535")),
        ({"start_timeout": "nan"}, {}, ("--start-timeout", "'nan'", "a number")),
        ({"start_timeout": "inf"}, {}, ("--start-timeout", "'inf'", "a number")),
        ({"engine": "foo"}, {}, ("--engine", "'foo'", "openvino, simulator")),
        ({}, {"SGLMT_TRUST_REMOTE_CODE": "maybe"}, ("SGLMT_TRUST_REMOTE_CODE", "'maybe'", "true or false")),
        # refused by the whole, not by the single value: the origin is named all the same
        ({}, {"SGLMT_NAME": "a b"}, ("SGLMT_NAME", "'a b'")),
        ({}, {"SGLMT_DISAGGREGATION_MODE": "prefill"}, ("SGLMT_DISAGGREGATION_MODE", "`null`")),
        ({"model_path": "/no/such/model"}, {}, ("--model-path", "/no/such/model", "no such file")),
    ],
)
def test_a_refusal_names_source_value_and_expectation(
    flag_values: dict[str, Any], environment: dict[str, str], words: tuple[str, ...]
) -> None:
    message = refusal(flag_values, environment)
    assert message.startswith(words[0])
    assert all(word in message for word in words)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("workres = 2\n", ("workres", "did you mean workers?")),
        ("workers = '2'\n", ("workers", "'2'", "an integer")),
        ("workers = 2.5\n", ("workers", "2.5", "an integer")),
        ("workers = true\n", ("workers", "an integer")),
        ("[workers]\nn = 2\n", ("workers", "an integer")),
        ("start_timeout = 'soon'\n", ("start_timeout", "'soon'", "a number")),
        ("api_key = ['a', 3]\n", ("api_key", "[redacted]", "a list of texts")),
        ("max-restarts = 1\nmax_restarts = 2\n", ("max_restarts", "given twice", "max-restarts")),
        ("workers = \n", ("not a TOML file",)),
        ("name = 'a b'\n", ("name", "'a b'")),
    ],
)
def test_a_refusal_of_the_file_names_file_and_key(write: Any, text: str, words: tuple[str, ...]) -> None:
    config = write(text)
    message = refusal({}, {}, config)
    assert config in message
    assert all(word in message for word in words)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in refusal({}, {}, str(tmp_path / "absent.toml"))
    assert "--config" in refusal({}, {}, str(tmp_path))


def test_numbers_of_the_file_keep_their_meaning(write: Any) -> None:
    args = load({}, {}, write("start_timeout = 5\ntrust_remote_code = true\nengine = 'simulator'\n")).args
    assert (args.start_timeout, args.trust_remote_code, args.engine) == (5.0, True, "simulator")


def test_variables_that_are_no_option_are_warned_about() -> None:
    configuration = load({}, {"SGLMT_WORKRES": "2", "OTHER": "x", "SGLMT_CONFIG": ""})
    assert configuration.args == ServerArgs()
    assert len(configuration.warnings) == 1
    assert "SGLMT_WORKRES" in configuration.warnings[0]
    assert "SGLMT_WORKERS" in configuration.warnings[0]


def test_keys_from_flags_environment_and_file(tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("# ours\nfirst\n\n  second  \nfirst\n")
    assert load({"api_key": ("a", "b")}, {"SGLMT_API_KEY": "c"}).args.api_key == ("a", "b")
    assert load({"api_key": ()}, {"SGLMT_API_KEY": "c, d,"}).args.api_key == ("c", "d")
    merged = load({"api_key_file": str(key_file)}, {"SGLMT_API_KEY": "c"}).args
    assert merged.api_key == ("c", "first", "second")


def test_a_key_file_without_keys_is_refused(tmp_path: Path) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("# nothing\n")
    assert "holds no key" in refusal({}, {"SGLMT_API_KEY_FILE": str(key_file)})
    assert "SGLMT_API_KEY_FILE" in refusal({}, {"SGLMT_API_KEY_FILE": str(tmp_path / "absent")})


def test_secrets_are_not_repeated_in_refusals(write: Any) -> None:
    assert "hunter2" not in refusal({}, {}, write("api_key = ['hunter2', 1]\n"))
    assert "hunter2" not in refusal({"api_key": (" hunter2 ",)}, {})
