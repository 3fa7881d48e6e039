"""Everything an instance holds besides its processes: run directory, port, segment, state page, death pipe.

Owned by the supervisor process. `Claims` is what is claimed before the model is known (name and port);
`Resources` adds what children are told through, and starts them. Each gives back all it has, in any state.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from sglmt.errors import ResourceError, SegmentError
from sglmt.ipc import shared_memory
from sglmt.ipc.addresses import socket_path
from sglmt.ipc.bootstrap import Bootstrap
from sglmt.ipc.process_identity import ProcessIdentity, own_identity
from sglmt.ipc.shared_memory import Arguments, Segment, read_arguments
from sglmt.ipc.state_page import HeaderWord, Slot, SlotWord, StatePage
from sglmt.messages.frame import Role
from sglmt.server_args import PortArgs, SchedulerInfo, ServerArgs
from sglmt.supervisor.environment import child_environment
from sglmt.supervisor.leftovers import end_leftovers, remove_stale
from sglmt.supervisor.resolve_model import cache_directory
from sglmt.supervisor.rundir import STATE_PAGE, InstanceRecord, RunDir, find_instances
from sglmt.supervisor.services import Log
from sglmt.supervisor.slots import SlotTable
from sglmt.supervisor.spawn import SpawnedChild, spawn
from sglmt.supervisor.topology import ProcessSpec, slots_needed
from sglmt.supervisor.unix_listener import bind_listener
from sglmt.supervisor.zygote import Zygote, ZygoteUnavailableError


class Claims:
    """Name and port of an instance, and its identity."""

    def __init__(self, args: ServerArgs, log: Log) -> None:
        """Claim the run directory, end and wipe what killed runs left, bind the port.

        Raises ConfigError, ResourceError or PortError; nothing is held then.
        """
        self.instance_id = secrets.randbits(64) or 1
        self.identity = own_identity()
        self._started_at_unix_s = time.time()
        with contextlib.ExitStack() as undo:
            self.run_dir = RunDir.claim(args.name, args.runtime_dir)
            undo.callback(self.run_dir.remove)
            if ended := end_leftovers(self.run_dir.path / STATE_PAGE):
                log("warning", "supervisor", f"ended what a killed run left: {', '.join(ended)}")
            self.run_dir.wipe()
            self._record(args.name, None)
            for name in remove_stale(self.run_dir.path.parent):
                log("info", "supervisor", f"removed what a killed run named {name!r} left")
            self.listener = bind_listener(
                args.host, args.port, args.uds, args.uds_permissions, args.url_scheme,
                lambda port: _holder(lambda url: urlsplit(url).port == port, args.runtime_dir, self.identity),
                _holder_of_path(args.uds, args.runtime_dir, self.identity),
            )  # fmt: skip
            undo.callback(self.listener.close)
            self._record(args.name, self.listener.url)
            undo.pop_all()

    def release(self) -> None:
        """Give both back."""
        self.listener.close()
        self.run_dir.remove()

    def _record(self, name: str, url: str | None) -> None:
        self.run_dir.write_record(
            InstanceRecord(
                name=name, instance_id=f"{self.instance_id:016x}", process=self.identity, url=url,
                started_at_unix_s=self._started_at_unix_s,
            )
        )  # fmt: skip


class Resources:
    """Segment, state page and death pipe: what children are started with."""

    def __init__(
        self, args: ServerArgs, claims: Claims, model: dict[str, Any], log: Log, zygote: Zygote | None = None
    ) -> None:
        """Sweep segments of the dead, create ours with its first revision. Raises ResourceError.

        Children are forked by `zygote` where there is one and it can, else spawned.
        """
        self._zygote = zygote
        self._args = args
        self._claims = claims
        self._log = log
        self._run_dir = claims.run_dir.path
        self._cache_dir = cache_directory(self._run_dir)
        self.arguments = Arguments(
            server_args=args.without_secrets(),
            port_args=PortArgs(
                run_dir=str(self._run_dir), url=claims.listener.url, host=args.host, port=claims.listener.port
            ),
            model_info=model,
        )
        with contextlib.ExitStack() as undo:
            if swept := shared_memory.sweep():
                log("info", "supervisor", f"removed {len(swept)} shared-memory segments of dead launchers")
            self.segment = self._create_segment()
            undo.callback(self.segment.unlink)
            self.page = _create_page(self._run_dir / STATE_PAGE, claims.instance_id, slots_needed(args))
            undo.callback(self.page.close)
            self.page.set_header(HeaderWord.WORKERS_REQUESTED, args.workers)
            self.page.set_header(HeaderWord.DETOKENIZERS, args.detokenizers)
            self.slots = SlotTable(self.page)
            self._death_read_fd, self._death_write_fd = os.pipe2(os.O_CLOEXEC)
            undo.callback(self._close_death_pipe)
            self._write()
            undo.pop_all()

    def release(self) -> None:
        """Remove segment and page; close the death pipe, which tells any child that is left."""
        self._close_death_pipe()
        self.page.close()
        self.segment.unlink()

    def publish(self, info: SchedulerInfo) -> None:
        """Write the next revision when the scheduler's information is new. Raises ResourceError."""
        if info != self.arguments.scheduler_info:
            self.arguments = msgspec.structs.replace(self.arguments, scheduler_info=info)
            self._write()

    def adopt(self, args: ServerArgs, model: dict[str, Any]) -> None:
        """Tell children these arguments from now on, in the next revision. The number of workers at launch stays,
        because the mode follows from it. Raises ResourceError, and nothing has changed then."""
        told = msgspec.structs.replace(args.without_secrets(), workers=self.arguments.server_args.workers)
        before = self.arguments
        self.arguments = msgspec.structs.replace(before, server_args=told, model_info=model)
        try:
            self._write()
        except ResourceError:
            self.arguments = before
            raise
        self._args = args

    def may_start(self, now_s: float) -> bool:
        """False for the few moments in which the zygote loads."""
        return self._zygote is None or not self._zygote.is_worth_waiting_for(now_s)

    def start(self, command: Sequence[str], spec: ProcessSpec, generation: int) -> tuple[Slot, SpawnedChild]:
        """Start a life of `spec` in a fresh slot, published from before its first instruction.

        Raises OSError or SglmtError, and nothing of it is left then.
        """
        self._ensure_segment()
        slot = self.slots.occupy(spec.role, spec.index, generation)
        worker = spec.role is Role.TOKENIZER_WORKER
        bootstrap = Bootstrap(
            role=spec.role, index=spec.index, generation=generation, slot=slot.number,
            instance_id=self._claims.instance_id, supervisor_pid=os.getpid(), run_dir=str(self._run_dir),
            segment_path=str(self.segment.path), state_page=str(self._run_dir / STATE_PAGE),
            death_fd=self._death_read_fd, ready_fd=-1,
            listen_fd=self._claims.listener.fd if worker else None,
            api_keys=self._args.api_key if worker else (),
            admin_keys=self._args.admin_key if worker else (), cache_dir=str(self._cache_dir),
            log_level=self._args.log_level,
        )  # fmt: skip
        try:
            child = self._fork_or_spawn(command, spec, bootstrap)
        except BaseException:
            self.slots.release(slot)
            raise
        slot[SlotWord.PID] = child.pid
        return slot, child

    def _fork_or_spawn(self, command: Sequence[str], spec: ProcessSpec, bootstrap: Bootstrap) -> SpawnedChild:
        environment = child_environment(spec.role, os.environ)
        if self._zygote is not None:
            with contextlib.suppress(ZygoteUnavailableError):
                return self._zygote.fork(bootstrap, environment)
        return spawn(command, spec.name, bootstrap, environment)

    def ended(self, spec: ProcessSpec, generation: int, slot: Slot) -> None:
        """A life was reaped: free its slot, remove its socket file."""
        self.slots.release(slot)
        socket_path(self._run_dir, spec.role, spec.index, generation).unlink(missing_ok=True)

    def _create_segment(self) -> Segment:
        """In shared memory; where that is full, missing or not for us, in the run directory. Raises ResourceError."""
        claims = self._claims
        try:
            return Segment.create(claims.instance_id, claims.identity)
        except ResourceError as error:
            try:
                segment = Segment.create(claims.instance_id, claims.identity, self._run_dir)
            except ResourceError as second:
                raise ResourceError(f"{error}; nor in the run directory: {second}") from None
            self._log("warning", "supervisor", f"{error}; the arguments are kept in {segment.path} instead")
            return segment

    def _ensure_segment(self) -> None:
        """Put the segment back when something removed or damaged it; a child must not die of that."""
        try:
            read_arguments(self.segment.name, self._claims.instance_id, self.segment.path.parent)
        except SegmentError as error:
            self._log("warning", "supervisor", f"{error}; written again")
            try:
                self._write()
            except ResourceError:  # there is no room for it any more: somewhere else
                self.segment.unlink()
                self.segment = self._create_segment()
                self._write()

    def _write(self) -> None:
        self.page.set_header(HeaderWord.SEGMENT_REVISION, self.segment.write(self.arguments))

    def _close_death_pipe(self) -> None:
        os.close(self._death_read_fd)
        os.close(self._death_write_fd)


def _create_page(path: Path, instance_id: int, slots: int) -> StatePage:
    try:
        return StatePage.create(path, instance_id, slots)
    except OSError as error:
        raise ResourceError(f"state page {path}: {error.strerror}; is the disk full?") from error


def _holder(is_meant: Callable[[str], bool], runtime_dir: str | None, own: ProcessIdentity) -> str | None:
    """The other instance of this user whose URL is meant, listening or not."""
    for found in find_instances(runtime_dir):
        url, process = found.record.url, found.record.process
        if found.alive and process != own and url is not None and is_meant(url):
            return f"sglmt instance {found.record.name!r} (pid {process.pid})"
    return None


def _holder_of_path(uds: str | None, runtime_dir: str | None, own: ProcessIdentity) -> str | None:
    if uds is None:
        return None
    return _holder(lambda url: url == f"unix:{os.path.abspath(uds)}", runtime_dir, own)
