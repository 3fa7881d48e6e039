"""The life of processes: start to READY, memory, the restart of a worker, scaling up. Runs in `scripts/bench`."""

from __future__ import annotations

import http.client
import os
import signal
import time
from collections.abc import Callable

from sglmt.bench.bench import Bench, Load
from sglmt.bench.cpu import cpu_by_role, pss_by_role, reaped_children_cpu_s, spent
from sglmt.bench.figures import Result, at_most
from sglmt.bench.scenarios.streaming import API_PATHS, streaming_body
from sglmt.bench.server import Server, has_verb
from sglmt.errors import DeadlineError
from sglmt.supervisor.restart_policy import RestartPolicy

MEGABYTE = 1_000_000
POLL_S = 0.0005
REPLACED_WITHIN_S = 30.0
STABLE_S = RestartPolicy().stable_s + 0.5  # after this an end is answered with an immediate restart


def scenarios() -> dict[str, Callable[[Bench, str], Result]]:
    """Name → how it is measured."""
    return {
        "start-8": measure_start,
        "memory-8": measure_memory,
        "idle": measure_idle,
        "restart-worker": measure_restart,
        "scale-1-8": measure_scale,
    }


def measure_start(bench: Bench, name: str) -> Result:
    """`launch --workers 8 --detach`, from the command to READY; the model is in the cache after the first."""
    result = Result(name, {"workers": 8})
    with Server(bench.runtime_dir, "--workers", "1"):
        pass  # resolves the model, once
    for repeat in range(bench.repeats):
        bench.say(f"{name}: start {repeat + 1} of {bench.repeats}")
        before_s = _own_children_cpu_s()
        with Server(bench.runtime_dir, "--workers", "8") as server:
            command_s = _own_children_cpu_s() - before_s
            processes = server.processes()
            cpu_s = cpu_by_role(processes)
            result.add("wall", "s", server.launch_wall_s, at_most(2))
            result.add("cpu_after_resolution", "s", sum(cpu_s.values()), at_most(3))
            supervisor = next(pid for pid, role in processes.items() if role == "supervisor")
            result.add("cpu_helpers", "s", reaped_children_cpu_s(supervisor))
            result.add("cpu_command", "s", command_s)
            for role, seconds in cpu_s.items():
                result.add(f"cpu_{role}", "s", seconds)
    result.notes.append("cpu_helpers: children of the supervisor that have ended, the model resolver above all")
    result.notes.append("cpu_command: the launch and status commands, which end when the instance is ready")
    return result


def _own_children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def measure_memory(bench: Bench, name: str) -> Result:
    """PSS of the whole tree with 8 workers, after every one of them has served a load."""
    streams = 256
    result = Result(name, {"workers": 8, "streams": streams})
    bodies = bench.bodies(name, [streaming_body("completions", 64)])
    load = Load(API_PATHS["completions"], bodies, streams, streams * 2, stream=True)
    for repeat in range(bench.scaled(min(bench.repeats, 3), 1)):
        bench.say(f"{name}: start {repeat + 1}")
        with Server(bench.runtime_dir, "--workers", "8", "--max-running-requests", "4096") as server:
            processes = server.processes()
            idle = pss_by_role(processes)
            bench.measure(processes, server.port, load)
            loaded = pss_by_role(processes)
            result.add("pss", "MB", sum(loaded.values()) / MEGABYTE, at_most(280))
            result.add("pss_before_load", "MB", sum(idle.values()) / MEGABYTE)
            for role, size in loaded.items():
                result.add(f"pss_{role}", "MB", size / MEGABYTE)
    return result


def measure_idle(bench: Bench, name: str) -> Result:
    """CPU of an instance nobody uses, as a share of one core."""
    window_s = bench.scaled(5, 2)
    result = Result(name, {"workers": 2, "window_s": window_s})
    with Server(bench.runtime_dir, "--workers", "2") as server:
        processes = server.processes()
        for _ in range(bench.repeats):
            before, began_s = cpu_by_role(processes), time.monotonic()
            time.sleep(window_s)
            elapsed_s = time.monotonic() - began_s
            cpu_s = spent(before, cpu_by_role(processes))
            result.add("cpu_all", "% of a core", 100 * sum(cpu_s.values()) / elapsed_s)
            for role, seconds in cpu_s.items():
                result.add(f"cpu_{role}", "% of a core", 100 * seconds / elapsed_s)
    return result


def measure_restart(bench: Bench, name: str) -> Result:
    """`kill -9` of the only worker; a new connection waits in the listening socket for its replacement.

    Each victim has run long enough to count as stable: one that dies soon after its start is restarted with a delay.
    """
    result = Result(name, {"workers": 1, "router": "always", "stable_s": STABLE_S})
    with Server(
        bench.runtime_dir, "--workers", "1", "--router", "always", "--simulator-step-ms", "0", "--max-restarts", "1000"
    ) as server:
        _request(server.port, time.monotonic() + REPLACED_WITHIN_S)
        for repeat in range(bench.repeats):
            time.sleep(STABLE_S)
            bench.say(f"{name}: kill {repeat + 1} of {bench.repeats}")
            pid = next(pid for pid, role in server.processes().items() if role == "tokenizer_worker")
            killed_s = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            _request(server.port, killed_s + REPLACED_WITHIN_S)
            result.add("kill_to_served", "s", time.monotonic() - killed_s, at_most(0.15))
    result.notes.append("kill_to_served: from the signal to the end of a one-token request on a new connection")
    return result


def _request(port: int, deadline_s: float) -> None:
    """One request of one token on a new connection, again while that breaks. Raises DeadlineError."""
    body = b'{"model":"default","prompt":"hello","max_tokens":1}'
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineError(f"no worker served within {REPLACED_WITHIN_S:g} s after the last one was killed")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=left_s)
        try:
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(POLL_S)


def measure_scale(bench: Bench, name: str) -> Result:
    """`sglmt scale 8` on an instance with one worker, until the command says that it is done."""
    result = Result(name, {"from": 1, "to": 8})
    if not has_verb("scale"):
        result.skipped = "this version of sglmt has no verb `scale`"
        return result
    for repeat in range(bench.repeats):
        bench.say(f"{name}: {repeat + 1} of {bench.repeats}")
        with Server(bench.runtime_dir, "--workers", "1", "--router", "always") as server:
            before = cpu_by_role(server.processes())
            began_s = time.monotonic()
            server.command("scale", "8")
            result.add("wall", "s", time.monotonic() - began_s)
            snapshot = server.snapshot()
            result.add("workers_ready", "workers", snapshot.workers.ready)
            after = cpu_by_role(server.processes())
            result.add("cpu", "s", sum(after.values()) - sum(before.values()))
    return result
