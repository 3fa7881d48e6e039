"""`--uds`: a path is claimed once; what a dead run left is replaced, what somebody serves is not."""

from __future__ import annotations

import os
import socket
import stat
import time
from pathlib import Path

import pytest

from sglmt.errors import ConfigError, PortError
from sglmt.server_args import ServerArgs
from sglmt.supervisor import unix_listener
from sglmt.supervisor.unix_listener import UnixListener


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(unix_listener, "_RELEASE_WAIT_S", 0.1)
    return tmp_path / "u"


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        return client.connect_ex(str(path)) == 0


def test_a_path_is_bound_with_its_mode_and_removed_at_the_end(path: Path) -> None:
    listener = UnixListener.bind_path(path, 0o660)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert (listener.url, listener.port) == (f"unix:{path}", 0)
    assert not connects(path)  # nobody could answer
    listener.start_listening()
    listener.start_listening()
    assert connects(path)
    listener.close()
    listener.close()
    assert list(path.parent.iterdir()) == []


def test_a_claimed_path_is_refused_before_anybody_listens(path: Path) -> None:
    listener = UnixListener.bind_path(path, 0o600)
    with pytest.raises(PortError, match="instance 'a'"):
        UnixListener.bind_path(path, 0o600, "sglmt instance 'a' (pid 1)")
    began_s = time.monotonic()
    with pytest.raises(PortError, match="in use"):
        UnixListener.bind_path(path, 0o600)
    assert time.monotonic() - began_s < 2
    listener.start_listening()
    assert connects(path)
    listener.close()


def test_the_server_of_somebody_else_is_left_alone(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(PortError, match="in use"):
            UnixListener.bind_path(path, 0o600)
        assert connects(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["u"]


def test_what_a_dead_run_left_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
        dead.listen()
    path.with_name("u.lock").touch()
    listener = UnixListener.bind_path(path, 0o600)
    listener.start_listening()
    assert connects(path)
    listener.close()
    assert list(path.parent.iterdir()) == []


def test_a_file_that_is_no_socket_is_never_replaced(path: Path) -> None:
    for make in (Path.touch, Path.mkdir, lambda entry: entry.symlink_to("/nowhere"), os.mkfifo):
        make(path)
        with pytest.raises(PortError, match="no socket"):
            UnixListener.bind_path(path, 0o600)
        assert [entry.name for entry in path.parent.iterdir()] == ["u"]
        path.rmdir() if path.is_dir() else path.unlink()


def test_a_socket_that_somebody_put_in_its_place_is_not_removed(path: Path) -> None:
    listener = UnixListener.bind_path(path, 0o600)
    path.unlink()
    path.touch()
    listener.close()
    assert path.exists()


def test_a_directory_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(PortError, match="none/u"):
        UnixListener.bind_path(path.parent / "none" / "u", 0o600)


@pytest.mark.parametrize(
    "options",
    [{"uds": ""}, {"uds": "/tmp/" + "a" * 120}, {"uds": "a/"}, {"uds_mode": "rw"}, {"uds_mode": "044"}],
)
def test_values_that_cannot_work(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="--uds"):
        ServerArgs(**options).validate()


def test_the_limit_counts_bytes() -> None:
    ServerArgs(uds="/tmp/" + "a" * 102).validate()
    with pytest.raises(ConfigError, match="108 bytes"):
        ServerArgs(uds="/tmp/" + "a" * 101 + "é").validate()
