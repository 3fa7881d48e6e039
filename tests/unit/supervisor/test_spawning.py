"""The parts around a spawn that need no process: environment, slots, lines, the listening socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from sglmt.errors import PortError, ResourceError
from sglmt.ipc.state_page import SlotWord, StatePage
from sglmt.messages.frame import Role
from sglmt.server_args import ServerArgs
from sglmt.supervisor.environment import child_environment, package_root
from sglmt.supervisor.listener import Listener
from sglmt.supervisor.output import split_level
from sglmt.supervisor.report import RateMeter
from sglmt.supervisor.resolve_model import cache_directory
from sglmt.supervisor.slots import SlotTable


def test_environment_holds_nothing_of_ours() -> None:
    environ = {
        "SGLMT_API_KEY": "k", "SGLMT_WORKERS": "3", "NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": "1", "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1", "OMP_NUM_THREADS": "8",
    }  # fmt: skip
    worker = child_environment(Role.TOKENIZER_WORKER, environ)
    assert not {"SGLMT_API_KEY", "SGLMT_WORKERS", "NOTIFY_SOCKET", "WATCHDOG_USEC"} & worker.keys()
    assert (worker["PATH"], worker["CUDA_VISIBLE_DEVICES"], worker["OMP_NUM_THREADS"]) == ("/bin", "", "1")
    scheduler = child_environment(Role.SCHEDULER, environ)
    assert (scheduler["CUDA_VISIBLE_DEVICES"], scheduler["OMP_NUM_THREADS"]) == ("1", "8")
    assert environ["SGLMT_API_KEY"] == "k"


def test_checkout_stays_importable_for_children() -> None:
    path = child_environment(Role.ROUTER, {"PYTHONPATH": "/elsewhere"}).get("PYTHONPATH", "").split(os.pathsep)
    assert path[-1] == "/elsewhere"
    assert (package_root() / "sglmt" / "__init__.py").is_file()


@pytest.fixture
def page(tmp_path: Path) -> StatePage:
    return StatePage.create(tmp_path / "state", 1, 3)


def test_slot_is_published_before_its_life_begins_and_cleared_after(page: StatePage) -> None:
    table = SlotTable(page)
    slot = table.occupy(Role.DETOKENIZER, 1, 4)
    assert page.generation(Role.DETOKENIZER, 1) == 4
    assert page.live(Role.DETOKENIZER) == {(1, 4)}
    table.release(slot)
    assert page.generation(Role.DETOKENIZER, 1) == 0
    assert page.live(Role.DETOKENIZER) == set()
    page.close()


def test_end_of_an_old_life_does_not_unpublish_the_new_one(page: StatePage) -> None:
    table = SlotTable(page)
    old = table.occupy(Role.TOKENIZER_WORKER, 0, 1)
    new = table.occupy(Role.TOKENIZER_WORKER, 0, 2)
    assert page.live(Role.TOKENIZER_WORKER) == {(0, 1), (0, 2)}
    table.release(old)
    assert page.generation(Role.TOKENIZER_WORKER, 0) == 2
    table.release(new)
    page.close()


def test_counters_of_the_dead_are_folded_into_the_totals_of_their_role(page: StatePage) -> None:
    table = SlotTable(page)
    first = table.occupy(Role.TOKENIZER_WORKER, 0, 1)
    first[SlotWord.REQUESTS_TOTAL] = 5
    first[SlotWord.E2E_BUCKETS + 127] = 3
    table.release(first)
    second = table.occupy(Role.TOKENIZER_WORKER, 0, 2)
    second[SlotWord.REQUESTS_TOTAL] = 2
    other = table.occupy(Role.SCHEDULER, 0, 1)
    other[SlotWord.REQUESTS_TOTAL] = 100
    assert table.total(Role.TOKENIZER_WORKER, SlotWord.REQUESTS_TOTAL, [second, other]) == 7
    assert table.total(Role.SCHEDULER, SlotWord.REQUESTS_TOTAL, [second, other]) == 100
    page.close()


def test_full_page_is_an_error_and_slots_are_used_again(page: StatePage) -> None:
    table = SlotTable(page)
    slots = [table.occupy(Role.TOKENIZER_WORKER, index, 1) for index in range(3)]
    with pytest.raises(ResourceError, match="all 3 slots"):
        table.occupy(Role.ROUTER, 0, 1)
    table.release(slots[1])
    assert table.occupy(Role.ROUTER, 0, 1).number == slots[1].number
    page.close()


@pytest.mark.parametrize(
    ("line", "level", "text"),
    [
        (b"WARNING it rains", "warning", "it rains"),
        (b"ERROR: broken", "error", "broken"),
        (b"DEBUG x y", "debug", "x y"),
        (b"Traceback (most recent call last):", "info", "Traceback (most recent call last):"),
        (b"INFO", "info", "INFO"),
        (b"", "info", ""),
        (b"\xff\xfe", "info", "\ufffd\ufffd"),
    ],
)
def test_level_of_a_line(line: bytes, level: str, text: str) -> None:
    assert split_level(line) == (level, text)


def test_rates_are_those_of_the_last_seconds() -> None:
    meter = RateMeter()
    assert meter.rates() == (0.0, 0.0)
    for second in range(20):
        meter.sample(second, requests=second * 10, tokens=second * 100)
    assert meter.rates() == (10.0, 100.0)
    for second in range(20, 27):
        meter.sample(second, requests=190, tokens=1900)
    assert meter.rates() == (0.0, 0.0)


def test_listener_refuses_connections_until_it_listens() -> None:
    listener = Listener.bind("127.0.0.1", 0)
    try:
        with socket.socket() as early:
            assert early.connect_ex(("127.0.0.1", listener.port)) != 0
        listener.start_listening()
        listener.start_listening()
        socket.create_connection(("127.0.0.1", listener.port), timeout=2).close()
        assert not os.get_inheritable(listener.fd)
    finally:
        listener.close()


def test_bound_port_is_taken_before_anybody_listens() -> None:
    listener = Listener.bind("127.0.0.1", 0)
    try:
        with pytest.raises(PortError, match=rf"127.0.0.1:{listener.port}: the port is taken by my friend"):
            Listener.bind("127.0.0.1", listener.port, lambda port: "my friend")
    finally:
        listener.close()


def test_listening_port_names_its_holder() -> None:
    listener = Listener.bind("127.0.0.1", 0)
    listener.start_listening()
    try:
        with pytest.raises(PortError, match=f"pid {os.getpid()}"):
            Listener.bind("127.0.0.1", listener.port)
    finally:
        listener.close()


def test_port_with_lingering_connections_can_be_bound_and_listened_on_again() -> None:
    first = Listener.bind("127.0.0.1", 0)
    port = first.port
    first.start_listening()
    client = socket.create_connection(("127.0.0.1", port), timeout=2)
    with socket.socket(fileno=os.dup(first.fd)) as server:
        server.setblocking(True)
        accepted, _ = server.accept()
    accepted.close()  # the server closes first: TIME_WAIT is on its side
    assert client.recv(1) == b""
    client.close()
    first.close()
    second = Listener.bind("127.0.0.1", port)
    second.start_listening()
    second.close()


@pytest.mark.parametrize(
    ("host", "words"), [("203.0.113.1", "not an address of this machine"), ("no-such-host.invalid", "--host")]
)
def test_host_that_is_not_ours(host: str, words: str) -> None:
    with pytest.raises(PortError, match=words):
        Listener.bind(host, 0)


@pytest.mark.parametrize(
    ("host", "prefix"),
    [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:"), ("localhost", "http://127.0.0.1:")],
)
def test_url_can_be_used_on_this_machine(host: str, prefix: str) -> None:
    listener = Listener.bind(host, 0)
    assert listener.url == f"{prefix}{listener.port}"
    listener.close()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_ipv6_wildcard_serves_both_families() -> None:
    listener = Listener.bind("::", 0)
    try:
        assert listener.url == f"http://[::1]:{listener.port}"
        listener.start_listening()
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, listener.port), timeout=2).close()
    finally:
        listener.close()


def test_cache_directory_falls_back_to_the_run_directory(tmp_path: Path) -> None:
    home, run_dir = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    run_dir.mkdir()
    assert cache_directory(run_dir, {"HOME": str(home)}) == home / ".cache" / "sglmt"
    assert cache_directory(run_dir, {"HOME": str(home), "XDG_CACHE_HOME": str(tmp_path / "xdg")}) == (
        tmp_path / "xdg" / "sglmt"
    )
    (tmp_path / "blocked").touch()
    assert cache_directory(run_dir, {"HOME": str(tmp_path / "blocked")}) == run_dir / "cache"
    assert cache_directory(run_dir, {}) == run_dir / "cache"


def test_defaults_are_valid() -> None:
    ServerArgs().validate()
