"""Killing: a session, or everything in the sandbox but the helper. Reads /proc; makes no process.

Where the sandbox has a process name space of its own ``kill(-1)`` reaches everything in it at once. Where it has
not (no isolation) only what descends from the helper may be touched.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Sequence  # noqa: UP035 - Python 3.8

_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_ROUNDS = 200
_ROUND_S = 0.005
"""A killed process needs a moment to be gone; after a second of this it is stuck in the kernel."""


def adopt_orphans() -> None:
    """Orphans of the sandbox come to the helper, so that it finds and reaps them (PID 1 has this by itself)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_memory() -> None:
    """No process of the same uid may trace the helper or read its memory and descriptors: where agents run under
    its uid, that and being PID 1 is what keeps it apart from them."""
    _prctl(_PR_SET_DUMPABLE, 0)


def show_memory() -> None:
    """The opposite of ``hide_memory``."""
    _prctl(_PR_SET_DUMPABLE, 1)


def _prctl(option: int, value: int) -> None:
    try:
        import ctypes  # noqa: PLC0415 - costly, and small Pythons lack it
    except ImportError:
        return
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def kill_session(session: int) -> None:
    """Every process of the session, those in other process groups of it (a shell's job control) too, until none is
    left, or what is left does not go: one may be made behind a look at all of them."""
    kill_group(session)
    for _ in range(_ROUNDS):
        left = [pid for pid, (_, sid, state) in _table().items() if sid == session and state not in "ZX"]
        if not left:
            return
        for pid in left:
            _kill(pid)
        time.sleep(_ROUND_S)


def kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty
        os.killpg(group, signal.SIGKILL)


def kill_all(own_name_space: bool, last: Sequence[int] = ()) -> int:
    """Kills until nothing is left; returns how many processes survived. Children stay zombies to be reaped.
    ``last``: processes that are killed, and whose end is not waited for."""
    left: list[int] = []
    for _ in range(_ROUNDS):
        if own_name_space:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                return 0
        table = _table()
        pids = set(table) - {os.getpid(), 1, *last} if own_name_space else _descendants(table)
        left = [pid for pid in pids if table[pid][2] not in "ZX"]
        if not left:
            return 0
        for pid in left:
            _kill(pid)
        time.sleep(_ROUND_S)
    return len(left)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone meanwhile, or not of this sandbox
        os.kill(pid, signal.SIGKILL)


def _descendants(table: dict[int, tuple[int, int, str]]) -> set[int]:
    found: set[int] = set()
    level = {os.getpid()}
    while level:
        level = {pid for pid, (parent, _, _) in table.items() if parent in level} - found
        found |= level
    return found


def _table() -> dict[int, tuple[int, int, str]]:
    """pid to (parent, session, state), by proc_pid_stat(5)."""
    table: dict[int, tuple[int, int, str]] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return table
    for name in names:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command's name may hold anything, parentheses too: the fields begin after the last one.
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        table[int(name)] = (int(fields[1]), int(fields[3]), fields[0].decode())
    return table
