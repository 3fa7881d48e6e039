"""TokenizerWorker: one HTTP server on the shared port, one tokenizer, and the requests it accepted. Runs as
`sglmt::tokenizer_worker:<index>`.

One event loop serves everything: HTTP, the inbox (a reader on the queue's descriptor that hands every row to
its request), and a tick that follows the state page. Long prompts are tokenized in a thread. The worker is
ready when it can serve, and says so again (`probed`) when a request of its own came back through every
process. On SIGTERM it stops accepting, lets running requests finish until the drain deadline, and ends.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import uvloop

from sglmt import __version__
from sglmt.control.async_client import ask
from sglmt.control.commands import Change, Command, Status
from sglmt.control.protocol import ServerSideError
from sglmt.control.state import ControlChange, ControlOutcome, ControlState
from sglmt.errors import ExitCode, SglmtError
from sglmt.http.access import Access
from sglmt.http.app import App
from sglmt.http.auth import ApiKeys
from sglmt.http.embedding_handlers import embedding_probe
from sglmt.http.errors import bad_request, unavailable
from sglmt.http.generation_handlers import probe_submission
from sglmt.http.limits import ModelLimits
from sglmt.http.native.info import server_info_body
from sglmt.http.output.rules import output_rules
from sglmt.http.routes import all_routes
from sglmt.http.server import HttpServer
from sglmt.http.streams import Flusher
from sglmt.ipc.addresses import CONTROL_SOCKET, http_worker_ipc
from sglmt.ipc.state_page import HeaderWord, Phase, SlotWord
from sglmt.messages.frame import Role
from sglmt.messages.sampling import FinishReason, TokenLogprobs
from sglmt.messages.to_detokenizer import BatchEmbeddingOutput
from sglmt.messages.to_worker import AbortsDone, BatchStrOutput, UnknownRequests
from sglmt.server_args import SchedulerInfo, ServerArgs
from sglmt.status.counters import read_counts
from sglmt.status.metrics import BuildInfo, exposition
from sglmt.status.recovery import recovering_reason
from sglmt.tls import server_context
from sglmt.tokenizer.chat_template import ChatTemplate
from sglmt.tokenizer.encode_cache import EncodeCache
from sglmt.tokenizer.loading import Tokenizer
from sglmt.tokenizer.model_info import ModelInfo
from sglmt.workers.child import ChildContext
from sglmt.workers.connection_share import ConnectionShare
from sglmt.workers.control_follower import ControlFollower
from sglmt.workers.counters import FrameReceiver
from sglmt.workers.frontend import Frontend
from sglmt.workers.live_request import LiveRequest
from sglmt.workers.preloaded import Preloaded, take_or_load

TICK_S = 0.05
TICKS_RIDE_S = 0.2
REPORT_S = 0.2
BUSY_TICK_S = 0.002  # while something is kept back for the next hop
PROBE_PATIENCE_S = 2.0
# Requests leave no garbage that counting references does not free (a test holds them to it), and what they hold while
# they run is not worth looking through: only when 20,000 more objects than before are there, some 400 requests.
GC_THRESHOLDS = (20_000, 4, 5)
QUIET_S = 1.0  # a worker that leaves alone closes connections on which no request has come for so long


class TokenizerWorker:
    """One worker process. Implements `sglmt.http.service.Service`."""

    def __init__(self, child: ChildContext, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._child = child
        self.args = child.args
        self.tokenizer = tokenizer
        self.encode_cache = EncodeCache(
            tokenizer.encode, tokenizer.info.separators, self.args.tokenizer_cache_mb * 1024 * 1024
        )
        self.template = template
        self.keys = ApiKeys(child.bootstrap.api_keys, child.bootstrap.admin_keys)
        self.frontend = Frontend(child)
        self.flusher = Flusher()
        self.started_unix_s = int(time.time())
        self._inbox = child.transport.inbox(http_worker_ipc(child.run_dir, self.frontend.life))
        self._receiver = FrameReceiver(child)
        self._limits: ModelLimits | None = None
        self._limits_revision = -1
        self._output_rules = output_rules(
            self.args.tool_call_parser,
            self.args.reasoning_parser,
            template.source if template is not None else "",
            tokenizer.token_to_id,
            tokenizer.is_special,
        )
        self._share = ConnectionShare(child.page, child.slot)
        self._stopping = asyncio.Event()
        self._ticked_at_s = self._timer_ticked_at_s = 0.0
        self._engine_away_since_s: float | None = None
        self._control = ControlFollower(child, self._apply_control)
        self.frontend.confirm_control(self._control.state.version)

    # the loop

    async def run(self) -> None:
        """Serve until asked to stop."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize"))
        self._child.on_stop(partial(loop.call_soon_threadsafe, self._stopping.set))
        if self._child.stop_requested:
            return
        listen_fd = self._child.bootstrap.listen_fd
        if listen_fd is None:
            raise RuntimeError("a tokenizer worker needs the listening socket")
        access = Access(self.args.cors_origin, self.args.allowed_host)
        app = App(self, access, all_routes(), self._child.slot, self._child.log)
        tls = None
        if self.args.ssl_certfile is not None:
            tls = server_context(self.args.ssl_certfile, self.args.ssl_keyfile)
        self._server = HttpServer(
            app,
            socket.socket(fileno=os.dup(listen_fd)),
            keep_alive_s=self.args.keep_alive_timeout,
            receive_timeout_s=self.args.receive_timeout,
            connection_counts=self._share.open_connections,
            count_changed=self._share.count,
            count_refusal=app.count_refusal,
            recent_accepts=self._share.recent_accepts,
            tls=tls,
        )
        self._child.transport.poller.hand_over(loop, self._run_queue_handler)
        loop.add_reader(self._child.death_fd, self._child.supervisor_is_gone)
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        self._tick()
        self._child.ready()
        async with asyncio.TaskGroup() as group:
            ticking = group.create_task(self._tick_forever())
            probing = group.create_task(self._probe_then_accept())
            await self._stopping.wait()
            probing.cancel()
            await self._drain()
            ticking.cancel()
        self._inbox.close()
        self._child.transport.poller.take_back()

    async def _probe_then_accept(self) -> None:
        """Take connections as soon as a first request has come back (or others already serve).

        While generation is paused none comes back: a worker that starts then is not to be taken for one that hangs.
        """
        if self._child.page.header(HeaderWord.READY):
            self._server.start_accepting()
        while not self._control.state.paused and not await self.probe_engine(time.monotonic() + PROBE_PATIENCE_S):
            self._child.log("debug", "no answer to the first request yet")
        self._child.probed()
        self._server.start_accepting()

    async def _tick_forever(self) -> None:
        next_report_s = next_second_s = 0.0
        while True:
            await asyncio.sleep(BUSY_TICK_S if self.frontend.unsent_bytes else self._until_tick_s())
            if self.frontend.unsent_bytes or self._tick_is_due():
                self._tick()
                self._timer_ticked_at_s = self._ticked_at_s
            now_s = time.monotonic()
            if now_s >= next_report_s:
                next_report_s = now_s + REPORT_S
                self._report()
            if now_s >= next_second_s:
                next_second_s = now_s + 1.0
                self._server.tick()
                self.frontend.keep_streams_alive()
                self._fail_what_waits_too_long()

    def _tick_is_due(self) -> bool:
        return time.monotonic() - self._ticked_at_s >= TICK_S

    def _until_tick_s(self) -> float:
        """Ticks ride on messages as long as these come, and the timer, whose wake-ups cost more than they do, looks
        rarely whether they still come."""
        rides = self._ticked_at_s > self._timer_ticked_at_s
        self._timer_ticked_at_s = self._ticked_at_s
        return TICKS_RIDE_S if rides else TICK_S

    def _tick(self) -> None:
        self._ticked_at_s = time.monotonic()
        self._control.poll()
        self.frontend.tick()
        self.flusher.flush()
        self._child.slot.beat()

    def _report(self) -> None:
        """What the status shows and nobody waits for."""
        slot = self._child.slot
        slot[SlotWord.BACKLOG_BYTES] = self.frontend.unsent_bytes
        slot[SlotWord.ENCODE_HITS] = self.encode_cache.hits
        slot[SlotWord.ENCODE_MISSES] = self.encode_cache.misses
        slot[SlotWord.ENCODED_TOKENS] = self.encode_cache.encoded_tokens
        slot[SlotWord.REUSED_TOKENS] = self.encode_cache.reused_tokens
        slot[SlotWord.DROPPED_MESSAGES] = self.frontend.dropped

    def _apply_control(self, before: ControlState, after: ControlState) -> None:
        """Confirm on the data path; adapters are names of models here."""
        if self._limits is not None and after.adapters != before.adapters:
            self._limits = replace(self._limits, adapters=tuple(after.adapters))
        self.frontend.confirm_control(after.version)

    def _fail_what_waits_too_long(self) -> None:
        """An engine that drains, or is back and recovers, is not away: what waits then has its turn."""
        if self._missing_role() is None:
            self._engine_away_since_s = None
            return
        if self._engine_away_since_s is None:
            self._engine_away_since_s = time.monotonic()
        self.frontend.fail_waiting(
            self.args.engine_wait,
            self._engine_away_since_s,
            FinishReason(
                kind="abort",
                status=503,
                code="engine_away",
                message=f"the engine did not come back within {self.args.engine_wait:g} s",
                retry_after_s=5,
            ),
        )

    def _run_queue_handler(self, handler: Callable[[], object]) -> None:
        """Something has arrived, or what was kept can be sent on."""
        try:
            handler()
            self._drain_inbox()
            if self._tick_is_due():
                self._tick()
        except Exception:  # a fault of ours: end loudly, the supervisor starts a fresh worker
            traceback.print_exc()
            os._exit(ExitCode.FAILURE)

    def _drain_inbox(self) -> None:
        """Every frame that was read, then one write a stream."""
        while (frame := self._inbox.receive()) is not None:
            self._take(frame)
        self.flusher.flush()

    def _take(self, frame: bytes) -> None:
        prefix = self._receiver.prefix(frame)
        if prefix is None:
            return
        message = self._receiver.message(prefix, frame)
        try:
            if type(message) is BatchStrOutput:
                self.frontend.take_batch(message, more_follow=self._inbox.has_more)
            elif type(message) is BatchEmbeddingOutput:
                self.frontend.take_embeddings(message)
            elif type(message) is UnknownRequests:
                self.frontend.take_unknown(message)
            elif type(message) is AbortsDone:
                self.frontend.take_aborts_done(message)
            elif message is not None:
                self._child.slot.add(SlotWord.UNROUTABLE)
        except ValueError as error:
            self._child.slot.add(SlotWord.UNDECODABLE)
            self._child.log("error", f"message of kind {prefix.kind} refused: {error}")

    # the end

    @property
    def is_draining(self) -> bool:
        """New requests are refused with 503: the whole instance drains. A worker that leaves alone serves on."""
        return bool(self._child.page.header(HeaderWord.DRAIN_DEADLINE_NS))

    async def _drain(self) -> None:
        """Wait for running requests until the deadline; abort the rest, with an answer.

        When the whole instance stops, new connections are still taken and told so (503) as long as requests run;
        a worker that ends alone leaves them to the others.
        """
        self._child.slot.enter(Phase.DRAINING)
        otherwise_s = time.monotonic() + self.args.drain_timeout
        await self._move_clients_over(otherwise_s)
        self._server.close_idle()
        while self.frontend.live or self.frontend.let_in:
            if time.monotonic() >= self._child.drain_deadline_s(otherwise_s):
                self.frontend.end_all(
                    FinishReason(
                        kind="abort",
                        status=503,
                        code="shutting_down",
                        message="the server is shutting down and the time for running requests is over",
                        retry_after_s=1,
                    )
                )
                break
            await asyncio.sleep(0.01)
        self._server.stop_accepting()
        await self._close_connections(time.monotonic() + 2.0)

    async def _move_clients_over(self, otherwise_s: float) -> None:
        """Of a worker that ends alone: no new connections; requests on those it has are served, and the answer
        closes the connection. Until none is left, the deadline, or the whole instance drains too."""
        if self.is_draining:
            return
        self._server.leave()
        while self.frontend.live or self._server.open_connections:
            if self.is_draining or time.monotonic() >= self._child.drain_deadline_s(otherwise_s):
                break
            self._server.close_quiet(QUIET_S)
            await asyncio.sleep(0.01)

    async def _close_connections(self, deadline_s: float) -> None:
        """Let answers leave, then close what is still open."""
        while self._server.open_connections and time.monotonic() < deadline_s:
            self._server.close_idle()
            self.flusher.flush()
            await asyncio.sleep(0.01)

    # Service

    @property
    def limits(self) -> ModelLimits:
        """Made from the model and, once known, the scheduler's info."""
        arguments = self._child.reread_arguments()
        if self._limits is None or self._limits_revision != self._child.segment_revision:
            limits = _limits(self.args, self.tokenizer.info, arguments.scheduler_info)
            adapters = tuple(self._control.state.adapters)
            self._limits = replace(limits, adapters=adapters, output=self._output_rules)
            self._limits_revision = self._child.segment_revision
        return self._limits

    @property
    def weight_version(self) -> str:
        """Name of the weights in use."""
        return self._control.state.weight_version

    def why_not_ready(self) -> str | None:
        """None when requests can be served, else the reason."""
        if self.is_draining:
            return "draining"
        if self._child.page.header(HeaderWord.READY):
            return None
        missing = self._missing_role()
        if missing is not None:
            return f"the {missing.label} is not running"
        recovering = (recovering_reason(slot) for slot in self._child.page.serving_slots(Role.SCHEDULER))
        return next(filter(None, recovering), "starting")

    def _missing_role(self) -> Role | None:
        """A role of which no process serves, so that no request is answered; None while the instance is ready."""
        if self._child.page.header(HeaderWord.READY):
            return None
        roles = [Role.SCHEDULER, Role.DETOKENIZER, *([Role.ROUTER] if self.args.mode == "multi" else [])]
        return next((role for role in roles if not self._child.page.serving_slots(role)), None)

    def server_info(self) -> bytes:
        """The body of `/get_server_info`; secrets redacted. Raises ApiError 503 before the engine is known."""
        info = self._child.reread_arguments().scheduler_info
        if info is None:
            raise unavailable("the engine is still loading", code="not_ready")
        more = {
            "tokenizer_backend_in_use": self.tokenizer.backend,
            "tokenizer_backend_note": self.tokenizer.backend_note,
            "worker": {"index": self._child.index, "pid": os.getpid()},
        }
        for option, is_set in (("api_key", self.keys.required), ("admin_key", self.keys.admin_required)):
            if is_set:  # the keys themselves are not in the segment
                more[option] = "[redacted]"
        return server_info_body(self.args, info, __version__, more)

    def metrics(self) -> bytes:
        """The body of `/metrics`: the whole instance, from the state page."""
        args = self.args
        build = BuildInfo(version=__version__, engine=args.engine, model=args.model_name, mode=args.mode)
        return exposition(read_counts(self._child.page), build)

    async def change_control(self, change: ControlChange, deadline_s: float) -> ControlOutcome:
        """Have the supervisor make a change everywhere. Raises ApiError (400 refused, 503 no answer)."""
        command = Change(change=change, within_s=max(0.0, deadline_s - time.monotonic() - 0.5))
        outcome = await self._ask_supervisor(command, deadline_s)
        assert isinstance(outcome, ControlOutcome)
        return outcome

    async def internal_state(self, deadline_s: float) -> bytes:
        """The body of `/get_internal_state`. Raises ApiError 503."""
        snapshot = await self._ask_supervisor(Status(), deadline_s)
        return msgspec.json.encode({"control": self._control.state, "instance": snapshot})

    async def _ask_supervisor(self, command: Command, deadline_s: float) -> object:
        try:
            answer: object = await ask(self._child.run_dir / CONTROL_SOCKET, command, deadline_s)
        except ServerSideError as error:
            raise bad_request(str(error)) from None
        except SglmtError as error:
            raise unavailable(str(error), code="supervisor_silent") from None
        return answer

    async def probe_engine(self, deadline_s: float) -> bool:
        """Whether one token came through every process before monotonic `deadline_s`."""
        sink = _ProbeSink()
        special = set(self.tokenizer.info.special_token_ids)
        token_id = next(i for i in range(self.tokenizer.vocab_size) if i not in special)
        make_probe = embedding_probe if self.tokenizer.info.is_embedding else probe_submission
        request = self.frontend.submit(make_probe(self.frontend.next_key(), token_id), 0, 1, sink, False)
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline_s - time.monotonic()):
                return await sink.done
        except TimeoutError:
            return False
        finally:
            self.frontend.cancel([request])


class _ProbeSink:
    """Waits for one finish."""

    def __init__(self) -> None:
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def admitted(self, request: LiveRequest) -> None:
        """Not yet an answer."""

    def row(self, request: LiveRequest, text: str, token_ids: Sequence[int], logprobs: TokenLogprobs | None) -> None:
        """Not yet the end."""

    def finished(
        self,
        request: LiveRequest,
        text: str,
        token_ids: Sequence[int],
        logprobs: TokenLogprobs | None,
        finish: FinishReason,
    ) -> None:
        if not self.done.done():
            self.done.set_result(finish.kind in ("stop", "length"))


def _limits(args: ServerArgs, model: ModelInfo, info: SchedulerInfo | None) -> ModelLimits:
    return ModelLimits(
        model_name=args.model_name,
        context_length=info.context_length if info else args.context_length or model.context_length,
        vocab_size=info.vocab_size if info else model.vocab_size,
        max_prompts_per_request=args.max_prompts_per_request,
        engine=args.engine,
        capabilities=dict(info.capabilities) if info else {},
        aliases=(Path(model.model_path).name,),
        eos_token_ids=tuple(model.eos_token_ids),
        generation_defaults=dict(model.generation_defaults),
        is_simulator=args.engine == "simulator",
        embedding_dimensions=info.embedding_dimensions if info else None,
    )


def run(child: ChildContext) -> None:
    """Entry of the role."""
    child.slot.enter(Phase.LOADING)
    info = msgspec.convert(child.arguments.model_info, ModelInfo)
    forked_with = child.preloaded if isinstance(child.preloaded, Preloaded) else None
    loaded = take_or_load(forked_with, info, child.args.tokenizer_backend)
    _ = loaded.tokenizer.length_bound  # built now, not by the first long prompt
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(child, loaded.tokenizer, loaded.template))


async def _serve(child: ChildContext, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
    await TokenizerWorker(child, tokenizer, template).run()
