"""Where the OpenVINO engine gets its model: a directory that OpenVINO can read, converted once from a GGUF file.

Runs in the scheduler process, before the engine. A GGUF file is converted in a private cache directory, never
beside the file: the conversion happens in a scratch directory that is renamed into place when it is complete, so
whatever is found under the final name can be used, and two processes that convert at once do not meet.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from sglmt.errors import ModelError

MODEL_FILE = "openvino_model.xml"
_SCRATCH_PREFIX = "converting-"
_SCRATCH_MAX_AGE_S = 3600.0
BLOCK_TOKENS = 32  # tokens in one block of the key-value cache on a CPU


def find_model(model_path: str, cache_dir: Path, library_version: str) -> Path:
    """The directory to load: `model_path` itself, or where the conversion of that GGUF file is or belongs.

    Raises ModelError for a path that is neither a GGUF file nor a directory in OpenVINO's format.
    """
    path = Path(model_path)
    if path.is_dir():
        if (path / MODEL_FILE).is_file():
            return path
        raise ModelError(
            f"{path} holds no {MODEL_FILE}: the openvino engine reads GGUF files and directories made by "
            f"`optimum-cli export openvino --model {path} OUTPUT`; convert it and pass OUTPUT as --model-path"
        )
    if not path.is_file():
        raise ModelError(f"{path}: no such file or directory; check --model-path")
    if path.suffix.lower() != ".gguf":
        raise ModelError(f"{path}: the openvino engine reads GGUF files and OpenVINO directories, not this")
    return cache_dir / _entry_name(path, library_version)


def convert(gguf: Path, target: Path, genai: Any, scheduler_config: Any, properties: dict[str, Any]) -> None:
    """Convert `gguf` into the directory `target`; takes seconds. Raises ModelError when it cannot be read."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(target.parent)
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=target.parent))
    try:
        link = scratch / "model.gguf"  # the library writes beside the path it was given, hence a link
        link.symlink_to(gguf.resolve())
        try:
            genai.ContinuousBatchingPipeline(
                str(link), scheduler_config, "CPU", {**properties, "enable_save_ov_model": True}
            )
        except Exception as error:  # its parser also lets C++ lookup and allocation failures out
            raise ModelError(f"OpenVINO cannot read {gguf}: {first_line(error)}") from error
        link.unlink()
        if not (scratch / MODEL_FILE).is_file():
            raise ModelError(
                f"OpenVINO converted {gguf} but saved nothing in {scratch}; is there space in the cache directory?"
            )
        _move_into_place(scratch, target)
        _remove_outdated(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def cache_bytes_per_token(directory: Path, openvino: Any) -> int | None:
    """Bytes one token takes in a key-value cache of 32-bit numbers; None when the model does not say.

    Read from the shapes of the model's state: one variable per layer for keys and one for values, each
    [batch, heads, tokens, head size] with batch and tokens open.
    """
    numbers = 0
    for variable in openvino.Core().read_model(str(directory / MODEL_FILE)).get_variables():
        sizes = [axis.get_length() if axis.is_static else None for axis in variable.info.data_shape]
        if len(sizes) != 4 or sizes[1] is None or sizes[3] is None or sizes[2] is not None:
            return None
        numbers += sizes[1] * sizes[3]
    return 4 * numbers or None


def first_line(error: BaseException) -> str:
    """The telling line of a library error, whose first line names a source file of the library's builders."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("Check ", "Exception from "))]
    return (telling or lines or [type(error).__name__])[0]


def _entry_name(path: Path, library_version: str) -> str:
    """`openvino-<which file>-<its state and the library's>`."""
    real = path.resolve()
    status = real.stat()
    state = f"{status.st_size} {status.st_mtime_ns} {library_version}"
    return "-".join(("openvino", _digest(str(real)), _digest(state)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _move_into_place(scratch: Path, target: Path) -> None:
    try:
        os.rename(scratch, target)
    except OSError:
        # Another process was faster (a non-empty directory cannot be replaced); its result is as good.
        if not (target / MODEL_FILE).is_file():
            raise


def _remove_outdated(target: Path) -> None:
    """Remove conversions of earlier states of the same file. Who has one open keeps what it has mapped."""
    same_file, _, _ = target.name.rpartition("-")
    for entry in target.parent.glob(f"{same_file}-*"):
        if entry != target:
            shutil.rmtree(entry, ignore_errors=True)


def _sweep(cache_dir: Path) -> None:
    """Remove scratch directories of conversions that were killed."""
    oldest = time.time() - _SCRATCH_MAX_AGE_S
    for scratch in cache_dir.glob(f"{_SCRATCH_PREFIX}*"):
        try:
            if scratch.stat().st_mtime < oldest:
                shutil.rmtree(scratch, ignore_errors=True)
        except FileNotFoundError:
            continue
