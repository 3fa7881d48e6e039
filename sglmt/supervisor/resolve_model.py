"""Asks a killable child what the model is. Runs in the supervisor, before anything else is started.

The child (`sglmt.tokenizer.resolver`) may import heavy libraries and, if the operator allows it, code that came
with a model; the supervisor only ever sees one JSON object from it. It gets one on standard input:
`{"model_path", "tokenizer_path", "chat_template", "cache_dir", "trust_remote_code"}` (`model_path` null: the
default model) and answers `{"model": {...}}` or `{"error": "..."}` on standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sglmt.errors import ModelError
from sglmt.server_args import ServerArgs
from sglmt.supervisor.environment import child_environment
from sglmt.supervisor.restart_policy import describe_exit

_MAX_ANSWER_BYTES = 4 * 1024 * 1024
_SHOWN_LINES = 8


class _Question(msgspec.Struct, frozen=True, kw_only=True):
    model_path: str | None
    tokenizer_path: str | None
    chat_template: str | None
    cache_dir: str
    trust_remote_code: bool


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    model: dict[str, Any] | None = None
    error: str | None = None


def resolver_command() -> tuple[str, ...]:
    """The resolver, tied to this process's life."""
    bound = ("-P", "-m", "sglmt.supervisor.bound_child", str(os.getpid()))
    return (sys.executable, *bound, "sglmt.tokenizer.resolver")


def cache_directory(run_dir: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """Where resolved models are kept: `$XDG_CACHE_HOME/sglmt`, `~/.cache/sglmt`, or the run directory when
    neither can be written."""
    candidates: list[Path] = []
    if os.path.isabs(environ.get("XDG_CACHE_HOME", "")):
        candidates.append(Path(environ["XDG_CACHE_HOME"]) / "sglmt")
    if os.path.isabs(environ.get("HOME", "")):
        candidates.append(Path(environ["HOME"]) / ".cache" / "sglmt")
    for candidate in candidates:
        with contextlib.suppress(OSError):
            candidate.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(candidate, os.W_OK | os.X_OK) and candidate.stat().st_uid == os.getuid():
                return candidate
    inside = run_dir / "cache"
    inside.mkdir(mode=0o700, exist_ok=True)
    return inside


async def resolve_model(
    args: ServerArgs,
    cache_dir: Path,
    deadline_s: float,
    command: Sequence[str] | None = None,
    on_spawn: Callable[[int], None] = lambda pid: None,
) -> dict[str, Any]:
    """The `ModelInfo` of `args` as plain data. `deadline_s` is monotonic; `on_spawn` is told the child's pid.

    Raises ModelError with the resolver's own words, or with how it ended and its last lines. Whatever happens,
    cancellation included, the child is gone when this returns.
    """
    question = _Question(
        model_path=args.model_path, tokenizer_path=args.tokenizer_path, chat_template=args.chat_template,
        cache_dir=str(cache_dir), trust_remote_code=args.trust_remote_code,
    )  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *(command or resolver_command()),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=child_environment(None, os.environ),
        process_group=0,
    )
    on_spawn(process.pid)
    try:
        async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
            answer, errors = await process.communicate(msgspec.json.encode(question))
    except TimeoutError:
        raise ModelError(
            f"model {args.model_path or 'default'!r}: not resolved within its deadline; see --start-timeout"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return _read_answer(args, process.returncode, answer, errors)


def _read_answer(args: ServerArgs, code: int | None, answer: bytes, errors: bytes) -> dict[str, Any]:
    """The model, or the ModelError that tells best why there is none."""
    what = f"model {args.model_path or 'default'!r}"
    try:
        if len(answer) > _MAX_ANSWER_BYTES:
            raise ModelError(f"{what}: the resolver's answer has {len(answer)} bytes")
        decoded = msgspec.json.decode(answer, type=_Answer)
    except msgspec.MsgspecError:
        decoded = _Answer()
    if decoded.error is not None:
        raise ModelError(f"{what}: {decoded.error}")
    if decoded.model is not None:
        return decoded.model
    lines = [line for line in errors.decode("utf-8", errors="replace").splitlines() if line.strip()]
    last = "\n".join(f"  {line}" for line in lines[-_SHOWN_LINES:])
    said = f"; its last lines:\n{last}" if last else ""
    raise ModelError(f"{what}: the resolver ended without an answer, {describe_exit(code, None)}{said}")
