"""The TLS context of the HTTP port. Made by every tokenizer worker; the launcher makes one first, to refuse files that
cannot be used before anything starts."""

from __future__ import annotations

import ssl

from sglmt.errors import ConfigError


def server_context(certfile: str, keyfile: str | None) -> ssl.SSLContext:
    """A context that serves this certificate chain; without `keyfile` the key is in `certfile`.

    Raises ConfigError naming the flag and the file that cannot be used.
    """
    for flag, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        if path is not None:
            _check_readable(flag, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_passphrase)
    except ssl.SSLError as error:
        if "MISMATCH" in str(error.reason):
            problem = f"the key does not belong to the certificate in {certfile!r}"
        else:
            problem = f"no usable key and certificate (in {certfile!r}); PEM files are expected"
        raise ConfigError(f"--ssl-keyfile {keyfile or certfile!r}: {problem}") from None
    except _Encrypted:
        raise ConfigError(
            f"--ssl-keyfile {keyfile or certfile!r}: the key is protected by a passphrase; store it without one"
        ) from None
    return context


class _Encrypted(Exception):
    """Somebody would have to type a passphrase."""


def _no_passphrase() -> str:
    raise _Encrypted


def _check_readable(flag: str, path: str) -> None:
    try:
        with open(path, "rb") as file:
            file.read(1)
    except OSError as error:
        raise ConfigError(f"{flag} {path!r}: cannot be read: {error.strerror}") from None
