"""Other ways to listen: a unix socket, IPv6, and ports that nobody chose."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from sglmt.errors import ExitCode
from tests.support.instance import COMMAND, Instance
from tests.support.serving import get, look
from tests.support.wait import wait_until

ONE = ("--engine", "simulator", "--workers", "1", "--simulator-step-ms", "1")
BODY = {"text": "a", "sampling_params": {"max_new_tokens": 3}}


def through(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://sglmt", timeout=20)


def test_a_unix_socket_from_launch_to_stop(instance: Instance, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("u")
    path = directory / "h"
    options = ("--engine", "simulator", "--uds", str(path), "--uds-mode", "660")
    instance.launch(*options)
    assert instance.url == f"unix:{path}"
    assert f"unix:{path}" in instance.run("status", instance.name, "--runtime-dir", str(instance.runtime_dir)).stdout
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    with through(path) as client:
        assert client.get("/health").status_code == 200
        assert client.get("/ready").json() == {"status": "ready"}
        assert client.post("/generate", json=BODY).json()["meta_info"]["completion_tokens"] == 3
    second = instance.run(
        "launch", "--name", "second", "--runtime-dir", str(instance.runtime_dir), "--detach", *options
    )
    assert second.returncode == ExitCode.PORT
    assert f"sglmt instance '{instance.name}' (pid {instance.pid})" in second.stderr

    os.kill(instance.pid, signal.SIGKILL)  # leaves the file, which the next launch replaces
    with Instance(instance.runtime_dir, instance.name) as again:
        assert path.exists()
        again.launch(*options)
        with through(path) as client:
            assert client.post("/generate", json=BODY).status_code == 200
        assert again.stop().returncode == 0
    assert list(directory.iterdir()) == []
    check = instance.run("launch", "--check", "--runtime-dir", str(instance.runtime_dir), *options)
    assert f"unix:{path} (free)" in check.stdout
    assert list(directory.iterdir()) == []


def test_ipv6(instance: Instance) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    instance.launch(*ONE, "--host", "::1")
    assert instance.url.startswith("http://[::1]:")
    assert get(instance, "/ready").status_code == 200
    assert httpx.post(f"{instance.url}/generate", json=BODY, timeout=20).status_code == 200


def test_two_launches_on_any_port_at_once_get_two_ports(tmp_path: Path) -> None:
    with Instance(tmp_path, "one") as one, Instance(tmp_path, "two") as two:
        launches = [
            subprocess.Popen([COMMAND, *each.launch_arguments("--detach", *ONE)], stdout=subprocess.DEVNULL)
            for each in (one, two)
        ]
        assert [launch.wait(60) for launch in launches] == [0, 0]
        urls = [look(each).url for each in (one, two)]
        ports = [urlsplit(url).port for url in urls]
        assert 0 not in ports
        assert len(set(ports)) == 2
        for url in urls:
            wait_until(lambda url=url: httpx.get(f"{url}/ready", timeout=5).status_code == 200, 10, "each serves")
        assert [each.stop().returncode for each in (one, two)] == [0, 0]
