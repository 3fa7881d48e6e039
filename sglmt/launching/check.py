"""`sglmt launch --check`: what would be started, and whether it could be. Starts nothing but the model resolver.

Runs in the command itself. The order is that of a real start: configuration (already validated), name, port,
model; the first thing that would fail raises the same error with the same exit code.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

from sglmt.errors import ResourceError
from sglmt.server_args import ServerArgs
from sglmt.supervisor.resolve_model import cache_directory, resolve_model
from sglmt.supervisor.rundir import find_instances
from sglmt.supervisor.topology import wanted_processes
from sglmt.supervisor.unix_listener import bind_listener


def check_launch(args: ServerArgs) -> list[str]:
    """Lines for people. Raises the SglmtError that a launch would end with."""
    _check_name(args)
    url = _check_port(args)
    model = _resolve(args)
    return describe(args, url, model)


def describe(args: ServerArgs, url: str, model: dict[str, Any]) -> list[str]:
    """What would be started. Pure."""
    context = args.context_length or model.get("context_length")
    facts = [
        str(model.get("model_path") or args.model_path or "default"),
        f"context {context} tokens" if context else "",
        f"vocabulary {model['vocab_size']}" if model.get("vocab_size") else "",
    ]
    simulator = " (makes up tokens)" if args.engine == "simulator" else ""
    port = "any free port" if args.port == 0 and args.uds is None else f"{url} (free)"
    return [
        f"would start instance {args.name!r} in {args.mode} mode:",
        f"  address    {port}",
        f"  model      {', '.join(fact for fact in facts if fact)}",
        f"  served as  {args.model_name}",
        f"  engine     {args.engine}{simulator}",
        f"  processes  {_processes(args)}",
        "nothing was started",
    ]


def _processes(args: ServerArgs) -> str:
    counts: dict[str, int] = {"supervisor": 1}
    for spec in wanted_processes(args):
        counts[spec.role.label] = counts.get(spec.role.label, 0) + 1
    return ", ".join(f"{count} {role}{'s' if count > 1 else ''}" for role, count in counts.items())


def _check_name(args: ServerArgs) -> None:
    for found in find_instances(args.runtime_dir):
        if found.alive and found.record.name == args.name:
            raise ResourceError(
                f"--name {args.name!r} is in use by pid {found.record.process.pid} ({found.path}); "
                f"choose another --name, or `sglmt stop {args.name}` first"
            )


def _check_port(args: ServerArgs) -> str:
    listener = bind_listener(
        args.host, args.port, args.uds, args.uds_permissions, args.url_scheme, lambda _port: None, None
    )
    try:
        return listener.url
    finally:
        listener.close()


def _resolve(args: ServerArgs) -> dict[str, Any]:
    try:
        scratch = tempfile.TemporaryDirectory(prefix="sglmt-check-")
    except OSError as error:
        raise ResourceError(f"--check: no directory for temporary files: {error.strerror}; set TMPDIR") from error
    with scratch as directory:
        cache = cache_directory(Path(directory))
        return asyncio.run(resolve_model(args, cache, time.monotonic() + args.start_timeout))
