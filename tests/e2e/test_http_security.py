"""Keys in every worker and after restarts, secrets nowhere, no way in but the HTTP port."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from sglmt.http.auth import ADMIN_PATHS, OPEN_PATHS
from sglmt.http.routes import all_routes
from tests.support.instance import Instance
from tests.support.metrics import scrape, value
from tests.support.serving import look, supervisor_pid
from tests.support.wait import wait_until

KEY, ADMIN = "api-k3y-of-the-test", "adm1n-k3y-of-the-test"
SIMULATOR = ("--engine", "simulator", "--simulator-step-ms", "1", "--workers", "2")
ROUTES = sorted({(method, path.replace("{model}", "default")) for method, path in all_routes()})
FRESH_CONNECTIONS = 4  # two workers take turns


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    environment = {"SGLMT_API_KEY": KEY, "SGLMT_ADMIN_KEY": ADMIN}
    with Instance(Path(tmp_path_factory.mktemp("g")), environment=environment) as made:
        yield made.launch(*SIMULATOR, "--cors-origin", "https://a.org")


def statuses(client: httpx.Client, method: str, path: str, headers: dict[str, str]) -> set[int]:
    """Of fresh connections, so that every worker gets some."""
    return {client.request(method, path, headers=headers).status_code for _ in range(FRESH_CONNECTIONS)}


def assert_guarded(instance: Instance) -> None:
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=instance.url, limits=limits, timeout=20) as client:
        for method, path in ROUTES:
            if path in OPEN_PATHS:
                assert statuses(client, method, path, {}) == {200}, path
                continue
            assert statuses(client, method, path, {}) == {401}, path
            assert statuses(client, method, path, {"authorization": "Bearer wrong"}) == {401}, path
            right = statuses(client, method, path, {"authorization": f"Bearer {KEY}"})
            assert (right == {403}) if path in ADMIN_PATHS else not right & {401, 403}, (path, right)
        assert statuses(client, "POST", "/abort_request", {"x-api-key": ADMIN}) == {400}
        assert statuses(client, "GET", "/nowhere", {}) == {401}


def test_every_route_in_every_worker_and_after_restarts(guarded: Instance) -> None:
    assert_guarded(guarded)
    for row in look(guarded).processes:
        if row.role == "tokenizer_worker" and row.pid is not None:
            os.kill(row.pid, signal.SIGKILL)
    wait_until(
        lambda: look(guarded).workers.ready == 2 and sum(row.restarts for row in look(guarded).processes) >= 2,
        30,
        "both workers are back",
    )
    assert_guarded(guarded)


def test_preflights_need_no_key_and_websockets_are_refused_in_shape(guarded: Instance) -> None:
    asked = {"origin": "https://a.org", "access-control-request-method": "POST"}
    preflight = httpx.options(guarded.url + "/v1/completions", headers=asked)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://a.org"
    assert preflight.headers["access-control-allow-methods"] == "POST, OPTIONS"
    refused = httpx.post(guarded.url + "/v1/completions", json={}, headers={"origin": "https://a.org"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://a.org")
    upgrade = {
        "connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==", "x-api-key": KEY,
    }  # fmt: skip
    websocket = httpx.get(guarded.url + "/v1/models", headers=upgrade)
    assert websocket.status_code == 400
    assert websocket.json()["error"]["code"] == "websocket_not_supported"


def test_secrets_are_shown_nowhere(guarded: Instance) -> None:
    worker = next(row for row in look(guarded).processes if row.role == "tokenizer_worker")
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGABRT)  # a crash report and a stack dump in the log
    wait_until(lambda: look(guarded).workers.ready == 2, 30, "the worker is back")
    admin = {"x-api-key": ADMIN}
    paths = ("/get_server_info", "/get_internal_state", "/metrics", "/openapi.json", "/docs")
    shown = [httpx.get(guarded.url + path, headers=admin).content for path in paths]
    shown += [guarded.run("status", guarded.name, "--runtime-dir", str(guarded.runtime_dir), *options).stdout.encode()
              for options in ((), ("--json",))]  # fmt: skip
    shown.append(guarded.logs().encode())
    shown += [path.read_bytes() for path in (guarded.runtime_dir / guarded.name).iterdir() if path.is_file()]
    segment = guarded.snapshot()["shm"]["name"]
    shown.append((Path("/dev/shm") / segment).read_bytes())
    supervisor = supervisor_pid(guarded)
    children = [child.pid for child in psutil.Process(supervisor).children(recursive=True)]
    shown += [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (supervisor, *children)]
    shown += [Path(f"/proc/{pid}/environ").read_bytes() for pid in children]
    assert sum(map(bool, shown)) > 15
    assert [found[:80] for found in shown if KEY.encode() in found or ADMIN.encode() in found] == []


def test_a_key_on_the_command_line_is_not_in_the_process_list(instance: Instance) -> None:
    instance.launch(*SIMULATOR, "--api-key", KEY, "--admin-key", ADMIN)
    everybody = [" ".join(process.info["cmdline"] or []).strip() for process in psutil.process_iter(["cmdline"])]
    assert "sglmt::supervisor" in everybody
    assert [line for line in everybody if KEY in line or ADMIN in line] == []
    assert httpx.get(instance.url + "/v1/models", headers={"x-api-key": KEY}).status_code == 200


class Touch:
    """Unpickled by anybody, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self._path), "w")


def test_junk_on_every_socket_is_dropped_and_counted(instance: Instance, tmp_path: Path) -> None:
    instance.launch(*SIMULATOR)
    instance.expects_unexplained = True
    directory = instance.runtime_dir / instance.name
    assert directory.stat().st_mode & 0o077 == 0
    sockets = sorted(path for path in directory.iterdir() if path.is_socket())
    assert len(sockets) >= 6
    touched = tmp_path / "touched"
    junk = (pickle.dumps(Touch(touched)), b"\x00" * 100, b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"")
    before = {(row.role, row.index): row.pid for row in look(instance).processes}
    for path in sockets:
        for data in junk:
            with socket.socket(socket.AF_UNIX) as raw:
                raw.settimeout(5)
                raw.connect(str(path))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it closes what makes no sense
                    raw.sendall(data)
        if path.name != "control.sock":
            with socket.socket(socket.AF_UNIX) as peer:  # well framed
                peer.settimeout(5)
                peer.connect(str(path))
                peer.sendall(b"".join(struct.pack("<I", len(data)) + data for data in junk))

    def undecodable(role: str) -> float:
        return value(scrape(instance), "sglmt_delivery_events_total", role=role, event="undecodable")

    for role in ("scheduler", "detokenizer", "router", "tokenizer_worker"):
        wait_until(lambda: undecodable(role) >= len(junk), 10, f"the junk is counted by the {role}")  # noqa: B023
    answer = httpx.post(instance.url + "/v1/completions", json={"prompt": "hi", "max_tokens": 2}, timeout=20)
    assert answer.status_code == 200
    assert {(row.role, row.index): row.pid for row in look(instance).processes} == before
    assert not touched.exists()


def test_nothing_listens_but_the_http_port(guarded: Instance) -> None:
    supervisor = psutil.Process(supervisor_pid(guarded))
    listening = {
        connection.laddr.port
        for process in (supervisor, *supervisor.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
    }
    assert listening == {urlsplit(guarded.url).port}
