"""What the HTTP handlers need of their worker, as one protocol. Implemented by `workers.tokenizer_worker`."""

from __future__ import annotations

from typing import Protocol

from sglmt.control.state import ControlChange, ControlOutcome
from sglmt.http.auth import ApiKeys
from sglmt.http.limits import ModelLimits
from sglmt.http.streams import Flusher
from sglmt.server_args import ServerArgs
from sglmt.tokenizer.chat_template import ChatTemplate
from sglmt.tokenizer.encode_cache import EncodeCache
from sglmt.tokenizer.loading import Tokenizer
from sglmt.workers.frontend import Frontend


class Service(Protocol):
    """One worker: its arguments, tokenizer, limits, and the way to the engine."""

    args: ServerArgs
    frontend: Frontend
    tokenizer: Tokenizer
    encode_cache: EncodeCache
    keys: ApiKeys
    flusher: Flusher
    started_unix_s: int
    template: ChatTemplate | None

    @property
    def limits(self) -> ModelLimits:
        """Current limits; changes when the scheduler's info does."""
        ...

    @property
    def weight_version(self) -> str:
        """Name of the weights in use."""
        ...

    @property
    def is_draining(self) -> bool:
        """New requests are refused with 503."""
        ...

    def why_not_ready(self) -> str | None:
        """None when requests can be served, else the reason."""
        ...

    def server_info(self) -> bytes:
        """The body of `/get_server_info`; secrets redacted. Raises ApiError 503 before the engine is known."""
        ...

    def metrics(self) -> bytes:
        """The body of `/metrics`: the whole instance, from the state page."""
        ...

    async def change_control(self, change: ControlChange, deadline_s: float) -> ControlOutcome:
        """Have the supervisor make a change everywhere. Raises ApiError (400 refused, 503 no answer)."""
        ...

    async def internal_state(self, deadline_s: float) -> bytes:
        """The body of `/get_internal_state`. Raises ApiError 503."""
        ...

    async def probe_engine(self, deadline_s: float) -> bool:
        """Whether one token came through every process before monotonic `deadline_s`."""
        ...
