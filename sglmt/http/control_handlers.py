"""The control endpoints: each asks the supervisor for a change and tells what every process made of it.

Worker process. A change concerns all processes, so no worker makes one itself: it goes to the supervisor's
control socket, and the answer comes when all in scope have confirmed, or names those that did not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from sglmt.control.state import ControlChange
from sglmt.http.app import Call, Handler
from sglmt.http.errors import not_implemented
from sglmt.http.limits import ModelLimits
from sglmt.http.native.control import (
    outcome_answer,
    parse_continue,
    parse_flush,
    parse_load_adapter,
    parse_logging,
    parse_pause,
    parse_unload_adapter,
    parse_weights,
)

CHANGE_WITHIN_S = 10.0
WEIGHTS_WITHIN_S = 120.0

ChangeParser = Callable[[bytes, ModelLimits], ControlChange]


def control_routes() -> dict[tuple[str, str], Handler]:
    """The routes of this module."""
    return {
        ("POST", "/pause_generation"): partial(change, parse=parse_pause),
        ("POST", "/continue_generation"): partial(change, parse=parse_continue),
        ("POST", "/flush_cache"): partial(change, parse=parse_flush),
        ("POST", "/configure_logging"): partial(change, parse=parse_logging),
        ("POST", "/load_lora_adapter"): partial(change, parse=parse_load_adapter),
        ("POST", "/unload_lora_adapter"): partial(change, parse=parse_unload_adapter),
        ("POST", "/update_weights_from_disk"): partial(change, parse=parse_weights, within_s=WEIGHTS_WITHIN_S),
        ("GET", "/get_internal_state"): internal_state,
        ("POST", "/open_session"): sessions,
        ("POST", "/close_session"): sessions,
    }


async def change(call: Call, parse: ChangeParser, within_s: float = CHANGE_WITHIN_S) -> None:
    """One change of the control state. 200: every process has applied it; 409: one could not; 503: one did not
    confirm in time. The body names them."""
    asked = parse(await call.body(), call.service.limits)
    outcome = await call.service.change_control(asked, time.monotonic() + within_s)
    status, body = outcome_answer(outcome)
    await call.answer(body, status)


async def internal_state(call: Call) -> None:
    """Every process as the supervisor sees it, and the control state all of them have applied."""
    await call.answer(await call.service.internal_state(time.monotonic() + CHANGE_WITHIN_S))


async def sessions(call: Call) -> None:
    """Sessions live in an engine; none of ours has them."""
    raise not_implemented(f"the {call.service.limits.engine} engine does not support sessions")
