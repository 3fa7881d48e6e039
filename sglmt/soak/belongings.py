"""What an instance holds: processes, threads, descriptors, segments, files. Runs in the soak commands.

Taken at the start and at the end of a run: whatever is more at the end has leaked.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from sglmt.ipc.shared_memory import NAME_PREFIX, SHM_DIR


@dataclass(frozen=True)
class Belongings:
    """Counts. Descriptors and threads are the supervisor's; its children come and go."""

    processes: int
    zombies: int
    supervisor_fds: int
    supervisor_threads: int
    segments: int
    run_files: int
    supervisor_rss_mib: int

    @classmethod
    def of(cls, supervisor_pid: int, run_dir: Path) -> Belongings:
        """Of a running instance."""
        supervisor = psutil.Process(supervisor_pid)
        children = supervisor.children(recursive=True)
        zombies = sum(_is_zombie(child) for child in children)
        return cls(
            processes=len(children) - zombies,
            zombies=zombies,
            supervisor_fds=supervisor.num_fds(),
            supervisor_threads=supervisor.num_threads(),
            segments=len(list(SHM_DIR.glob(f"{NAME_PREFIX}{supervisor_pid}_*"))),
            run_files=sum(1 for path in run_dir.iterdir() if path.is_file() or path.is_socket()),
            supervisor_rss_mib=supervisor.memory_info().rss // 2**20,
        )

    def more_than(self, before: Belongings) -> dict[str, str]:
        """What there is more of now; memory is shown, not judged here."""
        then, now = asdict(before), asdict(self)
        return {
            name: f"{then[name]} → {now[name]}"
            for name in then
            if now[name] > then[name] and name != "supervisor_rss_mib"
        }


def _is_zombie(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
