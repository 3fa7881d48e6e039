"""What the supervisor and the zygote say to each other, over a SOCK_SEQPACKET pair: one message a packet. Pure data.

The descriptors of a child travel with its `ForkRequest`, in the order stdout, stderr, ready, death, and the
listening socket where there is one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglmt.ipc.bootstrap import Bootstrap

MAX_PACKET_BYTES = 160 * 1024
MAX_DESCRIPTORS = 5


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load what every worker needs, so that forks share it."""

    model_info: dict[str, Any]
    tokenizer_backend: str


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fork a child. `bootstrap`'s descriptors are replaced by those sent along."""

    bootstrap: Bootstrap
    environment: dict[str, str]


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to Prepare; `error` when nothing could be loaded (children load for themselves then)."""

    error: str | None = None


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to ForkRequest: the child, which is the supervisor's by now."""

    pid: int


ZygoteRequest = Prepare | ForkRequest
ZygoteAnswer = Prepared | Forked
