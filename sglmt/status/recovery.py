"""Whether an instance continues what it had when its scheduler ended, in words. Pure.

The scheduler writes the numbers into its slot of the state page; the supervisor judges by them, workers tell clients.
"""

from __future__ import annotations

from sglmt.ipc.state_page import Slot, SlotWord


def recovering_reason(slot: Slot) -> str | None:
    """What a scheduler that has taken over still waits for; None when everything continues."""
    left, unheard = slot[SlotWord.RECOVERING], slot[SlotWord.WORKERS_UNHEARD]
    if not left:
        return None
    requests = max(0, left - unheard)
    parts = []
    if unheard:
        parts.append(f"{_count(unheard, 'worker has', 'workers have')} to say what runs")
    if requests:
        parts.append(f"{_count(requests, 'request continues', 'requests continue')}")
    return f"after the engine's death: {', '.join(parts)}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
