"""The resources of the machine that the server runs on, or of the container that it runs in."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_MEMORY_BOUND = Path("/sys/fs/cgroup/memory.max")
_MEMORY_IN_USE = Path("/sys/fs/cgroup/memory.current")
_MEMORY_INFO = Path("/proc/meminfo")
_MOST_PIDS = Path("/proc/sys/kernel/pid_max")
_PIDS_SHARE = 8
"""No sandbox may take more than this part of all process ids."""


@cache
def machine_resources() -> dict[str, float]:
    """The most that one sandbox may have, by the settings' names: ``memory_mb`` (MiB), ``cpus``, ``pids``."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    bound = _number_in(_MEMORY_BOUND)
    pids = _number_in(_MOST_PIDS)
    return {
        "memory_mb": (memory if bound is None else min(memory, bound)) >> 20,
        "cpus": float(len(os.sched_getaffinity(0))),
        "pids": (1 << 15 if pids is None else pids) // _PIDS_SHARE,
    }


def available_memory_bytes() -> int | None:
    """Memory that is not in use: of the machine, or of the container where that has less. None: it is not told."""
    try:
        lines = _MEMORY_INFO.read_text().splitlines()
    except OSError:
        return None
    machine = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)
    bound, used = _number_in(_MEMORY_BOUND), _number_in(_MEMORY_IN_USE)
    if machine is None or bound is None or used is None:
        return machine
    return min(machine, max(0, bound - used))


def _number_in(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
