"""The control socket, over a real unix socket: what clients may ask, and what strangers and garbage cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglmt.control import server as server_module
from sglmt.control.client import ControlClient, call
from sglmt.control.commands import COMMANDS, Context, Logs, Ping, Status, Stop, Subscribe
from sglmt.control.protocol import MAX_REQUEST_BYTES, ServerSideError
from sglmt.control.server import ControlServer
from sglmt.errors import DeadlineError, NotRunningError, ResourceError
from sglmt.status.snapshot import InstanceSnapshot
from sglmt.supervisor.logs import LogSink
from tests.support.wait import wait_until
from tests.unit.status.samples import instance


class FakeInstance:
    """What commands act on; remembers the stops that were asked for."""

    def __init__(self) -> None:
        self.stops: list[tuple[float | None, bool]] = []

    def snapshot(self) -> InstanceSnapshot:
        return instance(version="1.2.3")

    def request_stop(self, drain_s: float | None, now: bool) -> None:
        self.stops.append((drain_s, now))


class Running:
    """A control server in an event loop of its own thread, as the supervisor would have it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.instance = FakeInstance()
        self.logs = LogSink("info")
        self.server = ControlServer(path, Context(instance=self.instance, logs=self.logs, drain_s=lambda: 30.0))
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.do(self.server.start())

    def do(self, work: Any) -> Any:
        """Run a coroutine there and wait for it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=10)

    def log(self, text: str, source: str = "router") -> None:
        """Log a line on the loop's thread."""

        async def log() -> None:
            self.logs.log("info", source, text)

        self.do(log())

    def raw(self, data: bytes) -> bytes:
        """Send bytes, read until the server closes or has answered one line."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            client.connect(str(self.path))
            with contextlib.suppress(BrokenPipeError):  # turned away before it could say anything
                client.sendall(data)
            answer = b""
            while not answer.endswith(b"\n"):
                try:
                    part = client.recv(65536)
                except ConnectionResetError:
                    break
                if not part:
                    break
                answer += part
            return answer

    def stop(self) -> None:
        self.do(self.server.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    made = Running(tmp_path / "control.sock")
    yield made
    made.stop()


def soon() -> float:
    return time.monotonic() + 5


def test_ping_and_status(running: Running) -> None:
    pong = call(running.path, Ping(), soon())
    assert (pong.instance_id, pong.version) == ("00c0ffee", "1.2.3")
    assert call(running.path, Status(), soon()) == instance(version="1.2.3")


def test_several_commands_on_one_connection(running: Running) -> None:
    with ControlClient(running.path, soon()) as client:
        assert client.call(Ping(), soon()).pid == client.call(Ping(), soon()).pid


def test_status_answers_quickly_also_for_many(running: Running) -> None:
    for _ in range(50):
        began_s = time.monotonic()
        call(running.path, Status(), soon())
        assert time.monotonic() - began_s < 0.2


@pytest.mark.parametrize(
    ("command", "asked", "granted_s"),
    [
        (Stop(), (None, False), 30.0),
        (Stop(drain_s=2.5), (2.5, False), 2.5),
        (Stop(now=True), (None, True), 0.0),
    ],
)
def test_stop_is_handed_on(running: Running, command: Stop, asked: tuple[float | None, bool], granted_s: float) -> None:
    assert call(running.path, command, soon()).drain_s == granted_s
    assert running.instance.stops == [asked]


def test_an_absurd_drain_time_is_refused(running: Running) -> None:
    with pytest.raises(ServerSideError, match="drain_s"):
        call(running.path, Stop(drain_s=-1), soon())
    assert running.instance.stops == []


def test_logs_of_one_source(running: Running) -> None:
    for number in range(5):
        running.log(f"line {number}", source=f"tokenizer_worker:{number % 2}")
    answer = call(running.path, Logs(lines=2, source="tokenizer_worker:0"), soon())
    assert [line.text for line in answer.lines] == ["line 2", "line 4"]
    assert len(call(running.path, Logs(), soon()).lines) == 5


def test_a_subscriber_gets_backlog_then_new_lines_then_the_end(running: Running) -> None:
    running.log("old")
    running.log("from elsewhere", source="scheduler")
    with ControlClient(running.path, soon()) as client:
        events = client.events(Subscribe(source="router", backlog=10), soon())
        first = next(events)
        running.log("from elsewhere", source="scheduler")
        running.log("new")
        second = next(events)
        assert first.log is not None
        assert second.log is not None
        assert (first.log.text, second.log.text) == ("old", "new")
        running.do(running.server.close())
        assert list(events) == []


def test_a_subscriber_gets_snapshots(running: Running) -> None:
    with ControlClient(running.path, soon()) as client:
        events = client.events(Subscribe(logs=False, snapshot_every_s=0.1), soon())
        assert all(next(events).snapshot is not None for _ in range(3))


def test_a_subscriber_that_does_not_read_loses_lines_only(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SUBSCRIBER_BUFFER_BYTES", 10_000)
    with ControlClient(running.path, soon()) as client:
        events = client.events(Subscribe(backlog=1), soon())
        running.log("first")
        assert next(events).log is not None
        for _ in range(400):
            running.log("x" * 2000)
        assert call(running.path, Ping(), soon()).pid  # others are served meanwhile
        lost = 0
        texts: list[str] = []
        running.log("marker")
        while "end" not in texts:
            event = next(events)
            lost += event.lost
            if event.log is not None:
                texts.append(event.log.text)
            if event.log is not None and len(texts) % 10 == 0:
                running.log("end")
        assert lost > 0


def test_the_socket_is_private(running: Running) -> None:
    mode = running.path.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_other_users_are_turned_away(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(server_module, "TRUSTED_UIDS", frozenset())
    assert running.raw(b'{"command": "ping"}\n') == b""
    assert running.instance.stops == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_real_other_user_is_turned_away_even_where_the_file_lets_it_in(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        made = Running(Path(directory) / "s")
        made.path.chmod(0o666)
        program = (
            "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.settimeout(5)\ns.connect(sys.argv[1])\n"
            'try:\n    s.sendall(b\'{"command": "ping"}\\n\')\n    print(s.recv(100))\n'
            "except (ConnectionResetError, BrokenPipeError):\n    print(b'')"
        )
        python = os.path.realpath("/usr/bin/python3")
        done = subprocess.run(
            [python, "-I", "-c", program, str(made.path)], user=65534, capture_output=True, text=True, timeout=20,
            check=False, env={}, cwd="/",
        )  # fmt: skip
        made.stop()
    assert (done.stdout, done.returncode) == ("b''\n", 0), done.stderr


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"garbage\n", "not a request"),
        (b"\n", "not a request"),
        (b"\xff\xfe\x00\n", "not a request"),
        (b"[]\n", "not a request"),
        (b"{}\n", "command"),
        (b'{"command": 3}\n', "command"),
        (b'{"command": "explode"}\n', "unknown command"),
        (b'{"command": "stop", "args": {"drain_s": "long"}}\n', "drain_s"),
        (b'{"command": "stop", "args": {"force": true}}\n', "force"),
        (b'{"command": "stop", "args": []}\n', "stop"),
        (b"x" * (MAX_REQUEST_BYTES + 10) + b"\n", "bytes"),
    ],
)
def test_garbage_gets_an_error_and_costs_nobody_else(running: Running, line: bytes, words: str) -> None:
    answer = json.loads(running.raw(line))
    assert answer["ok"] is False
    assert words in answer["error"]
    assert answer["exit_code"] != 0
    assert call(running.path, Ping(), soon()).pid
    assert running.instance.stops == []


def test_a_client_that_leaves_in_the_middle_costs_nothing(running: Running) -> None:
    for part in (b"", b'{"comm', b'{"command": "status"}\n'):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(running.path))
            client.sendall(part)
    assert call(running.path, Ping(), soon()).pid
    wait_until(lambda: not running.server.clients, 5, "connections of clients that left are ended")


def test_clients_that_say_nothing_do_not_keep_others_out_for_ever(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "IDLE_LIMIT_S", 0.2)
    idle = [socket.socket(socket.AF_UNIX) for _ in range(server_module.MAX_CLIENTS)]
    try:
        for client in idle:
            client.connect(str(running.path))
        wait_until(lambda: answers(running.path), 5, "room again after the idle limit")
    finally:
        for client in idle:
            client.close()


def answers(path: Path) -> bool:
    try:
        return bool(call(path, Ping(), soon()).pid)
    except NotRunningError:
        return False


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(NotRunningError):
        call(tmp_path / "absent.sock", Ping(), soon())


def test_somebody_who_does_not_answer(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "s"))
        silent.listen()
        began_s = time.monotonic()
        with pytest.raises(DeadlineError):
            call(tmp_path / "s", Ping(), time.monotonic() + 0.2)
        assert time.monotonic() - began_s < 2


def test_a_socket_of_a_killed_run_is_replaced_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as earlier:
        earlier.bind(str(path))
    made = Running(path)
    assert call(path, Ping(), soon()).pid
    made.stop()
    assert not path.exists()


@pytest.mark.parametrize("name", ["x" * 120, "absent/control.sock"])
def test_a_path_that_cannot_be_bound_is_named(tmp_path: Path, name: str) -> None:
    server = ControlServer(tmp_path / name, Context(instance=FakeInstance(), logs=LogSink("info"), drain_s=lambda: 1.0))
    with pytest.raises(ResourceError, match=name[:20]):
        asyncio.run(server.start())


def test_every_command_has_its_name_and_help() -> None:
    for name, command in COMMANDS.items():
        assert command.name == name
        assert command.help.strip()
        assert command.result_type is not None
