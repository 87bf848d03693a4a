"""When a server's process ends: at once by SIGINT, by SIGTERM once it is drained or its grace is over, and by
itself once it was asked to drain and nothing is left.

What must hold: while it drains everything is served but new episodes; a second signal ends the wait.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio


class Draining(Protocol):
    """What is drained: a server's episodes, or those of all its worker processes."""

    def begin(self) -> None:
        """No new episodes from now on. No-op when repeated."""
        ...

    async def drained(self) -> None:
        """Returns once it was begun, and no episode is left."""
        ...

    @property
    def begun(self) -> bool: ...


class StopSignals:
    """The signals that this process got. ``asked``: to end once it is drained (SIGTERM); ``now``: at once."""

    def __init__(self) -> None:
        self.asked = anyio.Event()
        self.now = anyio.Event()

    def take(self, number: int) -> None:
        """SIGINT, and whatever follows another signal, means now."""
        if number == signal.SIGINT or self.asked.is_set():
            self.now.set()
        self.asked.set()


async def until_end(
    signals: StopSignals, drain: Draining | None, grace_s: float, *, ends_itself: bool = True
) -> bool:
    """Returns when the process is to end: True where the grace is over and calls get no more time.

    ``ends_itself``: also once it was asked to drain by the API, and is drained. A process that does not is told by
    another one, which has drained it.
    """
    cut = False
    async with anyio.create_task_group() as tasks:

        async def first(wait: Callable[[], Awaitable[None]]) -> None:
            await wait()
            tasks.cancel_scope.cancel()

        async def terminated() -> None:
            nonlocal cut
            await signals.asked.wait()
            if drain is None or signals.now.is_set():
                return
            cut = not ends_itself and drain.begun
            if cut:
                return
            drain.begin()
            with anyio.move_on_after(grace_s) as grace:
                await drain.drained()
            cut = grace.cancelled_caught

        tasks.start_soon(first, signals.now.wait)
        tasks.start_soon(first, terminated)
        if ends_itself and drain is not None:
            tasks.start_soon(first, drain.drained)
    return cut
