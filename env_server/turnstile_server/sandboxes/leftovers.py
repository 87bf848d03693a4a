"""Processes of sandboxes, found again: by a record of their first process, or by a mark in their environment.

Records make orphans of a killed server findable; a pid alone does not, it may be another process's by now, so its
start time is kept with it (proc_pid_stat(5), field 22).
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

RECORD_SUFFIX = ".pid"
MARK_VARIABLE = "TURNSTILE_SANDBOX"


def write_record(file: Path, pid: int) -> None:
    file.write_text(f"{pid} {_start_time(pid)}\n")


def kill_recorded(file: Path) -> None:
    """Kills the process of the record when it is still the same one."""
    with contextlib.suppress(OSError, ValueError):
        pid, started = file.read_text().split()
        # Above 1: 0 and -1 would be this process's group and everything.
        if int(pid) > 1 and _start_time(int(pid)) == started:
            os.kill(int(pid), signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """Kills every process in whose environment ``MARK_VARIABLE`` is ``mark``; for sandboxes without isolation,
    where what a helper started may outlive it."""
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if pid != os.getpid() and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return "gone"
