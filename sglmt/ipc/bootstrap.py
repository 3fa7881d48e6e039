"""What a child is told through its bootstrap pipe before it does anything. Secrets travel only here.

The supervisor writes one msgpack `Bootstrap` into a pipe the child inherits; argv and the environment hold
nothing of it. File descriptors are inherited by number.
"""

from __future__ import annotations

import os

import msgspec

from sglmt.errors import SegmentError
from sglmt.messages.frame import Role

MAX_BOOTSTRAP_BYTES = 1024 * 1024


class Bootstrap(msgspec.Struct, frozen=True, kw_only=True):
    """Who this child is and where it finds the rest."""

    role: Role
    index: int
    generation: int
    slot: int
    instance_id: int
    supervisor_pid: int
    run_dir: str
    segment_path: str
    state_page: str
    death_fd: int  # read end of a pipe: readable (EOF) when the supervisor is gone
    ready_fd: int  # write end: one line `ready` or `failed <reason>`
    cache_dir: str  # where the resolver and the engine keep what they converted
    listen_fd: int | None = None
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    log_level: str = "info"


def read_bootstrap(fd: int) -> Bootstrap:
    """Read the pipe to its end and decode. Raises SegmentError for anything else than one Bootstrap."""
    parts: list[bytes] = []
    size = 0
    while part := os.read(fd, 65536):
        parts.append(part)
        size += len(part)
        if size > MAX_BOOTSTRAP_BYTES:
            raise SegmentError("bootstrap pipe: too long to be one")
    os.close(fd)
    try:
        return msgspec.msgpack.decode(b"".join(parts), type=Bootstrap)
    except msgspec.MsgspecError as error:
        raise SegmentError(f"bootstrap pipe: {error}") from error
