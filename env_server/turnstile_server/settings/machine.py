"""The resources of the machine that the server runs on, or of the container that it runs in, and the defaults that
follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from turnstile_server.machine_share import usable_cores, usable_memory_bytes

_MEMORY_BOUND = Path("/sys/fs/cgroup/memory.max")
_MEMORY_IN_USE = Path("/sys/fs/cgroup/memory.current")
_MEMORY_INFO = Path("/proc/meminfo")
_MOST_PIDS = Path("/proc/sys/kernel/pid_max")
_PIDS_SHARE = 8
"""No sandbox may take more than this part of all process ids."""


@cache
def machine_resources() -> dict[str, float]:
    """The most that one sandbox may have, by the settings' names: ``memory_mb`` (MiB), ``cpus``, ``pids``."""
    pids = _number_in(_MOST_PIDS)
    return {
        "memory_mb": usable_memory_bytes() >> 20,
        "cpus": usable_cores(),
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


_EPISODES_OF_A_CORE = 8
"""Agents wait for the model most of the time."""
_MEMORY_OF_AN_EPISODE = 512 << 20
"""More than the agents that ship were measured with (139 to 390 MB)."""
_FEWEST_EPISODES, _MOST_EPISODES = 4, 256
"""The most: what one process of the server was tried with."""
_FEWEST_SANDBOXES = 128


def default_episodes(resources: Mapping[str, float]) -> int:
    """``episodes.max_running`` where it is not set. A quarter of the memory is left for all else."""
    by_memory = 0.75 * resources["memory_mb"] * (1 << 20) / _MEMORY_OF_AN_EPISODE
    found = int(min(_EPISODES_OF_A_CORE * resources["cpus"], by_memory))
    return min(_MOST_EPISODES, max(_FEWEST_EPISODES, found))


def default_gradings(resources: Mapping[str, float]) -> int:
    """``grading.parallel`` where it is not set."""
    return 2 * max(1, int(resources["cpus"]))


def default_sandboxes(resources: Mapping[str, float]) -> int:
    """``sandboxes.max_open`` where it is not set: room for all episodes, and for gradings, which have two each."""
    return max(_FEWEST_SANDBOXES, default_episodes(resources) + 2 * default_gradings(resources))
