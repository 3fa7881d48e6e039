"""What the processes of an instance hold and have counted. Runs in the mixed command.

Memory is what each process has for itself, taken when nothing is under way: children share pages with the process they
were forked from, and their resident set would hide what fills the free room in those. State is read from the state
page: what schedulers and detokenizers keep of requests, ended ones too. Counters are compared with what clients saw.
"""

from __future__ import annotations

import time

import psutil

from sglmt.chaos.instance import ChaosInstance
from sglmt.chaos.mixed_load import Tally
from sglmt.ipc.state_page import HeaderWord, SlotWord, StatePage
from sglmt.messages.frame import Role
from sglmt.status.metric_words import ROUTES, AbortCause, Outcome, abort_word, route_word
from sglmt.supervisor.rundir import STATE_PAGE

IDLE_WITHIN_S = 30.0  # a worker that has nothing to do sends its list every 10 s
LOOK_EVERY_S = 0.1
NEVER = (
    SlotWord.UNROUTABLE, SlotWord.UNDECODABLE, SlotWord.DROPPED_MESSAGES, SlotWord.DUPLICATE_ROWS, SlotWord.GAP_ROWS,
    SlotWord.STALE_ATTEMPT_ROWS, SlotWord.RESUMES, SlotWord.RESUBMISSIONS, SlotWord.APPROXIMATE_RESUMES,
    SlotWord.SLOW_CLIENT_ABORTS,
)  # fmt: skip


class InstanceState:
    """The state page of a running instance, read only."""

    def __init__(self, instance: ChaosInstance) -> None:
        snapshot = instance.snapshot()
        self._supervisor_pid = snapshot.pid
        self._page = StatePage.open(instance.run_dir / STATE_PAGE, int(snapshot.instance_id, 16))

    def close(self) -> None:
        """Unmap the page."""
        self._page.close()

    def held(self) -> dict[str, int]:
        """Process → requests in flight or kept, of those that have any."""
        found: dict[str, int] = {}
        for number in range(self._page.header(HeaderWord.SLOTS_EVER_USED)):
            slot = self._page.slot(number)
            kept = slot[SlotWord.IN_FLIGHT] + slot[SlotWord.RETAINED] + slot[SlotWord.QUEUED] + slot[SlotWord.RUNNING]
            if slot[SlotWord.OCCUPIED] and kept:
                found[f"{Role(slot[SlotWord.ROLE]).label}:{slot[SlotWord.INDEX]}"] = kept
        return found

    def wait_until_nothing_is_held(self) -> dict[str, int]:
        """What is held after waiting for it to be nothing."""
        until_s = time.monotonic() + IDLE_WITHIN_S
        while (held := self.held()) and time.monotonic() < until_s:
            time.sleep(LOOK_EVERY_S)
        return held

    def memory_kib(self) -> dict[str, int]:
        """Process title → private KiB, of the supervisor and everything below it."""
        supervisor = psutil.Process(self._supervisor_pid)
        found = [supervisor, *supervisor.children(recursive=True)]
        return {_title(process): process.memory_full_info().uss // 1024 for process in found}

    def total(self, word: int) -> int:
        """A counter over all processes there have been."""
        lives = (self._page.slot(number) for number in range(self._page.header(HeaderWord.SLOTS_EVER_USED)))
        living = sum(slot[word] for slot in lives if slot[SlotWord.OCCUPIED])
        return living + sum(self._page.totals(role)[word] for role in Role)

    def outcome(self, outcome: Outcome) -> int:
        """HTTP requests that ended so, on every route."""
        return sum(self.total(route_word(path, outcome)) for path in ROUTES)


def unexplained(state: InstanceState, tally: Tally) -> list[str]:
    """Counters that do not follow from what the clients did and saw."""
    wrong = [f"{word.name}: {state.total(word)}, expected 0" for word in NEVER if state.total(word)]
    causes = {cause: state.total(abort_word(cause)) for cause in AbortCause}
    http = tally.http
    late = state.total(SlotWord.LATE_ROWS)
    bounds = [
        ("HTTP ok", state.outcome(Outcome.OK), http["ok"], http["ok"] + tally.left_at_most),
        ("HTTP refused", state.outcome(Outcome.REFUSED), http["refused"], http["refused"] + tally.left_at_most),
        ("HTTP failed", state.outcome(Outcome.FAILED), http["failed"], http["failed"]),
        ("HTTP aborted", state.outcome(Outcome.ABORTED), http["aborted"], http["aborted"] + tally.left_at_most),
        ("LATE_ROWS", late, 0, tally.rows_under_way_at_most),
        ("PROMPT_TOKENS", state.total(SlotWord.PROMPT_TOKENS), tally.prompt_tokens,
         tally.prompt_tokens + tally.prompt_tokens_at_most),
        ("OUTPUT_TOKENS", state.total(SlotWord.OUTPUT_TOKENS), tally.tokens, tally.tokens + tally.tokens_at_most),
        ("aborts by id", causes.pop(AbortCause.ABORT_REQUEST), tally.aborted_requests, tally.aborted_choices_at_most),
        ("clients that left", causes.pop(AbortCause.CLIENT_DISCONNECTED), 0, tally.left_at_most),
    ]  # fmt: skip
    wrong += [
        f"{name}: {value}, expected {least}" + (f" to {most}" if most != least else "")
        for name, value, least, most in bounds
        if not least <= value <= most
    ]
    return wrong + [f"aborts, {cause.name.lower()}: {count}, expected 0" for cause, count in causes.items() if count]


def grown(before_kib: dict[str, int], after_kib: dict[str, int], tolerance_kib: int) -> dict[str, str]:
    """The processes that hold more now than they may."""
    names = before_kib.keys() | after_kib.keys()
    pairs = {name: (before_kib.get(name, 0), after_kib.get(name, 0)) for name in names}
    return {
        name: f"{before} → {after} KiB"
        for name, (before, after) in sorted(pairs.items())
        if after - before > tolerance_kib or not before or not after
    }


def _title(process: psutil.Process) -> str:
    """Its title without the instance's name, and the pid: a process that was replaced is another one."""
    return f"{(process.cmdline() or [process.name()])[0].split()[0]}@{process.pid}"
