"""The service manager's protocol over real datagram sockets."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglmt.supervisor.service_manager import ServiceManager, watchdog_interval_s


class Heard:
    """The service manager's end, and the log."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.setblocking(False)
        self.lines: list[str] = []

    def manager(self, **environ: str) -> ServiceManager:
        return ServiceManager({"NOTIFY_SOCKET": self.address} | environ, lambda *line: self.lines.append(line[2]))

    def messages(self) -> list[str]:
        got: list[str] = []
        while True:
            try:
                got.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return got


@pytest.fixture(params=["path", "abstract"])
def heard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Heard]:
    made = Heard(str(tmp_path / "n") if request.param == "path" else f"@sglmt-test-{uuid.uuid4().hex}")
    with made.socket:
        yield made


def test_a_whole_life(heard: Heard) -> None:
    manager = heard.manager(WATCHDOG_USEC="1000000", WATCHDOG_PID=str(os.getpid()))
    assert manager.wanted
    manager.status("starting: the\nmodel")
    manager.status("starting: the model")
    manager.reloading()  # nothing serves yet: nothing to tell
    manager.tick(10.0)
    manager.tick(10.4)
    manager.tick(10.5)
    manager.ready()
    assert heard.messages() == ["STATUS=starting: the model", "WATCHDOG=1", "WATCHDOG=1", "READY=1"]
    manager.reloading()
    manager.reloaded()
    begun, ended = heard.messages()
    assert begun.startswith("RELOADING=1\nMONOTONIC_USEC=")
    assert int(begun.rpartition("=")[2]) > 0
    assert ended == "READY=1"
    manager.stopping()
    manager.reloaded()
    assert heard.messages() == ["STOPPING=1"]
    manager.close()
    assert heard.lines == []


def test_a_full_queue_delays_messages_and_nothing_else(heard: Heard) -> None:
    manager = heard.manager()
    for number in range(40):
        manager.status(f"{number}")
    first = heard.messages()
    assert first[0] == "STATUS=0"
    for now_s in range(20):
        manager.tick(float(now_s))
        first += heard.messages()
    assert first == [f"STATUS={number}" for number in range(40)]
    manager.close()


def test_a_socket_that_is_not_there_costs_one_warning(tmp_path: Path) -> None:
    lines: list[str] = []
    environ = {"NOTIFY_SOCKET": str(tmp_path / "none"), "WATCHDOG_USEC": "2"}
    manager = ServiceManager(environ, lambda *line: lines.append(line[2]))
    manager.ready()
    manager.tick(1.0)
    manager.stopping()
    manager.close()
    assert len(lines) == 1
    assert "NOTIFY_SOCKET" in lines[0]


def test_nobody_to_tell() -> None:
    manager = ServiceManager({}, lambda *line: pytest.fail(str(line)))
    manager.ready()
    manager.status("x")
    manager.tick(1.0)
    manager.stopping()
    manager.close()
    assert not manager.wanted


@pytest.mark.parametrize(
    ("environ", "interval_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "3000000"}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "7"}, 1.5),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "8"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
    ],
)
def test_watchdog_interval(environ: dict[str, str], interval_s: float | None) -> None:
    assert watchdog_interval_s(environ, 7) == interval_s
