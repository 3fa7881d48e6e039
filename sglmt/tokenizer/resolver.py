"""The resolver child: `python -m sglmt.tokenizer.resolver`, killable and short-lived.

The supervisor starts it with a deadline, so that a damaged model, slow disk or (trusted) remote code cannot hang or
crash anything else. It reads one JSON object of arguments on stdin and writes one JSON object on stdout: `{"model":
{...}}` with exit status 0, or `{"error": "one line"}` with 1. Anything the libraries print goes to stderr.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO

import msgspec

from sglmt.errors import SglmtError


class ResolverRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of `resolve_model`."""

    model_path: str | None  # None: the default model
    cache_dir: str
    tokenizer_path: str | None = None
    chat_template: str | None = None
    trust_remote_code: bool = False


def main() -> int:
    """Answer one request; returns the exit status."""
    answer_to = _claim_stdout()
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=ResolverRequest)
        from sglmt.tokenizer.default_model import default_model_path
        from sglmt.tokenizer.fast_backend import fastokens_note
        from sglmt.tokenizer.resolve import resolve_model

        info = resolve_model(
            request.model_path or default_model_path(),
            request.tokenizer_path,
            request.chat_template,
            Path(request.cache_dir),
            request.trust_remote_code,
        )
        if info.tokenizer_file is not None:
            info = msgspec.structs.replace(info, fastokens_note=fastokens_note(info.tokenizer_file))
    except SglmtError as error:
        return _answer(answer_to, {"error": _one_line(str(error))}, 1)
    except msgspec.DecodeError as error:
        return _answer(answer_to, {"error": _one_line(f"the resolver's request is malformed: {error}")}, 1)
    except Exception as error:  # e.g. trusted remote code failing in its own way: still one line
        return _answer(answer_to, {"error": _one_line(f"cannot resolve the model: {type(error).__name__}: {error}")}, 1)
    return _answer(answer_to, {"model": info}, 0)


def _claim_stdout() -> IO[bytes]:
    """Keep stdout for the answer alone: from here on, file descriptor 1 is stderr."""
    sys.stdout.flush()
    answer_to = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answer_to


def _answer(answer_to: IO[bytes], answer: dict[str, object], status: int) -> int:
    with answer_to:
        answer_to.write(msgspec.json.encode(answer) + b"\n")
    return status


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
