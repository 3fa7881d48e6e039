"""Installs the clients, starts the servers, runs each client's check in its own process, says which failed.

The servers: the shipped model; a simulator that says a text with reasoning and tool calls; a simulator with tokens of
its own (log-probabilities); the embedding model of the tests. All with two workers, on the loopback.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

from tests.support.clients.script import SAID
from tests.support.embedding_model import embedding_model_dir
from tests.support.instance import Instance
from tests.support.serving import get, look, post

PACKAGES = {
    "litellm": ["litellm>=1.60,<2"],
    "langchain": ["langchain-openai>=1,<2"],
    "lm_eval": ["lm-eval[api]>=0.4.9,<0.5", "transformers>=4.50,<6"],
}
INSTALL_WITHIN_S = 1200.0
CHECK_WITHIN_S = 300.0
HERE = Path(__file__).parent


def main() -> int:
    """0 when every check passed."""
    parser = argparse.ArgumentParser(prog="scripts/clients", description=__doc__)
    parser.add_argument("clients", nargs="*", choices=[[], *PACKAGES], help="which; default: all")  # type: ignore[arg-type]
    parser.add_argument("--environment", type=Path, help="virtual environment to use and keep")
    options = parser.parse_args()
    chosen = options.clients or list(PACKAGES)
    with contextlib.ExitStack() as stack:
        directory = options.environment or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="clients-")))
        python = environment(directory, [package for client in chosen for package in PACKAGES[client]])
        servers = start(stack)
        failed = [client for client in chosen if not check(client, python, servers)]
        restarts = {name: sum(row.restarts for row in look(made).processes) for name, made in servers.items()}
    print(f"restarts: {restarts}")
    print("all passed" if not failed else f"failed: {', '.join(failed)}")
    return 1 if failed or any(restarts.values()) else 0


def environment(directory: Path, packages: list[str]) -> Path:
    """The Python of a virtual environment with these packages."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    subprocess.run(command, check=True, timeout=INSTALL_WITHIN_S)
    return python


def start(stack: contextlib.ExitStack) -> dict[str, Instance]:
    """The servers by name; they stop with the stack."""

    def launched(*options: str) -> Instance:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="c")))
        return stack.enter_context(Instance(directory)).launch("--workers", "2", *options)

    real = launched()
    said = post(real, "/tokenize", prompt=SAID, add_special_tokens=False).json()["tokens"]
    end = get(real, "/get_model_info").json()["eos_token_ids"][0]
    script = ",".join(map(str, [*said, end]))
    simulator = ("--engine", "simulator", "--simulator-step-ms", "1")
    parsers = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    return {
        "real": real,
        "scripted": launched(*simulator, "--simulator-tokens", script, *parsers),
        "simulator": launched(*simulator),
        "embedding": launched("--model-path", str(embedding_model_dir())),
    }


def check(client: str, python: Path, servers: dict[str, Instance]) -> bool:
    """Run one client's check; its output is shown when it fails."""
    urls = json.dumps({name: made.url for name, made in servers.items()})
    began_s = time.monotonic()
    done = subprocess.run(
        [str(python), str(HERE / f"check_{client}.py"), urls],
        env={**os.environ, **QUIET}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=CHECK_WITHIN_S, check=False,
    )  # fmt: skip
    print(
        f"{client}: {'passed' if done.returncode == 0 else 'FAILED'} in {time.monotonic() - began_s:.1f} s", flush=True
    )
    print("".join(f"  {line}\n" for line in done.stdout.splitlines()), end="", flush=True)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    return done.returncode == 0


# No client calls home.
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "LANGSMITH_TRACING": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
    "OPENAI_API_KEY": "none",
}


if __name__ == "__main__":
    sys.exit(main())
