"""Where a converted model is kept: whole or not at all, one for each state of a file. The library is a stand-in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sglmt.engines.openvino_model import cache_bytes_per_token, convert, find_model, first_line
from sglmt.errors import ModelError


class Converter:
    """Stands in for the library: writes beside the path it is given, or fails."""

    def __init__(self, failure: Exception | None = None, saves: bool = True) -> None:
        self.failure = failure
        self.saves = saves
        self.read: list[bytes] = []

    def ContinuousBatchingPipeline(self, path: str, config: Any, device: str, properties: Any) -> None:
        assert properties["enable_save_ov_model"]
        self.read.append(Path(path).read_bytes())
        if self.failure is not None:
            raise self.failure
        if self.saves:
            (Path(path).parent / "openvino_model.xml").write_text("<net/>")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "models" / "tiny.gguf"
    path.parent.mkdir()
    path.write_bytes(b"weights")
    return path


def target_of(gguf: Path, tmp_path: Path, version: str = "1") -> Path:
    return find_model(str(gguf), tmp_path / "cache", version)


def test_a_conversion_lands_under_its_name_and_leaves_the_models_directory_alone(gguf: Path, tmp_path: Path) -> None:
    converter, target = Converter(), target_of(gguf, tmp_path)
    convert(gguf, target, converter, None, {})
    assert converter.read == [b"weights"]
    assert [path.name for path in target.iterdir()] == ["openvino_model.xml"]
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert [path.name for path in gguf.parent.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize(
    ("converter", "said"),
    [
        (Converter(RuntimeError("Exception from src/a.cpp:1:\nunknown type 99\n")), "tiny.gguf: unknown type 99"),
        (Converter(IndexError("unordered_map::at")), "unordered_map::at"),
        (Converter(saves=False), "saved nothing"),
    ],
)
def test_a_failed_conversion_leaves_nothing(gguf: Path, tmp_path: Path, converter: Converter, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        convert(gguf, target_of(gguf, tmp_path), converter, None, {})
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_changed_file_or_library_is_another_conversion_and_replaces_the_old(gguf: Path, tmp_path: Path) -> None:
    first = target_of(gguf, tmp_path)
    assert target_of(gguf, tmp_path) == first
    assert target_of(gguf, tmp_path, version="2") != first
    convert(gguf, first, Converter(), None, {})
    gguf.write_bytes(b"other weights")
    second = target_of(gguf, tmp_path)
    assert second != first
    convert(gguf, second, Converter(), None, {})
    assert [path.name for path in second.parent.iterdir()] == [second.name]


def test_conversions_of_other_files_stay(gguf: Path, tmp_path: Path) -> None:
    other = gguf.with_name("other.gguf")
    other.write_bytes(b"weights")
    for path in (gguf, other):
        convert(path, target_of(path, tmp_path), Converter(), None, {})
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_who_comes_second_keeps_what_is_there(gguf: Path, tmp_path: Path) -> None:
    target = target_of(gguf, tmp_path)
    convert(gguf, target, Converter(), None, {})
    (target / "mark").write_text("first")
    convert(gguf, target, Converter(), None, {})
    assert (target / "mark").read_text() == "first"
    assert [path.name for path in target.parent.iterdir()] == [target.name]


def test_scratch_of_killed_conversions_is_swept_when_old(gguf: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name, age_s in (("converting-old", 7200.0), ("converting-new", 60.0)):
        scratch = cache / name
        scratch.mkdir(parents=True)
        made_at_s = scratch.stat().st_mtime - age_s
        os.utime(scratch, (made_at_s, made_at_s))
    convert(gguf, target_of(gguf, tmp_path), Converter(), None, {})
    names = {path.name for path in cache.iterdir()}
    assert "converting-new" in names
    assert "converting-old" not in names


def test_a_directory_in_the_librarys_format_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "openvino_model.xml").write_text("<net/>")
    assert find_model(str(tmp_path), tmp_path / "cache", "1") == tmp_path
    assert not (tmp_path / "cache").exists()


class Axis:
    """One dimension of a shape; None is open."""

    def __init__(self, length: int | None) -> None:
        self.is_static = length is not None
        self._length = length

    def get_length(self) -> int | None:
        return self._length


class Reader:
    """Stands in for the library's model reader: a model whose state has the given shapes."""

    def __init__(self, *shapes: tuple[int | None, ...]) -> None:
        self.shapes = shapes

    def Core(self) -> Reader:
        return self

    def read_model(self, path: str) -> Reader:
        return self

    def get_variables(self) -> list[Any]:
        class Info:
            def __init__(self, shape: tuple[int | None, ...]) -> None:
                self.data_shape = [Axis(length) for length in shape]

        class Variable:
            def __init__(self, shape: tuple[int | None, ...]) -> None:
                self.info = Info(shape)

        return [Variable(shape) for shape in self.shapes]


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(None, 3, None, 64)] * 60, 60 * 3 * 64 * 4),
        ([(None, 3, None, 64), (None, 8, 128)], None),  # a state that does not grow with the tokens
        ([], None),
    ],
)
def test_the_cache_is_sized_from_the_shapes_of_the_state(
    tmp_path: Path, shapes: list[tuple[int | None, ...]], expected: int | None
) -> None:
    assert cache_bytes_per_token(tmp_path, Reader(*shapes)) == expected


def test_the_telling_line_of_a_library_error() -> None:
    text = "Check 'a > 0' failed at /home/builder/x.cpp:323:\n'max_new_tokens' must be greater than 0\n\n"
    assert first_line(RuntimeError(text)) == "'max_new_tokens' must be greater than 0"
    assert first_line(RuntimeError("")) == "RuntimeError"
