"""The part of the machine that this process may use: cores and memory, by its affinity and its control groups.

A container's bounds (``docker run --cpus --memory``, a pod's limits) are in the files of its control group, of
version 1 or 2: ``cpu.max``, ``cpu.cfs_quota_us``, ``memory.max``, ``memory.limit_in_bytes``. The least bound of
the group and of those above it holds. Formats: cgroups(7), the kernel's Documentation, admin-guide/cgroup-v2.rst
and scheduler/sched-bwc.rst.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class ControlGroups:
    """The control groups of a process. ``root``: where they are mounted. ``own``: the file that names them."""

    root: Path = _ROOT
    own: Path = _OWN

    def cpus(self) -> float | None:
        """The bound of CPU time, in cores; None: there is none."""
        bounds = [_cores(*words) for folder in self._folders("cpu") if (words := _quota_in(folder)) is not None]
        return min((bound for bound in bounds if bound is not None), default=None)

    def memory_bytes(self) -> int | None:
        """The bound of memory; None: there is none. Version 1 has a huge number there in place of none."""
        files = ("memory.max", "memory.limit_in_bytes")
        found = [_number(_text(folder / name)) for folder in self._folders("memory") for name in files]
        return min((bound for bound in found if bound is not None), default=None)

    def _folders(self, controller: str) -> Iterator[Path]:
        """The groups that may bound the process, of both versions. In a container the mount may begin at its own
        group while the file names the host's path: then only the root is there."""
        yield self.root
        for line in (_text(self.own) or "").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            # Version 1 has a mount for each set of controllers, and usually a link of each one's name.
            mount = self.root / controller if controllers else self.root
            group = mount / path.strip("/")
            while group.is_relative_to(mount):
                yield group
                group = group.parent


def usable_cores() -> float:
    """Cores, by affinity and by the control groups' bound of CPU time: 1.5 are possible."""
    affine = float(len(os.sched_getaffinity(0)))
    bound = ControlGroups().cpus()
    return affine if bound is None else min(affine, bound)


def core_count() -> int:
    """Whole cores, at least one: processes or places that are made for each."""
    return max(1, int(usable_cores()))


def usable_memory_bytes() -> int:
    """Memory, by the machine and by the control groups' bound."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    bound = ControlGroups().memory_bytes()
    return memory if bound is None else min(memory, bound)


def _quota_in(folder: Path) -> tuple[str, str] | None:
    """Quota and period in microseconds, as they are written; None where the group has no such files."""
    if (text := _text(folder / "cpu.max")) is not None:
        words = text.split()
        return (words[0], words[1]) if len(words) == 2 else None
    quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    return None if quota is None or period is None else (quota.strip(), period.strip())


def _cores(quota: str, period: str) -> float | None:
    """``max`` and -1 are no bound."""
    allowed, each = _number(quota), _number(period)
    return allowed / each if allowed and each else None


def _text(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    text = "" if text is None else text.strip()
    return int(text) if text.isascii() and text.isdecimal() else None
