"""The resolver child: one JSON object in, one out, whatever happens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglmt.tokenizer.default_model import default_model_path
from sglmt.tokenizer.model_info import ModelInfo
from tests.unit.tokenizer import synthetic
from tests.unit.tokenizer.model_files import write_hf


def resolver(request: bytes, environment: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "sglmt.tokenizer.resolver"],
        input=request,
        capture_output=True,
        timeout=60,
        env={**os.environ, **(environment or {})},
    )
    answer = json.loads(done.stdout)
    assert done.stdout.endswith(b"\n")
    assert b"Traceback" not in done.stdout + done.stderr
    return done.returncode, answer


def test_a_model(tmp_path: Path) -> None:
    request = {"model_path": default_model_path(), "cache_dir": str(tmp_path / "cache")}
    status, answer = resolver(json.dumps(request).encode())
    assert status == 0
    info = msgspec.convert(answer["model"], ModelInfo)
    assert info.vocab_size == 49152
    assert info.tokenizer_file is not None
    assert Path(info.tokenizer_file).is_file()


def test_a_directory_without_a_fast_tokenizer_is_converted(tmp_path: Path) -> None:
    """Imports transformers, which may print what it likes."""
    library = synthetic.byte_level()
    described = json.loads(library.to_str())["model"]
    model = write_hf(tmp_path / "model", None, tokenizer_config={"tokenizer_class": "GPT2Tokenizer"})
    (model / "vocab.json").write_text(json.dumps(described["vocab"]))
    (model / "merges.txt").write_text("\n".join(" ".join(merge) for merge in described["merges"]))
    status, answer = resolver(json.dumps({"model_path": str(model), "cache_dir": str(tmp_path / "cache")}).encode())
    assert (status, answer.get("error")) == (0, None)
    from sglmt.tokenizer.loading import load_tokenizer

    tokenizer = load_tokenizer(msgspec.convert(answer["model"], ModelInfo))
    assert tokenizer.encode("the quick brown fox") == library.encode("the quick brown fox").ids


def test_code_of_the_model_runs_only_when_trusted_and_cannot_garble_the_answer(tmp_path: Path) -> None:
    """Its prints, also those of other programs it starts, go to stderr."""
    described = json.loads(synthetic.library("byte-level").to_str())["model"]
    model = write_hf(tmp_path / "model", None, tokenizer_config={"auto_map": {"AutoTokenizer": ["code.Mine", None]}})
    (model / "vocab.json").write_text(json.dumps(described["vocab"]))
    (model / "merges.txt").write_text("\n".join(" ".join(merge) for merge in described["merges"]))
    (model / "code.py").write_text(
        "import os\nfrom pathlib import Path\nfrom transformers import GPT2Tokenizer\n"
        f"print('printed'); os.system('echo started'); Path({str(tmp_path / 'ran')!r}).touch()\n"
        "class Mine(GPT2Tokenizer):\n    pass\n"
    )
    request = {"model_path": str(model), "cache_dir": str(tmp_path / "cache")}
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    status, answer = resolver(json.dumps(request).encode(), environment)
    assert status == 1
    assert str(model) in answer["error"]
    assert not (tmp_path / "ran").exists()
    status, answer = resolver(json.dumps(request | {"trust_remote_code": True}).encode(), environment)
    assert (status, answer.get("error")) == (0, None)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("request_line", "complaint"),
    [
        (b"", "malformed"),
        (b"{}", "malformed"),
        (b'{"model_path": "x", "cache_dir": "y", "surprise": 1}', "malformed"),
        (b'{"model_path": "/no/such", "cache_dir": "y"}', "--model-path /no/such: no such file"),
    ],
)
def test_an_error_is_one_line(request_line: bytes, complaint: str) -> None:
    status, answer = resolver(request_line)
    assert status == 1
    assert list(answer) == ["error"]
    assert complaint in answer["error"]
    assert "\n" not in answer["error"]
