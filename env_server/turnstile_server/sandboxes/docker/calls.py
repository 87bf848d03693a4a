"""Blocking calls in threads that the event loop never waits for longer than it wants to.

Owns the threads. What must hold: at most ``parallel`` calls are under way, one that nobody waits for any more
included; a caller waits ``timeout_s`` at most, its wait for a turn included; what a call made after its caller had
gone is undone; a call that never returns keeps its thread, but neither the loop nor the exit of the process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class Calls:
    """Raises TimeoutError where a call took too long; what the call itself raises otherwise."""

    def __init__(self, parallel: int, timeout_s: float) -> None:
        self._turns = asyncio.Semaphore(parallel)
        self._timeout_s = timeout_s

    async def run(self, work: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
        """``undo`` gets the result of a call whose caller timed out or was cancelled before having it."""
        async with asyncio.timeout(self._timeout_s):
            await self._turns.acquire()
            call = _Call(work, undo, asyncio.get_running_loop(), self._turns.release)
            return await call.result()


class _Call(Generic[T]):
    def __init__(
        self,
        work: Callable[[], T],
        undo: Callable[[T], object] | None,
        loop: asyncio.AbstractEventLoop,
        ended: Callable[[], None],
    ) -> None:
        self._work = work
        self._undo = undo
        self._loop = loop
        self._ended = ended
        self._future: asyncio.Future[T] = loop.create_future()
        threading.Thread(target=self._run, name="sandbox-engine-call", daemon=True).start()

    async def result(self) -> T:
        try:
            return await asyncio.shield(self._future)
        except BaseException:
            if not self._future.done():
                self._future.cancel()
            elif not self._future.cancelled() and self._future.exception() is None:
                # It came between the caller's end and here.
                threading.Thread(target=self._take_back, args=(self._future.result(),), daemon=True).start()
            raise

    def _run(self) -> None:
        try:
            value = self._work()
        except BaseException as error:  # noqa: BLE001 - it is the caller's, whichever it is
            settle = _failing(self._future, error)
        else:
            settle = self._giving(value)
        try:
            self._loop.call_soon_threadsafe(self._settle, settle)
        except RuntimeError:
            log.debug("a call ended after the loop that asked for it")

    def _settle(self, settle: Callable[[], None]) -> None:
        self._ended()
        settle()

    def _giving(self, value: T) -> Callable[[], None]:
        def give() -> None:
            if self._future.done():
                threading.Thread(target=self._take_back, args=(value,), daemon=True).start()
            else:
                self._future.set_result(value)

        return give

    def _take_back(self, value: T) -> None:
        if self._undo is None:
            return
        try:
            self._undo(value)
        except Exception as error:  # noqa: BLE001 - nobody is left to be told; the sweep at the next start remains
            log.warning("what a call made too late could not be undone: %s", error)


def _failing(future: asyncio.Future[T], error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        if not future.done():
            future.set_exception(error)

    return fail
