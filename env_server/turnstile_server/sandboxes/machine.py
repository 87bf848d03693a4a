"""The resources of the machine that the server runs on, or of the container that it runs in."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_MEMORY_BOUND = Path("/sys/fs/cgroup/memory.max")
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


def _number_in(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
