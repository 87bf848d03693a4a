"""The clock of the event loop, in the hands of a test.

Limits under test can then be long, so that no busy machine reaches them, and still pass in a moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio.lowlevel

T = TypeVar("T")
STEP_S = 0.1
"""Time passes in steps: a longer one would look like a process that stood still."""
ROUNDS = 4
"""Of the event loop, in each step."""


class LoopClock:
    """``stands``: time passes only as the test says; else it also passes by itself."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, stands: bool) -> None:
        self._time = loop.time
        self._stood_at = loop.time() if stands else None
        self._ahead_s = 0.0

    def time(self) -> float:
        return (self._time() if self._stood_at is None else self._stood_at) + self._ahead_s

    def jump(self, seconds: float) -> None:
        """As if the process had stood still for so long."""
        self._ahead_s += seconds

    async def let_pass(self, seconds: float) -> None:
        ends = self._ahead_s + seconds
        while self._ahead_s < ends:
            await self._step(min(STEP_S, ends - self._ahead_s))

    async def pass_until(self, condition: Callable[[], object]) -> None:
        """Lets time pass until the condition holds."""
        while not condition():
            await self._step(STEP_S)

    async def pass_while(self, awaited: Awaitable[T]) -> T:
        """Lets time pass until the result is there."""
        waiting = asyncio.ensure_future(awaited)
        await self.pass_until(waiting.done)
        return await waiting

    def run(self) -> None:
        """From now on, time passes by itself."""
        self._ahead_s, self._stood_at = self.time() - self._time(), None

    async def _step(self, seconds: float) -> None:
        self._ahead_s += seconds
        for _ in range(ROUNDS):
            await anyio.lowlevel.checkpoint()


@contextmanager
def loop_clock(*, stands: bool = False) -> Iterator[LoopClock]:
    """The running loop's clock. After the block time passes by itself, on from where it is: it never goes back."""
    loop = asyncio.get_running_loop()
    clock = LoopClock(loop, stands=stands)
    loop.time = clock.time  # type: ignore[method-assign]
    try:
        yield clock
    finally:
        clock.run()
