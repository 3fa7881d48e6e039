"""The load client in C: built when its source changed, run once a measurement. Runs in `scripts/bench`.

Owns one binary a source version in the user's cache directory. Python clients cost more than the servers they
measure; this one takes a few microseconds an event, and reports its own CPU.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sglmt.errors import ResourceError, SglmtError

_COMPILERS = ("gcc", "clang", "cc")
_CONNECT_S = 10.0


class Percentiles(msgspec.Struct, frozen=True):
    """Milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float


class LoadReport(msgspec.Struct, frozen=True):
    """What one run of the client saw."""

    wall_s: float
    client_cpu_s: float
    done: int
    unfinished: int
    http_errors: int
    event_errors: int
    connection_errors: int
    events: int
    bytes: int
    first_ms: Percentiles
    total_ms: Percentiles
    gap_ms: Percentiles

    @property
    def failures(self) -> int:
        """Requests without a whole, good answer."""
        return self.unfinished + self.http_errors + self.event_errors + self.connection_errors


class LoadClient:
    """A built load client."""

    def __init__(self, binary: Path) -> None:
        self._binary = binary

    def run(
        self, port: int, path: str, bodies: Path, *, connections: int, requests: int, stream: bool, timeout_s: float
    ) -> LoadReport:
        """Send `requests` requests over `connections` connections to 127.0.0.1.

        Raises SglmtError when it could not begin or a request got no good answer: such figures mean nothing.
        """
        arguments = [
            str(self._binary), "127.0.0.1", str(port), "--path", path, "--bodies", str(bodies),
            "--connections", str(connections), "--requests", str(requests), "--timeout", f"{timeout_s:g}",
            *(["--stream"] if stream else []),
        ]  # fmt: skip
        done = subprocess.run(arguments, capture_output=True, timeout=timeout_s + _CONNECT_S, check=False)
        if done.returncode:
            raise SglmtError(f"the load client failed: {done.stderr.decode(errors='replace').strip()}")
        report = msgspec.json.decode(done.stdout, type=LoadReport)
        if report.failures:
            raise SglmtError(
                f"{report.failures} of {requests} requests to {path} failed: {report.http_errors} HTTP errors, "
                f"{report.event_errors} error events, {report.connection_errors} broken connections, "
                f"{report.unfinished} not finished within {timeout_s:g} s"
            )
        return report


def write_bodies(path: Path, bodies: Sequence[bytes]) -> Path:
    """Write request bodies as the client reads them, one a line. Raises ValueError for one with a line end."""
    if any(b"\n" in body for body in bodies):
        raise ValueError("a request body must be one line")
    path.write_bytes(b"\n".join(bodies) + b"\n")
    return path


def build(source: Path, cache_dir: Path) -> LoadClient:
    """The client of this source, compiled unless it was before. Raises ResourceError, saying what is missing."""
    try:
        text = source.read_bytes()
    except OSError as error:
        raise ResourceError(
            f"the load client's source {source} cannot be read ({error.strerror}); scripts/bench runs in a checkout"
        ) from error
    binary = cache_dir / f"load-{hashlib.sha256(text).hexdigest()[:16]}"
    if not binary.exists():
        _compile(source, binary)
    return LoadClient(binary)


def _compile(source: Path, binary: Path) -> None:
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise ResourceError(f"no C compiler found ({', '.join(_COMPILERS)}); install one to build {source.name}")
    binary.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=binary.parent) as directory:
        built = Path(directory, binary.name)
        done = subprocess.run(
            [compiler, "-O2", "-o", str(built), str(source)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ResourceError(f"{compiler} cannot build {source}:\n{done.stderr.strip()}")
        os.replace(built, binary)
