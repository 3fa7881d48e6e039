"""Reading GGUF metadata: the same values as the format's own package, and no trust in what a file claims."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglmt.errors import ModelError
from sglmt.tokenizer.default_model import default_model_path
from sglmt.tokenizer.gguf_metadata import read_gguf
from tests.unit.tokenizer import synthetic
from tests.unit.tokenizer.model_files import gguf_fields, write_gguf


def test_the_same_values_as_the_reference_reader(tmp_path: Path) -> None:
    fields = gguf_fields(synthetic.sentencepiece(), "llama") | {"a.flag": True, "a.negatives": [-1, -2], "a.number": 7}
    for path in (write_gguf(tmp_path / "m.gguf", fields, 96), Path(default_model_path())):
        reference = gguf.GGUFReader(str(path))
        metadata = read_gguf(path)
        names = [name for name in reference.fields if not name.startswith("GGUF.")]
        assert metadata.names() == names
        for name in names:
            assert metadata.get(name) == reference.fields[name].contents(), name
    assert metadata.embedding_rows == 49152


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(path, gguf_fields(synthetic.byte_level(), "gpt2"), 64).read_bytes()


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_an_error_or_harmless_never_a_crash(whole: bytes, tmp_path: Path, data: st.DataObject) -> None:
    """Cut anywhere, or with any eight bytes replaced by a huge number."""
    path = tmp_path / "m.gguf"
    position = data.draw(st.integers(0, 20_000))
    if data.draw(st.booleans()):
        path.write_bytes(whole[:position])
    else:
        number = data.draw(st.sampled_from([0, 1, 2**31, 2**40, 2**63, 2**64 - 1]))
        path.write_bytes(whole[:position] + struct.pack("<Q", number) + whole[position + 8 :])
    try:
        read_gguf(path)
    except ModelError as error:
        message = str(error)
    else:
        message = "m.gguf"
    assert "m.gguf" in message


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not a complete GGUF file"),
        (b"PK\x03\x04" + b"\0" * 60, "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62), "ends at byte"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "ends at byte"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99), "unknown type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**60), "array claims"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "arrays of arrays"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 2**30), "dimensions"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=complaint):
        read_gguf(path)


def test_a_file_without_tensors_has_no_embedding(tmp_path: Path) -> None:
    assert read_gguf(write_gguf(tmp_path / "vocabulary.gguf", {"a.b": "c"})).embedding_rows == 0
