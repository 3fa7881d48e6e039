"""A stand-in for `sglmt.workers.child`: speaks its contract with the supervisor, and misbehaves on request.

Run as `fake_child.py PLAN --bootstrap-fd N LABEL`. PLAN is JSON: label (or role, or `*`) → a dict of

- `start`: `ready` (default), `hang`, `exit:<code>`, `failed:<reason>`, `kill:<signal>`
- `then`: `serve` (default), `exit:<code>`, `kill:<signal>`, `silent`; once `after_file` exists, if given
- `since`, `until`: the first and the last generation that misbehave (absent: all do)
- `say`: lines for stderr; `last_words`: text without a newline at its end, just before a misbehaviour at start
- `recovers_until`: a file; a scheduler says that three requests do not continue yet until it exists
- `ignore_term`, `ignore_probe`, `orphan` (outlives its supervisor), `grandchild` (starts a `sleep`): true
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sglmt.ipc.addresses import socket_path
from sglmt.ipc.bootstrap import Bootstrap, read_bootstrap
from sglmt.ipc.state_page import Phase, SlotWord, StatePage
from sglmt.messages.frame import Role

BEAT_S = 0.02


def plan_for(plan: dict[str, dict[str, Any]], label: str, generation: int) -> dict[str, Any]:
    """What this life is to do."""
    chosen = plan.get(label) or plan.get(label.partition(":")[0]) or plan.get("*") or {}
    return chosen if chosen.get("since", 0) <= generation <= chosen.get("until", generation) else {}


def misbehave(deed: str, ready_fd: int) -> None:
    """End as told."""
    word, _, rest = deed.partition(":")
    if word == "exit":
        os._exit(int(rest))
    if word == "kill":
        os.kill(os.getpid(), int(rest))
    if word == "failed":
        os.write(ready_fd, f"failed {rest}\n".encode())
        os._exit(1)
    while True:  # hang
        time.sleep(60)


def report_ready(bootstrap: Bootstrap, chosen: dict[str, Any]) -> None:
    """`info` (scheduler), `ready`, and `probed` (worker)."""
    if bootstrap.role is Role.SCHEDULER:
        info = {
            "engine": "fake", "engine_version": "1", "model_path": "", "context_length": 64, "vocab_size": 10,
            "max_running_requests": 1, "max_total_tokens": None, "capabilities": {}, "is_simulator": True,
        }  # fmt: skip
        os.write(bootstrap.ready_fd, f"info {json.dumps(info)}\n".encode())
    os.write(bootstrap.ready_fd, b"ready\n")
    if bootstrap.role is Role.TOKENIZER_WORKER and not chosen.get("ignore_probe"):
        os.write(bootstrap.ready_fd, b"probed\n")


def serve(bootstrap: Bootstrap, page: StatePage, chosen: dict[str, Any]) -> None:
    """Beat until TERM, or until `then` is due."""
    slot = page.slot(bootstrap.slot)
    then, trigger = chosen.get("then", "serve"), chosen.get("after_file")
    while True:
        recovers_until = chosen.get("recovers_until")
        slot[SlotWord.RECOVERING] = 3 if recovers_until is not None and not Path(recovers_until).exists() else 0
        if then != "serve" and (trigger is None or Path(trigger).exists()):
            if then != "silent":
                misbehave(then, bootstrap.ready_fd)
        else:
            slot.beat()
        slot[SlotWord.REQUESTS_TOTAL] += 1
        time.sleep(BEAT_S)


def main() -> None:
    bootstrap = read_bootstrap(int(sys.argv[3]))
    chosen = plan_for(json.loads(sys.argv[1]), sys.argv[4], bootstrap.generation)
    if not chosen.get("orphan"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != bootstrap.supervisor_pid:
            os._exit(70)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, lambda *_: print("stack dump", file=sys.stderr, flush=True))
    stop = signal.SIG_IGN if chosen.get("ignore_term") else lambda *_: os._exit(0)
    signal.signal(signal.SIGTERM, stop)
    if chosen.get("grandchild"):
        subprocess.Popen(["sleep", "600"])
    page = StatePage.open(Path(bootstrap.state_page), bootstrap.instance_id)
    socket_path(Path(bootstrap.run_dir), bootstrap.role, bootstrap.index, bootstrap.generation).touch()
    page.slot(bootstrap.slot).enter(Phase.BOOTING)
    for line in chosen.get("say", []):
        print(line, file=sys.stderr, flush=True)
    if chosen.get("start", "ready") != "ready":
        sys.stderr.write(chosen.get("last_words", ""))
        sys.stderr.flush()
        misbehave(chosen["start"], bootstrap.ready_fd)
    page.slot(bootstrap.slot)[SlotWord.RECOVERING] = 3 if "recovers_until" in chosen else 0
    page.slot(bootstrap.slot).enter(Phase.READY)
    report_ready(bootstrap, chosen)
    serve(bootstrap, page, chosen)


if __name__ == "__main__":
    main()
