"""The log of one instance: whole, bounded, printable lines; kept for `sglmt logs` and written without waiting.

Runs in the supervisor. `LogSink.log` is what every other part calls: it cuts text into lines, cleans them,
keeps the last ones in a ring, hands them to subscribers (the control server) and to a `LineWriter`. The
writer owns one thread, the only one of the supervisor, because a pipe nobody reads, a stopped terminal or a
hanging disk must cost log lines and never a health check; switching the descriptor to non-blocking instead
would change it for the shell that shares it.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime

import msgspec

MAX_LINE_CHARS = 64 * 1024
RING_LINES = 2_000
RING_BYTES = 4 * 1024 * 1024
WRITER_BUFFER_BYTES = 4 * 1024 * 1024

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_LABELS = {"debug": "DEBUG", "info": "INFO ", "warning": "WARN ", "error": "ERROR"}
# Terminal control sequences (CSI, OSC, two-character escapes), then every other control character but tab.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line. `source` is `supervisor` or `role:index`; `at_unix_s` is wall-clock time, for people."""

    number: int
    at_unix_s: float
    level: str
    source: str
    text: str

    def render(self, short: bool = False) -> str:
        """`2026-11-29 21:00:00.123 INFO  tokenizer_worker:0 | text`, local time, no newline.

        `short` leaves out the day and the fraction, for a narrow terminal that somebody is watching.
        """
        at = datetime.fromtimestamp(self.at_unix_s)
        stamp = at.strftime("%Y-%m-%d %H:%M:%S") + f".{at.microsecond // 1000:03d}"
        if short:
            stamp = at.strftime("%H:%M:%S")
        return f"{stamp} {_LABELS.get(self.level, self.level)} {self.source} | {self.text}"


def clean_lines(text: str | bytes) -> list[str]:
    """Printable lines of at most MAX_LINE_CHARS: undecodable bytes and control characters are replaced.

    Terminal escape sequences are removed, so that a child cannot colour, move or lock somebody's terminal.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        visible = _ESCAPES.sub("", line.rstrip("\r")).rpartition("\r")[2]  # what a progress bar ends on
        clean = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", visible).rstrip()
        lines.extend(clean[start : start + MAX_LINE_CHARS] for start in range(0, len(clean) or 1, MAX_LINE_CHARS))
    while lines and not lines[-1]:
        lines.pop()
    return lines


def matches_source(source: str, wanted: str | None) -> bool:
    """Whether a line's source is `wanted`: `ROLE:INDEX` exactly, or `ROLE` for all of its indexes."""
    return wanted is None or source == wanted or source.startswith(wanted + ":")


class LineAssembler:
    """Cuts a child's output into whole lines; a line too long to keep is cut at MAX_LINE_CHARS bytes."""

    def __init__(self) -> None:
        self._partial = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes."""
        self._partial += data
        *lines, rest = bytes(self._partial).split(b"\n")
        while len(rest) > MAX_LINE_CHARS:
            lines.append(rest[:MAX_LINE_CHARS])
            rest = rest[MAX_LINE_CHARS:]
        self._partial = bytearray(rest)
        return lines

    def flush(self) -> list[bytes]:
        """What is left without a newline: the last words of a child that died in the middle of a line."""
        rest, self._partial = bytes(self._partial), bytearray()
        return [rest] if rest else []


class Descriptor:
    """Where lines go: an open descriptor, not owned. After a line that was cut off the next one begins anew."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._torn = False

    def write(self, data: bytes) -> int:
        """Write whole lines, waiting as long as it takes; the number of lines that were lost (nobody reads, or the
        disk is full)."""
        begun = len(b"\n") if self._torn else 0
        data = b"\n" * begun + data
        written = _write_all(self.fd, data)
        if written:
            self._torn = not data[:written].endswith(b"\n")
        return data.count(b"\n", max(written, begun))

    def reopen(self) -> str | None:
        """Nothing to open. What went wrong, else None."""
        return None


class LineWriter:
    """Writes lines from a thread of its own. Bounded: what does not fit is dropped, counted, and told."""

    def __init__(
        self,
        target: int | Descriptor,
        max_bytes: int = WRITER_BUFFER_BYTES,
        notice: Callable[[str], str] = "[{}]".format,
    ) -> None:
        """`target` is a descriptor number or what stands for one; `notice` words a remark about the log itself."""
        self._target = Descriptor(target) if isinstance(target, int) else target
        self._notice = notice
        self._wants_reopen = False
        self._max_bytes = max_bytes
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._busy = False
        self._thread: threading.Thread | None = None
        self._overflowed = 0  # lines that did not fit into our buffer, not told yet
        self._lost = 0  # lines that could not be written, not told yet; the thread's
        self.dropped = 0

    def write(self, line: str) -> None:
        """Queue one line; never waits and never raises."""
        data = line.encode("utf-8", errors="replace") + b"\n"
        with self._changed:
            if self._closing or self._bytes + len(data) > self._max_bytes:
                self.dropped += 1
                self._overflowed += 1
                return
            if self._overflowed:
                self._add(self._line(f"{self._overflowed} lines were dropped: they could not be written in time"))
                self._overflowed = 0
            self._add(data)

    def _add(self, data: bytes) -> None:
        if self._thread is None:  # started late: nothing may have a thread before the fork into background
            self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
            self._thread.start()
        self._lines.append(data)
        self._bytes += len(data)
        self._changed.notify_all()

    def _line(self, remark: str) -> bytes:
        return self._notice(remark).encode("utf-8", errors="replace") + b"\n"

    def redirect(self, target: int | Descriptor) -> None:
        """Write to another descriptor from the next line on."""
        with self._changed:
            self._target = Descriptor(target) if isinstance(target, int) else target

    def reopen(self) -> None:
        """Open the file anew before the next line."""
        with self._changed:
            self._wants_reopen = True
            self._changed.notify_all()

    def flush(self, deadline_s: float) -> bool:
        """Wait until all is written or the deadline (monotonic) passes. True: all written."""
        with self._changed:
            while self._lines or self._busy:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
        return True

    def close(self, deadline_s: float) -> bool:
        """Take no more, wait until all is written or the deadline (monotonic) passes. True: all written."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        return self.flush(deadline_s)

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # signals belong to the main thread
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not (self._lines or self._wants_reopen):
                    if self._closing:
                        return
                    self._changed.wait()
                batch = b"".join(self._lines)
                self._lines.clear()
                self._bytes = 0
                self._busy = True
                target, reopen = self._target, self._wants_reopen
                self._wants_reopen = False
            problem = target.reopen() if reopen else None
            if problem is not None:
                batch = self._line(problem) + batch
            if batch:
                self._write(target, batch)

    def _write(self, target: Descriptor, batch: bytes) -> None:
        if self._lost and not target.write(self._line(f"{self._lost} lines were dropped: they could not be written")):
            self._lost = 0
        lost = target.write(batch)
        if lost:
            self._lost += lost
            with self._changed:
                self.dropped += lost


def _write_all(fd: int, data: bytes) -> int:
    """Write everything, waiting as long as it takes; how many bytes went before nobody read or the disk was full."""
    written = 0
    while written < len(data):
        try:
            written += os.write(fd, memoryview(data)[written:])
        except BlockingIOError:  # somebody else made the shared descriptor non-blocking
            time.sleep(0.05)
        except OSError:
            break
    return written


class LogSink:
    """Where the lines of one instance go. Called on the supervisor's thread only."""

    def __init__(
        self,
        level: str,
        writer: LineWriter | None = None,
        render: Callable[[LogLine], str] = LogLine.render,
        file: LineWriter | None = None,
    ) -> None:
        """`writer` may be changed while it runs; `file` gets every line besides. `render` is how lines look in both."""
        self._threshold = LEVELS[level]
        self.render = render
        self._file = file
        self._ring: deque[LogLine] = deque(maxlen=RING_LINES)
        self._ring_bytes = 0
        self._subscribers: list[Callable[[LogLine], None]] = []
        self._writer = writer
        self._number = 0

    def log(self, level: str, source: str, text: str | bytes) -> None:
        """Take text of one or more lines. Lines below the threshold are dropped."""
        if LEVELS.get(level, LEVELS["info"]) < self._threshold:
            return
        at_unix_s = time.time()
        for clean in clean_lines(text):
            self._number += 1
            self._keep(LogLine(number=self._number, at_unix_s=at_unix_s, level=level, source=source, text=clean))

    def _keep(self, line: LogLine) -> None:
        if len(self._ring) == RING_LINES:
            self._ring_bytes -= len(self._ring[0].text)
        self._ring.append(line)
        self._ring_bytes += len(line.text)
        while self._ring_bytes > RING_BYTES:
            self._ring_bytes -= len(self._ring.popleft().text)
        for subscriber in list(self._subscribers):
            subscriber(line)
        writers = [writer for writer in (self._writer, self._file) if writer is not None]
        if writers:
            text = self.render(line)
            for writer in writers:
                writer.write(text)

    @property
    def dropped(self) -> int:
        """Lines that could not be written where they should go."""
        return sum(writer.dropped for writer in (self._writer, self._file) if writer is not None)

    def reopen(self) -> None:
        """Open log files anew: somebody has moved them."""
        for writer in (self._writer, self._file):
            if writer is not None:
                writer.reopen()

    def recent(self, limit: int = RING_LINES, source: str | None = None) -> list[LogLine]:
        """The last `limit` lines, oldest first, of one source or of all."""
        lines = [line for line in self._ring if matches_source(line.source, source)]
        return lines[-limit:] if limit > 0 else []

    def subscribe(self, subscriber: Callable[[LogLine], None]) -> Callable[[], None]:
        """Call `subscriber` with every new line (it must not wait); the result ends the subscription."""
        self._subscribers.append(subscriber)

        def unsubscribe() -> None:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)

        return unsubscribe

    def use_writer(self, writer: LineWriter | None) -> None:
        """Write to `writer` from the next line on; None: keep lines for the control socket only."""
        self._writer = writer

    def close(self, deadline_s: float) -> bool:
        """Wait until everything is written, at most until the deadline (monotonic)."""
        return all([writer.close(deadline_s) for writer in (self._writer, self._file) if writer is not None])
