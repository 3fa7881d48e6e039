"""The load client in C, the floor server and the asyncio client, against real sockets on loopback."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from sglmt.bench.client import Connection, Target
from sglmt.bench.client_render import outcome_table
from sglmt.bench.client_run import Outcome, Plan, run_plan, served_model
from sglmt.bench.command import bench as bench_command
from sglmt.bench.floor import Floor, event_of
from sglmt.bench.load_client import LoadClient, build, write_bodies
from sglmt.errors import ConfigError, SglmtError
from sglmt.status.render import Canvas, to_text

SOURCE = Path(__file__).resolve().parents[3] / "scripts" / "load.c"
WORDS = ("one", " two", " three")


class FakeServer(BaseHTTPRequestHandler):
    """Answers like an OpenAI-compatible server; what it got is kept."""

    protocol_version = "HTTP/1.1"
    got: list[dict[str, object]]

    def do_GET(self) -> None:
        self._whole(200, {"data": [{"id": "m1"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.got.append({**body, "authorization": self.headers["authorization"]})
        if body.get("prompt") == "fail":
            self._whole(429, {"error": {"message": "queue full"}})
        elif body.get("stream"):
            self._stream("late failure" if body.get("prompt") == "late" else None)
        else:
            choices = [{"text": "".join(WORDS)}]
            self._whole(200, {"choices": choices, "usage": {"prompt_tokens": 7, "completion_tokens": 3}})

    def _whole(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, error: str | None) -> None:
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        events = [json.dumps({"choices": [{"text": word}]}) for word in WORDS]
        events.append(
            json.dumps({"error": {"message": error}} if error else {"choices": [], "usage": {"completion_tokens": 3}})
        )
        data = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
        for start in range(0, len(data), 7):  # chunks that end anywhere
            part = data[start : start + 7]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_args: object) -> None:
        """Quiet."""


@contextmanager
def fake_server() -> Iterator[tuple[int, list[dict[str, object]]]]:
    got: list[dict[str, object]] = []
    handler = type("Handler", (FakeServer,), {"got": got})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address[1], got
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def load_client(tmp_path_factory: pytest.TempPathFactory) -> LoadClient:
    if shutil.which("gcc") is None and shutil.which("clang") is None and shutil.which("cc") is None:
        pytest.skip("no C compiler")
    cache = tmp_path_factory.mktemp("load")
    client = build(SOURCE, cache)
    binary = next(cache.iterdir())
    built = binary.stat().st_mtime_ns
    build(SOURCE, cache)
    assert binary.stat().st_mtime_ns == built, "built again although nothing changed"
    return client


def test_the_load_client_counts_events_and_rotates_through_bodies(load_client: LoadClient, tmp_path: Path) -> None:
    bodies = write_bodies(tmp_path / "b", [json.dumps({"prompt": f"p{n}", "stream": True}).encode() for n in range(3)])
    with fake_server() as (port, got):
        report = load_client.run(port, "/v1/completions", bodies, connections=2, requests=6, stream=True, timeout_s=20)
    assert (report.done, report.events, report.failures) == (6, 6 * 4, 0)  # three tokens and the usage
    assert sorted(str(body["prompt"]) for body in got) == ["p0", "p0", "p1", "p1", "p2", "p2"]
    assert 0 < report.first_ms.p50 <= report.total_ms.max


def test_the_load_client_reads_whole_answers(load_client: LoadClient, tmp_path: Path) -> None:
    bodies = write_bodies(tmp_path / "b", [b'{"prompt":"x"}'])
    with fake_server() as (port, got):
        report = load_client.run(port, "/v1/completions", bodies, connections=3, requests=7, stream=False, timeout_s=20)
    assert (report.done, len(got)) == (7, 7)


@pytest.mark.parametrize(("prompt", "told"), [("fail", "4 HTTP errors"), ("late", "4 error events")])
def test_a_load_with_failed_requests_is_no_measurement(
    load_client: LoadClient, tmp_path: Path, prompt: str, told: str
) -> None:
    bodies = write_bodies(tmp_path / "b", [json.dumps({"prompt": prompt, "stream": True}).encode()])
    with fake_server() as (port, _), pytest.raises(SglmtError, match=told):
        load_client.run(port, "/v1/completions", bodies, connections=2, requests=4, stream=True, timeout_s=20)


def test_the_floor_streams_events_of_the_size_asked_for(load_client: LoadClient, tmp_path: Path) -> None:
    assert len(event_of(200)) == 200
    bodies = write_bodies(tmp_path / "b", [b"{}"])
    with Floor(2, step_s=0.001, tokens=5, event_bytes=200) as floor:
        assert len(floor.processes) == 2
        report = load_client.run(floor.port, "/", bodies, connections=8, requests=16, stream=True, timeout_s=20)
    assert report.events == 16 * 5
    assert report.bytes > 16 * 5 * 200
    assert floor.processes == {}


@pytest.mark.parametrize("stream", [True, False])
def test_the_client_gives_text_tokens_and_times(stream: bool) -> None:
    plan = Plan("completions", "m1", requests=5, concurrency=2, prompt_tokens=8, max_tokens=3, stream=stream)
    with fake_server() as (port, got):
        outcome = asyncio.run(run_plan(plan, Target("127.0.0.1", port, api_key="k"), lambda _answer: None))
    assert [answer.text for answer in outcome.good] == ["one two three"] * 5
    assert all(answer.tokens == 3 and answer.total_s > 0 for answer in outcome.good)
    assert all((answer.first_token_s > 0) is stream for answer in outcome.good)
    assert len({str(body["prompt"]) for body in got}) == 5
    assert {body["authorization"] for body in got} == {"Bearer k"}
    shown = outcome.as_json()
    assert (shown["requests"], shown["failed"], shown["output_tokens"]) == (5, 0, 15)
    assert "output tokens/s" in to_text(outcome_table(outcome), Canvas(80, True))


def test_failures_are_counted_by_reason() -> None:
    async def ask(port: int) -> Outcome:
        outcome = Outcome(wall_s=1.0)
        connection = Connection(Target("127.0.0.1", port))
        for prompt in ("fail", "late", "fail", "good"):
            body = json.dumps({"prompt": prompt, "stream": True}).encode()
            outcome.answers.append(await connection.request("/v1/completions", body, stream=True))
        connection.close()
        return outcome

    with fake_server() as (port, _):
        outcome = asyncio.run(ask(port))
    assert len(outcome.good) == 1
    reasons = outcome.errors
    assert next(iter(reasons)).startswith("HTTP 429")
    assert list(reasons.values()) == [2, 1]
    assert "late failure" in list(reasons)[1]


@pytest.mark.parametrize(("url", "expected"), [
    ("http://h:1/", Target("h", 1)),
    ("h:30000", Target("h", 30000)),
    ("https://example.org/api/v1", Target("example.org", 443, True, "/api")),
    ("http://[::1]:8", Target("::1", 8)),
])  # fmt: skip
def test_urls_of_servers(url: str, expected: Target) -> None:
    assert Target.of_url(url) == expected


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:99999", "http://h:x"])
def test_urls_of_nothing_are_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of a server"):
        Target.of_url(url)


def test_the_model_is_asked_for() -> None:
    with fake_server() as (port, _):
        assert asyncio.run(served_model(Target("127.0.0.1", port))) == "m1"
    with pytest.raises(SglmtError, match="cannot connect"):
        asyncio.run(served_model(Target("127.0.0.1", port)))


def test_the_command_prints_one_json_document() -> None:
    with fake_server() as (port, got):
        done = CliRunner().invoke(bench_command, [f"http://127.0.0.1:{port}", "-n", "6", "-c", "3", "--json"])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["plan"]["model"] == "m1"
    assert document["outcome"]["failed"] == 0
    assert len(got) == 6
