"""Blocking calls of the Docker SDK, in threads that the event loop never waits for longer than it wants to.

Owns the threads. What must hold: at most ``parallel`` calls are under way, abandoned ones included; a caller
waits ``timeout_s`` at most, its wait for a turn included; the result of a call whose caller has gone is undone; a
call that never returns keeps its thread, but holds up neither the event loop nor the exit of the process. The
last is why these are daemon threads and not anyio's workers, which the interpreter joins when it exits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import anyio
import anyio.from_thread
from anyio.lowlevel import current_token

T = TypeVar("T")

log = logging.getLogger(__name__)


class BlockingCalls:
    """Runs functions that block."""

    def __init__(self, parallel: int, timeout_s: float) -> None:
        self._limiter = anyio.CapacityLimiter(parallel)
        self._timeout_s = timeout_s
        self._abandoned: set[BlockingCall[Any]] = set()

    async def run(
        self, work: Callable[[], T], *, undo: Callable[[T], object] | None = None, timeout_s: float | None = None
    ) -> T:
        """Run ``work``; returns or raises what it does. Raises TimeoutError where it took longer than
        ``timeout_s``, or than calls may take.

        ``undo`` gets the result of a call whose caller timed out or was cancelled before having it.
        """
        call = BlockingCall(work, undo)
        with anyio.fail_after(self._timeout_s if timeout_s is None else timeout_s):
            await self._limiter.acquire_on_behalf_of(call)
            try:
                return await call.result(partial(self._limiter.release_on_behalf_of, call))
            finally:
                if undo is not None:
                    self._abandoned = {each for each in (*self._abandoned, call) if not each.over.is_set()}

    async def undone(self) -> bool:
        """Waits, for as long as calls may take, until no result of an abandoned call is left to be undone; whether
        that is so."""
        with anyio.move_on_after(self._timeout_s):
            for call in tuple(self._abandoned):
                await call.over.wait()
        self._abandoned = {each for each in self._abandoned if not each.over.is_set()}
        return not self._abandoned


class BlockingCall(Generic[T]):
    """One call. Everything but ``work`` and ``undo`` happens in the event loop's thread, so nothing is locked."""

    def __init__(self, work: Callable[[], T], undo: Callable[[T], object] | None) -> None:
        self._work = work
        self._undo = undo
        self.over = anyio.Event()
        """Its caller has the result, or it was undone."""
        self._ended = anyio.Event()
        self._abandoned = False
        self._results: list[T] = []
        """Empty until the work returned."""
        self._error: BaseException | None = None

    async def result(self, release: Callable[[], None]) -> T:
        """``release`` is called when the work has ended, also after the caller has gone."""
        token = current_token()
        try:
            _daemon(partial(self._run, token, release))
        except BaseException:
            release()
            self.over.set()
            raise
        try:
            await self._ended.wait()
        except BaseException:
            self._abandoned = True
            if self._ended.is_set():  # it ended while the caller was being cancelled
                self._take_back(token)
            raise
        self.over.set()
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self, token: anyio.lowlevel.EventLoopToken, release: Callable[[], None]) -> None:
        results: list[T] = []
        failure: BaseException | None = None
        try:
            results.append(self._work())
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            failure = error
        try:
            received = anyio.from_thread.run_sync(self._settle, results, failure, release, token=token)
        except RuntimeError:
            log.debug("a call ended after its event loop")
            return
        if not received:
            self._undo_in_thread(token, results)

    def _settle(self, results: list[T], failure: BaseException | None, release: Callable[[], None]) -> bool:
        """False: the caller has gone, so the result must be undone."""
        release()
        self._ended.set()
        if not self._abandoned:
            self._results, self._error = results, failure
        return not self._abandoned

    def _take_back(self, token: anyio.lowlevel.EventLoopToken) -> None:
        """Undoes a result that came while its caller was being cancelled."""
        results, self._results = self._results, []
        if not results or self._undo is None:
            self.over.set()
            return
        try:
            _daemon(partial(self._undo_in_thread, token, results))
        except RuntimeError as error:  # no thread can be made
            self.over.set()
            log.warning("the result of an abandoned call was not undone: %s", error)

    def _undo_in_thread(self, token: anyio.lowlevel.EventLoopToken, results: list[T]) -> None:
        try:
            if results and self._undo is not None:
                self._undo(results[0])
        except Exception as error:  # noqa: BLE001 - no caller is left; the sweep at the next start removes the rest
            log.warning("the result of an abandoned call could not be undone: %s", error)
        try:
            anyio.from_thread.run_sync(self.over.set, token=token)
        except RuntimeError:
            log.debug("an abandoned call was undone after its event loop")


def _daemon(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="sandbox-engine-call", daemon=True).start()
