"""Names of the ipc sockets of one instance. Every name holds role, index and generation: one process life.

Names are kept to a few characters because a unix socket path has at most 107 bytes on Linux.
"""

from __future__ import annotations

from pathlib import Path

from sglmt.delivery.keys import split_life
from sglmt.messages.frame import Role

_LETTERS = {Role.ROUTER: "r", Role.SCHEDULER: "s", Role.DETOKENIZER: "d", Role.TOKENIZER_WORKER: "w"}
CONTROL_SOCKET = "control.sock"  # in the run directory, as the ipc sockets are
LONGEST_NAME_BYTES = len("w4095.1048575")
MAX_SOCKET_PATH_BYTES = 107


def socket_path(run_dir: Path, role: Role, index: int, generation: int) -> Path:
    """The socket file a process life binds."""
    return run_dir / f"{_LETTERS[role]}{index}.{generation}"


def ipc_address(run_dir: Path, role: Role, index: int, generation: int) -> str:
    """The address of the same, as messages and logs name it."""
    return f"ipc://{socket_path(run_dir, role, index, generation)}"


def http_worker_ipc(run_dir: Path, life: int) -> str:
    """The return address of a worker life: where rows and replies for its requests are sent."""
    index, generation = split_life(life)
    return ipc_address(run_dir, Role.TOKENIZER_WORKER, index, generation)
