"""The cache of resolved models: private, complete or absent, rebuilt when damaged, safe for several at once."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sglmt.errors import ModelError
from sglmt.tokenizer import resolve as resolve_module
from sglmt.tokenizer.cache import read_entry, write_entry
from sglmt.tokenizer.model_info import ModelInfo
from sglmt.tokenizer.resolve import resolve_model
from tests.unit.tokenizer import synthetic
from tests.unit.tokenizer.model_files import write_hf


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "model", synthetic.bare(), tokenizer_config={"chat_template": "{{ 1 }}"})


def entry_of(info: ModelInfo) -> Path:
    assert info.tokenizer_file is not None
    return Path(info.tokenizer_file).parent


def test_entries_are_private(model: Path, tmp_path: Path) -> None:
    entry = entry_of(resolve_model(str(model), None, None, tmp_path / "deep" / "cache"))
    assert stat.S_IMODE(entry.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry.stat().st_mode) == 0o700
    assert {path.name for path in entry.iterdir()} == {
        "tokenizer.json",
        "chat_template.jinja",
        "model_info.json",
        "checksums.json",
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in entry.iterdir()} == {0o600}


def test_a_second_start_reads_the_entry(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve_model(str(model), None, None, tmp_path / "cache")
    monkeypatch.setattr(resolve_module, "_read", None)  # calling it would fail
    assert resolve_model(str(model), None, None, tmp_path / "cache") == first


def test_a_changed_input_makes_a_new_entry(model: Path, tmp_path: Path) -> None:
    first = resolve_model(str(model), None, None, tmp_path / "cache")
    os.utime(model / "tokenizer.json", ns=(1, 1))
    second = resolve_model(str(model), None, None, tmp_path / "cache")
    assert second.fingerprint != first.fingerprint
    assert resolve_model(str(model), None, "{{ 2 }}", tmp_path / "cache").fingerprint not in (
        first.fingerprint,
        second.fingerprint,
    )


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _garble(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "model_info.json", "checksums.json"])
@pytest.mark.parametrize("damage", [_truncate, _garble, Path.unlink])
def test_a_damaged_entry_is_rebuilt(model: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    first = resolve_model(str(model), None, None, tmp_path / "cache")
    entry = entry_of(first)
    before = {path.name: path.read_bytes() for path in entry.iterdir()}
    damage(entry / name)
    assert resolve_model(str(model), None, None, tmp_path / "cache") == first
    assert {path.name: path.read_bytes() for path in entry.iterdir()} == before
    assert [path.name for path in entry.parent.iterdir()] == [entry.name]


def test_a_moved_cache_names_its_new_place(model: Path, tmp_path: Path) -> None:
    first = resolve_model(str(model), None, None, tmp_path / "cache")
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    second = resolve_model(str(model), None, None, tmp_path / "elsewhere")
    assert second.tokenizer_file == str(tmp_path / "elsewhere" / first.fingerprint / "tokenizer.json")


def test_several_at_once_write_one_entry(tmp_path: Path) -> None:
    entry = tmp_path / "cache" / "e"
    files = {f"f{index}": os.urandom(2000) for index in range(4)}
    errors: list[BaseException] = []
    start = threading.Barrier(8)

    def write() -> None:
        try:
            start.wait(10)
            for _ in range(5):
                write_entry(entry, files)
                assert read_entry(entry) == files
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert [path.name for path in entry.parent.iterdir()] == ["e"]


def test_a_cache_others_may_write_is_refused(model: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ModelError, match="nobody else may write"):
        resolve_model(str(model), None, None, shared)
    (tmp_path / "link").symlink_to(tmp_path / "model")
    with pytest.raises(ModelError, match="must be a directory of this user"):
        resolve_model(str(model), None, None, tmp_path / "link")


def test_a_cache_that_cannot_be_written_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"cannot write the tokenizer cache .*file/cache"):
        resolve_model(str(model), None, None, tmp_path / "file" / "cache")
