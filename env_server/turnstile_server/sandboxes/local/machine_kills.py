"""When the kernel last killed a process for memory, anywhere on the machine (``oom_kill`` in /proc/vmstat).

All that shows it where sandboxes have no control groups. The count does not say who was killed, so a rise is held
against a sandbox only if its helper was killed at that moment; an earlier one was a neighbour's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import anyio

VMSTAT = Path("/proc/vmstat")
EVERY_S = 1.0
"""Between two looks."""
LATELY_S = 5.0
"""A death is noticed within the time that a helper gets to exit, and a rise within one look."""


class MachineKills:
    """``clock``: seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.seen = _count()
        self._rose_at = float("-inf")

    async def watch(self) -> None:
        """Looks again and again; ends by cancellation."""
        while True:
            self._look()
            await anyio.sleep(EVERY_S)

    def rose_lately(self) -> bool:
        self._look()
        return self._clock() - self._rose_at < LATELY_S

    def _look(self) -> None:
        count = _count()
        if count > self.seen:
            self._rose_at = self._clock()
        self.seen = count


def _count() -> int:
    for line in VMSTAT.read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return 0
