"""Finds processes of sandboxes again: by a record of their first process, or by a mark in their environment.

Records make the orphans of a killed server findable. A pid alone does not: it may belong to another process by
now. So the record keeps the process's start time too (proc_pid_stat(5), field 22).
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
"""A killed process is gone a moment later. One that is there after two seconds is stuck in the kernel."""
_UNSEEN_ROUNDS = 2


def write_record(file: Path, pid: int) -> None:
    file.write_text(f"{pid} {_start_time(pid)}\n")


def kill_recorded(file: Path) -> None:
    """Kills the process of the record if it is still the same one."""
    with contextlib.suppress(OSError, ValueError):
        pid, started = file.read_text().split()
        # Above 1: 0 and -1 would be this process's group and everything.
        if int(pid) > 1 and _start_time(int(pid)) == started:
            os.kill(int(pid), signal.SIGKILL)


def stopped_below(pid: int, depth: int) -> bool:
    """True if a process or one of its descendants, ``depth`` generations down, is stopped by a signal
    (proc_pid_stat(5), field 3)."""
    pids, parents = [str(pid)], [str(pid)]
    for _ in range(depth):
        with contextlib.suppress(OSError):
            parents = [
                child
                for parent in parents
                for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            ]
            pids += parents
    for each in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{each}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] == "T":
                return True
    return False


def kill_marked(mark: str) -> bool:
    """Kills every process that has ``MARK_VARIABLE=mark`` in its environment. Returns False when one was still
    there after two seconds. Blocks.

    This is for sandboxes without isolation, where processes may outlive the helper that started them. It looks
    twice: a process may be made after the first look, and the environment of one that is executing another
    program reads as empty.
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
    """Kills the marked processes that are found now; whether there were any."""
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
