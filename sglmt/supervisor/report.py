"""Builds the snapshot of an instance from what the supervisor holds. Runs in the supervisor, when asked."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from sglmt import __version__
from sglmt.ipc.shared_memory import SEGMENT_BYTES
from sglmt.ipc.state_page import Phase, Slot, SlotWord
from sglmt.messages.frame import Role
from sglmt.server_args import ServerArgs
from sglmt.status.snapshot import (
    InstanceSnapshot,
    LastExit,
    ProcessSnapshot,
    SegmentSnapshot,
    TotalsSnapshot,
    WorkersSnapshot,
)
from sglmt.supervisor.instance_state import Verdict
from sglmt.supervisor.lifecycle import State
from sglmt.supervisor.observe import Usage, UsageSampler
from sglmt.supervisor.process import ManagedProcess
from sglmt.supervisor.resources import Resources
from sglmt.supervisor.restart_policy import signal_name
from sglmt.supervisor.slots import COUNTERS, SlotTable

_RATE_WINDOW_S = 5.0


class RateMeter:
    """Requests and tokens a second over the last few seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque()

    def sample(self, now_s: float, requests: int, tokens: int) -> None:
        """Take a reading of the two counters."""
        self._samples.append((now_s, requests, tokens))
        while len(self._samples) > 2 and now_s - self._samples[0][0] > _RATE_WINDOW_S:
            self._samples.popleft()

    def rates(self) -> tuple[float, float]:
        """(requests a second, tokens a second)."""
        if len(self._samples) < 2:
            return 0.0, 0.0
        (start_s, requests, tokens), (end_s, more_requests, more_tokens) = self._samples[0], self._samples[-1]
        span_s = max(end_s - start_s, 1e-3)
        return (more_requests - requests) / span_s, (more_tokens - tokens) / span_s


class Reporter:
    """What an instance tells of itself; keeps what was seen before, for rates and processor use."""

    def __init__(self, args: ServerArgs) -> None:
        self._args = args
        self._started_at_s = time.monotonic()
        self._usage = UsageSampler()
        self._rates = RateMeter()
        self._restarts: dict[str, int] = {}

    def sample(self, now_s: float, processes: Sequence[ManagedProcess], resources: Resources) -> None:
        """Once a second: rates, and restarts for those who read the state page."""
        before, self._restarts = self._restarts, {process.key: process.life.restarts for process in processes}
        for process in processes:
            more = process.life.restarts - before.get(process.key, 0)
            if more > 0:
                resources.slots.count_restarts(process.spec.role, more)
        self._rates.sample(now_s, *worker_counters(resources.slots, living_slots(processes)))

    def snapshot(
        self,
        instance_id: int,
        url: str,
        verdict: Verdict,
        processes: Sequence[ManagedProcess],
        resources: Resources | None,
        wanted_workers: int | None = None,
        operation: str | None = None,
    ) -> InstanceSnapshot:
        """Everything `status` knows. `resources` is None before they exist and after they are gone;
        `wanted_workers` is None as long as the arguments say how many."""
        now_s, args = time.monotonic(), self._args
        workers = [p for p in processes if p.spec.role is Role.TOKENIZER_WORKER]
        totals, shm = TotalsSnapshot(), None
        if resources is not None:
            totals = describe_totals(resources.slots, living_slots(processes), self._rates)
            segment = resources.segment
            shm = SegmentSnapshot(name=segment.name, bytes=SEGMENT_BYTES, path=str(segment.path))
        return InstanceSnapshot(
            name=args.name,
            instance_id=f"{instance_id:016x}",
            pid=os.getpid(),
            state=verdict.state,
            url=url,
            engine=args.engine,
            model=args.model_path or _default_model(resources),
            mode=args.mode,
            workers=WorkersSnapshot(
                requested=args.workers if wanted_workers is None else wanted_workers,
                ready=sum(worker.serves for worker in workers),
            ),
            shm=shm,
            processes=self._rows(processes, now_s),
            reason=verdict.reason,
            operation=operation,
            uptime_s=now_s - self._started_at_s,
            version=__version__,
            simulator=args.engine == "simulator",
            totals=totals,
        )

    def _rows(self, processes: Sequence[ManagedProcess], now_s: float) -> list[ProcessSnapshot]:
        own_pid = os.getpid()
        usage = self._usage.look([own_pid, *(p.run.child.pid for p in processes if p.run is not None)])
        rows = [describe_supervisor(own_pid, usage[own_pid], now_s - self._started_at_s)]
        for process in processes:
            pid = process.run.child.pid if process.run is not None else 0
            rows.append(describe_process(process, usage.get(pid, Usage()), now_s))
        return rows


def _default_model(resources: Resources | None) -> str:
    """The file of the model that comes with us, once it is resolved."""
    resolved = resources.arguments.model_info.get("model_path") if resources is not None else None
    return PurePath(resolved).name if isinstance(resolved, str) and resolved else "default"


def living_slots(processes: Iterable[ManagedProcess]) -> list[Slot]:
    """The slots of all lives that are not reaped."""
    return [process.run.slot for process in processes if process.run is not None]


def worker_counters(table: SlotTable, slots: Sequence[Slot]) -> tuple[int, int]:
    """(requests, output tokens) of all tokenizer workers there have been."""
    role = Role.TOKENIZER_WORKER
    return (
        table.total(role, SlotWord.REQUESTS_TOTAL, slots),
        table.total(role, SlotWord.OUTPUT_TOKENS, slots),
    )


def describe_totals(table: SlotTable, slots: Sequence[Slot], meter: RateMeter) -> TotalsSnapshot:
    """The instance as a whole; requests and tokens as the workers count them."""
    worker = Role.TOKENIZER_WORKER
    requests, tokens = worker_counters(table, slots)
    ttft_count = table.total(worker, SlotWord.TTFT_COUNT, slots)
    ttft_sum_us = table.total(worker, SlotWord.TTFT_SUM_US, slots)
    schedulers = [slot for slot in slots if slot[SlotWord.ROLE] == Role.SCHEDULER]
    requests_per_s, tokens_per_s = meter.rates()
    counters = {word.name.lower(): sum(table.total(role, word, slots) for role in Role) for word in COUNTERS}
    return TotalsSnapshot(
        requests_total=requests,
        output_tokens=tokens,
        prompt_tokens=table.total(worker, SlotWord.PROMPT_TOKENS, slots),
        running=sum(slot[SlotWord.RUNNING] for slot in schedulers),
        queued=sum(slot[SlotWord.QUEUED] for slot in schedulers),
        requests_per_s=round(requests_per_s, 2),
        tokens_per_s=round(tokens_per_s, 2),
        ttft_ms_mean=ttft_sum_us / ttft_count / 1000 if ttft_count else None,
        counters={name: value for name, value in counters.items() if value},
    )


def describe_process(process: ManagedProcess, usage: Usage, now_s: float) -> ProcessSnapshot:
    """One row. `now_s` is monotonic."""
    life, run = process.life, process.run
    slot = run.slot if run is not None else None
    next_try_in_s = None
    if life.state is State.BACKOFF and life.next_try_at_s is not None:
        next_try_in_s = max(0.0, life.next_try_at_s - now_s)
    return ProcessSnapshot(
        role=process.spec.role.label,
        index=process.spec.index,
        pid=life.pid,
        generation=life.generation,
        state=str(life.state),
        restarts=life.restarts + process.earlier_restarts,
        uptime_s=now_s - run.spawned_at_s if run is not None else 0.0,
        rss_bytes=usage.rss_bytes,
        pss_bytes=usage.pss_bytes,
        cpu_percent=usage.cpu_percent,
        heartbeat_age_ms=_heartbeat_age_ms(slot, now_s),
        in_flight=slot[SlotWord.IN_FLIGHT] if slot is not None else 0,
        phase=_phase(slot),
        connections=slot[SlotWord.CONNECTIONS] if slot is not None else 0,
        next_try_in_s=next_try_in_s,
        last_exit=_last_exit(process, now_s),
        counters={word.name.lower(): slot[word] for word in COUNTERS if slot[word]} if slot is not None else {},
    )


def describe_supervisor(pid: int, usage: Usage, uptime_s: float) -> ProcessSnapshot:
    """The supervisor's own row."""
    return ProcessSnapshot(
        role=Role.SUPERVISOR.label, index=0, pid=pid, generation=1, state=str(State.RUNNING), restarts=0,
        uptime_s=uptime_s, rss_bytes=usage.rss_bytes, pss_bytes=usage.pss_bytes, cpu_percent=usage.cpu_percent,
        heartbeat_age_ms=0.0, in_flight=0,
    )  # fmt: skip


def _heartbeat_age_ms(slot: Slot | None, now_s: float) -> float | None:
    if slot is None or slot[SlotWord.HEARTBEAT_NS] == 0:
        return None
    return round(max(0.0, now_s * 1000 - slot[SlotWord.HEARTBEAT_NS] / 1e6), 1)


def _phase(slot: Slot | None) -> str | None:
    if slot is None:
        return None
    try:
        return Phase(slot[SlotWord.PHASE]).name.lower()
    except ValueError:
        return None


def _last_exit(process: ManagedProcess, now_s: float) -> LastExit | None:
    last = process.life.last_exit
    if last is None:
        return None
    reason = f"{last.text}: {process.last_failure}" if process.last_failure else last.text
    return LastExit(
        generation=last.generation,
        exit_code=last.exit_code,
        signal=signal_name(last.signal) if last.signal is not None else None,
        reason=reason,
        at_unix_s=time.time() - (now_s - last.at_s),
    )
