"""One question to the supervisor from an event loop. Runs in the tokenizer workers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec

from sglmt.control.commands import Command
from sglmt.control.protocol import MAX_REPLY_BYTES, ControlError, RawReply, ServerSideError
from sglmt.errors import DeadlineError, NotRunningError


async def ask(socket_path: Path, command: Command, deadline_s: float) -> Any:
    """Send one command and return its result, decoded to the command's `result_type`.

    Raises ServerSideError (refused), DeadlineError, NotRunningError (nobody answers) or ControlError.
    """
    request = msgspec.json.encode({"command": command.name, "args": command}) + b"\n"
    try:
        async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
            reader, writer = await asyncio.open_unix_connection(str(socket_path), limit=MAX_REPLY_BYTES)
            try:
                writer.write(request)
                line = await reader.readline()
            finally:
                writer.close()
    except TimeoutError:
        raise DeadlineError("the supervisor did not answer in time") from None
    except OSError as error:
        raise NotRunningError(f"the supervisor does not answer ({error.strerror or error})") from None
    try:
        reply = msgspec.json.decode(line, type=RawReply)
        if not reply.ok:
            raise ServerSideError(reply.error or "refused without a reason", reply.exit_code)
        return msgspec.json.decode(reply.result, type=command.result_type)
    except msgspec.MsgspecError as error:
        raise ControlError(f"the supervisor's answer cannot be read: {error}") from error
