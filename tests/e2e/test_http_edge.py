"""The connection itself: HTTPS, slow and silent clients, host names, offers of other protocols, content types."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.certificates import Certificate, make_certificate
from tests.support.instance import Instance
from tests.support.metrics import scrape, value
from tests.support.serving import events_of, look
from tests.support.wait import wait_until

SIMULATOR = ("--engine", "simulator", "--simulator-step-ms", "1", "--workers", "2")
COMPLETION = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def edgy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    """Impatient, and known by one name."""
    options = ("--receive-timeout", "2", "--keep-alive-timeout", "3", "--allowed-host", "127.0.0.1")
    with Instance(Path(tmp_path_factory.mktemp("e"))) as made:
        yield made.launch(*SIMULATOR, *options)


def connect(instance: Instance) -> socket.socket:
    parts = urlsplit(instance.url)
    assert parts.hostname is not None
    return socket.create_connection((parts.hostname, parts.port or 0), timeout=20)


def read_to_end(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def status_and_error(answer: bytes) -> tuple[int, str | None]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), json.loads(body)["error"]["code"]


def test_https_in_every_worker_and_after_a_restart(instance: Instance, certificate: Certificate) -> None:
    files = ("--ssl-certfile", str(certificate.certfile), "--ssl-keyfile", str(certificate.keyfile))
    instance.launch(*SIMULATOR, *files)
    assert instance.url.startswith("https://")
    trusting = ssl.create_default_context(cafile=str(certificate.certfile))

    def ask_all() -> None:
        for _ in range(4):
            with httpx.Client(verify=trusting, timeout=20) as client:
                streamed = client.post(instance.url + "/v1/completions", json={**COMPLETION, "stream": True})
                events = events_of(streamed.text)
                whole = client.post(instance.url + "/v1/completions", json=COMPLETION).json()
            text = "".join(event["choices"][0]["text"] for event in events)
            assert text == whole["choices"][0]["text"] != ""
            assert len(events) > 1

    ask_all()
    for row in look(instance).processes:
        if row.role == "tokenizer_worker" and row.pid is not None:
            os.kill(row.pid, signal.SIGKILL)
    wait_until(
        lambda: look(instance).workers.ready == 2 and sum(row.restarts for row in look(instance).processes) >= 2,
        30,
        "both workers are back",
    )
    ask_all()
    with connect(instance) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        try:
            answered = read_to_end(plain)
        except ConnectionError:
            answered = b""
        assert b"HTTP/1.1" not in answered
    with httpx.Client(verify=trusting) as client:
        assert client.get(instance.url + "/health").status_code == 200
    wait_until(lambda: sum(row.connections for row in look(instance).processes) == 0, 5, "no connection is left")


@pytest.mark.parametrize("which", ["absent", "junk", "key of another"])
def test_files_that_cannot_be_served_are_refused_before_anything_starts(
    which: str, instance: Instance, certificate: Certificate, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    if which == "junk":
        key.write_text("junk")
    elif which == "key of another":
        key = make_certificate(tmp_path).keyfile
    files = ("--ssl-certfile", str(certificate.certfile), "--ssl-keyfile", str(key))
    done = instance.run(*instance.launch_arguments("--detach", *SIMULATOR, *files))
    assert done.returncode == 78
    assert "--ssl-keyfile" in done.stderr
    assert str(key) in done.stderr
    assert not (instance.runtime_dir / instance.name).exists()


def test_headers_that_come_a_byte_at_a_time(edgy: Instance) -> None:
    with connect(edgy) as connection:
        started_s = time.monotonic()
        request = iter(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: " + b"a" * 1000)

        def refused() -> bool:
            connection.sendall(bytes([next(request)]))
            connection.settimeout(0.05)
            try:
                return bool(connection.recv(1, socket.MSG_PEEK))
            except TimeoutError:
                return False

        wait_until(refused, 8, "the server loses patience")
        assert status_and_error(read_to_end(connection)) == (408, "request_timeout")
        assert time.monotonic() - started_s >= 2
    assert httpx.get(edgy.url + "/health").status_code == 200


@pytest.mark.parametrize("sent", [b"", b'{"prompt":'])
def test_a_body_that_does_not_come(edgy: Instance, sent: bytes) -> None:
    with connect(edgy) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n" + sent
        )
        assert status_and_error(read_to_end(connection)) == (408, "request_timeout")


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n", b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"])
def test_an_idle_connection_is_closed(edgy: Instance, sent: bytes) -> None:
    with connect(edgy) as connection:
        started_s = time.monotonic()
        connection.sendall(sent)
        answer = read_to_end(connection)
        assert answer.startswith(b"HTTP/1.1 200") if b"GET" in sent else answer == b""
        assert 2.5 <= time.monotonic() - started_s < 8


def test_endless_headers(edgy: Instance) -> None:
    before = value(scrape(edgy), "sglmt_http_requests_total", route="other", outcome="refused")
    with connect(edgy) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nx: ")
        try:
            for _ in range(64):
                connection.sendall(b"a" * 16384)
        except ConnectionError:
            pass
        try:
            answer = read_to_end(connection)
        except ConnectionError:
            answer = b""
        assert answer == b"" or status_and_error(answer) == (431, "headers_too_large")
    after = value(scrape(edgy), "sglmt_http_requests_total", route="other", outcome="refused")
    assert after == before + 1


def test_host_names(edgy: Instance) -> None:
    for name, status in (("127.0.0.1", 200), ("127.0.0.1:99", 200), ("evil.org", 421)):
        assert httpx.get(edgy.url + "/v1/models", headers={"host": name}).status_code == status
    assert httpx.get(edgy.url + "/health", headers={"host": "evil.org"}).status_code == 200


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.api+json", 200),
        (None, 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("jsonp", 415),
    ],
)
def test_content_types(edgy: Instance, content_type: str | None, status: int) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    answer = httpx.post(edgy.url + "/tokenize", content=b'{"prompt":"a"}', headers=headers)
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["code"] == "unsupported_media_type"


def test_an_offer_of_http2_is_ignored_and_the_body_is_read(edgy: Instance) -> None:
    headers = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAoAAAAAIAAAAA"}
    with httpx.Client() as client:
        for _ in range(2):  # the connection stays usable
            answer = client.post(edgy.url + "/v1/completions", json=COMPLETION, headers=headers)
            assert answer.json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    "junk",
    [
        b"junk\r\n\r\n",
        b"\x80\x04\x95pickle\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"CONNECT evil.org:443 HTTP/1.1\r\nhost: evil.org\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused_in_shape(edgy: Instance, junk: bytes) -> None:
    with connect(edgy) as connection:
        connection.sendall(junk)
        assert status_and_error(read_to_end(connection))[0] == 400
