"""Certificates for tests, made by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple


class Certificate(NamedTuple):
    """PEM files of a self-signed certificate for localhost and 127.0.0.1."""

    certfile: Path
    keyfile: Path


def make_certificate(directory: Path, name: str = "server") -> Certificate:
    """A fresh one."""
    made = Certificate(directory / f"{name}.pem", directory / f"{name}.key")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-keyout", str(made.keyfile), "-out", str(made.certfile),
        ],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return made


def protect(keyfile: Path, passphrase: str) -> Path:
    """The same key behind a passphrase."""
    protected = keyfile.with_suffix(".protected")
    subprocess.run(
        ["openssl", "ec", "-in", str(keyfile), "-aes256", "-passout", f"pass:{passphrase}", "-out", str(protected)],
        check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return protected
