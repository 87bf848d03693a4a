"""The clock of an event loop in tests: moved by the test, or by nobody having anything to do.

With either, a time-out comes when a test wants it and not when the machine is busy.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


def pass_time(seconds: float) -> None:
    """Moves the clock of the running loop forward: what is due until then happens in its next turn."""
    loop: Any = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds


class _JumpingSelector(selectors.DefaultSelector):
    passed_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(0)
        if not ready:
            self.passed_s += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its clock stands while a task can go on, and jumps to the next timer when none can. For tests without
    sockets, threads and processes: it would not wait for them."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return 1000.0 + self._jumping.passed_s
