"""Processes of sandboxes, found again: by a record of their first process, or by a mark in their environment.

Records make orphans of a killed server findable; a pid alone does not, it may be another process's by now, so its
start time is kept with it (proc_pid_stat(5), field 22).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

RECORD_SUFFIX = ".pid"
MARK_VARIABLE = "TURNSTILE_SANDBOX"
_ROUNDS = 100
_ROUND_S = 0.02
"""A killed process needs a moment to be gone; after two seconds of this it is stuck in the kernel."""
_UNSEEN_ROUNDS = 2


def write_record(file: Path, pid: int) -> None:
    file.write_text(f"{pid} {_start_time(pid)}\n")


def kill_recorded(file: Path) -> None:
    """Kills the process of the record when it is still the same one."""
    with contextlib.suppress(OSError, ValueError):
        pid, started = file.read_text().split()
        # Above 1: 0 and -1 would be this process's group and everything.
        if int(pid) > 1 and _start_time(int(pid)) == started:
            os.kill(int(pid), signal.SIGKILL)


def kill_marked(mark: str) -> bool:
    """Kills every process in whose environment ``MARK_VARIABLE`` is ``mark``; for sandboxes without isolation,
    where what a helper started may outlive it. False: after two seconds there still was one. Blocks.

    One look is not enough: a process may be made behind it, and while one becomes another program its environment
    reads as empty.
    """
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    unseen = 0
    for _ in range(_ROUNDS):
        unseen = 0 if _kill_seen(wanted) else unseen + 1
        if unseen == _UNSEEN_ROUNDS:
            return True
        time.sleep(_ROUND_S)
    return False


def _kill_seen(wanted: bytes) -> bool:
    """Whether any was there."""
    seen = False
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(OSError):
            if pid != os.getpid() and wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                seen = True
                os.kill(pid, signal.SIGKILL)
    return seen


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return "gone"
