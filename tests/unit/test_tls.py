"""Certificates that cannot be served are refused by name before anything starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sglmt.configuration import load
from sglmt.errors import ConfigError
from sglmt.server_args import ServerArgs
from sglmt.tls import server_context
from tests.support.certificates import Certificate, make_certificate, protect

Case = Callable[[Path, Certificate], tuple[Path, Path | None]]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def test_a_pair_and_both_in_one_file(certificate: Certificate, tmp_path: Path) -> None:
    server_context(str(certificate.certfile), str(certificate.keyfile))
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.certfile.read_bytes() + certificate.keyfile.read_bytes())
    server_context(str(both), None)


def written(directory: Path, name: str, content: bytes) -> Path:
    path = directory / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (lambda d, c: (d / "absent", c.keyfile), "--ssl-certfile .*absent.*No such file"),
        (lambda d, c: (c.certfile, d / "absent"), "--ssl-keyfile .*absent.*No such file"),
        (lambda d, c: (d, c.keyfile), "--ssl-certfile .*directory"),
        (lambda d, c: (written(d, "junk", b"junk"), c.keyfile), "PEM files are expected"),
        (lambda d, c: (c.certfile, written(d, "junk", b"junk")), "--ssl-keyfile .*PEM files are expected"),
        (lambda d, c: (c.certfile, None), "PEM files are expected"),
        (lambda d, c: (c.certfile, make_certificate(d, "other").keyfile), "does not belong to the certificate"),
        (lambda d, c: (c.certfile, protect(c.keyfile, "secret")), "passphrase"),
    ],
)
def test_refusals(case: Case, says: str, certificate: Certificate, tmp_path: Path) -> None:
    certfile, keyfile = case(tmp_path, certificate)
    with pytest.raises(ConfigError, match=says):
        server_context(str(certfile), None if keyfile is None else str(keyfile))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not read the file")
def test_a_key_of_somebody_else(certificate: Certificate) -> None:
    certificate.keyfile.chmod(0o600)
    os.seteuid(65534)
    try:
        with pytest.raises(ConfigError, match="Permission denied"):
            server_context(str(certificate.certfile), str(certificate.keyfile))
    finally:
        os.seteuid(0)


def test_options(certificate: Certificate) -> None:
    flags = {"ssl_certfile": str(certificate.certfile), "ssl_keyfile": str(certificate.keyfile)}
    assert load(flags, {}).args.url_scheme == "https"
    assert ServerArgs().url_scheme == "http"
    with pytest.raises(ConfigError, match=r"--ssl-keyfile.*needs --ssl-certfile"):
        load({"ssl_keyfile": flags["ssl_keyfile"]}, {})
    with pytest.raises(ConfigError, match=r"SGLMT_SSL_CERTFILE '/absent'"):
        load({}, {"SGLMT_SSL_CERTFILE": "/absent"})


@pytest.mark.parametrize(
    ("option", "good", "bad"),
    [
        ("cors_origin", ("*", "https://a.org", "http://localhost:3000"), ("a.org", "https://a.org/x", "https://a b")),
        ("allowed_host", ("*", "a.org", "*.a.org", "10.0.0.1", "[::1]"), ("a.org:80", "", "a/b", "*.*.x")),
    ],
)
def test_access_options(option: str, good: tuple[str, ...], bad: tuple[str, ...]) -> None:
    assert getattr(load({option: good}, {}).args, option) == good
    for value in bad:
        with pytest.raises(ConfigError):
            load({option: (value,)}, {})
    assert getattr(load({}, {f"SGLMT_{option.upper()}": ", ".join(good)}).args, option) == good


def test_admin_keys_come_from_everywhere_and_go_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# admins\nfrom-file\n")
    args = load({"admin_key_file": str(file)}, {"SGLMT_ADMIN_KEY": "a, b"}).args
    assert args.admin_key == ("a", "b", "from-file")
    assert args.without_secrets().admin_key == ()
    assert args.redacted()["admin_key"] == "[redacted]"
    with pytest.raises(ConfigError, match="SGLMT_ADMIN_KEY_FILE"):
        load({}, {"SGLMT_ADMIN_KEY_FILE": str(tmp_path / "absent")})
    with pytest.raises(ConfigError, match="--admin-key: a key must not be empty"):
        load({"admin_key": (" x",)}, {})
