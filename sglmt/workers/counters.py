"""How a process counts what it receives and refuses. Runs in every child; writes its own slot only."""

from __future__ import annotations

from sglmt.ipc.state_page import Slot, SlotWord
from sglmt.messages.frame import MAX_FRAME_BYTES, PREFIX_BYTES, FrameError, Prefix, read_prefix
from sglmt.messages.registry import MESSAGES
from sglmt.workers.child import ChildContext

_MESSAGES_IN = SlotWord.MESSAGES_IN  # looked up once


class FrameReceiver:
    """Decodes frames of one process; a refused frame is counted and logged once per reason."""

    def __init__(self, child: ChildContext) -> None:
        self._child = child
        self._slot: Slot = child.slot
        self._instance_id = child.instance_id
        self._logged: set[str] = set()
        self._head: bytes | None = None  # of the last frame that was taken, as it came and as it reads
        self._prefix: Prefix | None = None

    def prefix(self, frame: bytes) -> Prefix | None:
        """The checked prefix, None when the frame is refused."""
        head = frame[:PREFIX_BYTES]
        if head != self._head or len(frame) > MAX_FRAME_BYTES:  # most are like the one before, but for their payload
            try:
                self._prefix = read_prefix(frame, self._instance_id)
            except FrameError as error:
                self.refuse(error)
                return None
            self._head = head
        self._slot.add(_MESSAGES_IN)
        return self._prefix

    def message(self, prefix: Prefix, frame: bytes) -> object | None:
        """The decoded message, None when it is refused."""
        try:
            decoded: object = MESSAGES.decode(prefix, frame)
        except FrameError as error:
            self.refuse(error)
            return None
        return decoded

    def refuse(self, error: FrameError) -> None:
        """Count a refused frame; the first of each reason is logged."""
        self._slot.add(SlotWord.UNDECODABLE)
        if error.reason not in self._logged:
            self._logged.add(error.reason)
            self._child.log("warning", f"{error} (further ones are only counted)")
