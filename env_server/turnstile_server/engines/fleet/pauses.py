"""Pausing, resuming, sleeping and waking all workers of a fleet.

What must hold: while calls are held no worker is given one, and agents see time, never an error; whatever held
them lets them go again, also when it fails; a pause of the trainer's outlives an update that happens in it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import anyio

from turnstile.models import PauseMode
from turnstile_server.engines.fleet.roster import Roster
from turnstile_server.engines.fleet.worker import Worker
from turnstile_server.errors import Conflict, EngineRefused, EngineUnavailable, TurnstileError
from turnstile_server.settings import FleetSettings


class FleetPauses:
    """The callers of ``hold_all``, ``let_go`` and ``on_all`` hold ``roster.lock``."""

    def __init__(self, roster: Roster, settings: FleetSettings) -> None:
        self._roster = roster
        self._settings = settings

    async def pause(self, mode: PauseMode) -> None:
        """Holds new calls and pauses every worker. Raises the error of the workers where none could be paused."""
        async with self._roster.lock:
            before = self._roster.held_since("pause")
            self._roster.hold("pause")
            try:
                await self._pause_all(mode)
            except BaseException:
                if before is None:
                    await self._undo_pause()
                    self._roster.release("pause")
                raise

    async def resume(self) -> None:
        """Resumes every worker and lets the waiting calls go. Undoes any number of pauses."""
        async with self._roster.lock:
            await self._resume_all()
            self._roster.release("pause")

    @asynccontextmanager
    async def all_held(self, mode: PauseMode) -> AsyncIterator[None]:
        """Calls are held and all workers paused inside the block."""
        await self.hold_all(mode)
        try:
            yield
        finally:
            await self.let_go()

    async def hold_all(self, mode: PauseMode) -> None:
        """Holds calls and pauses all workers, unless the trainer has paused them."""
        self._roster.hold("update")
        if self._roster.held_since("pause") is not None:
            return
        try:
            await self._pause_all(mode)
        except BaseException:
            await self._undo_pause()
            self._roster.release("update")
            raise

    async def let_go(self) -> None:
        """Undoes ``hold_all``. Workers that have the current weights serve."""
        with anyio.CancelScope(shield=True):  # an engine left paused would hold every call
            try:
                if self._roster.held_since("pause") is None:
                    await self._resume_all()
            finally:
                for worker in self.loadable():
                    if worker.version is not None:
                        self._roster.settle(worker)
                self._roster.release("update")

    def loadable(self) -> list[Worker]:
        """The workers that take weights."""
        return [worker for worker in self._roster.answering if worker.status != "draining"]

    async def on_all(
        self, workers: Sequence[Worker], step: Callable[[Worker], Awaitable[None]], what: str
    ) -> list[Worker]:
        """Does ``step`` with one worker first, then with the others at once. Returns those that did it; the others
        have missed ``what``. Raises what the first one refuses, with nothing changed on any other, and the last
        error where all failed."""
        done: list[Worker] = []
        error: TurnstileError | None = None
        left = list(workers)
        while left and not done:
            first = left.pop(0)
            error = (await self._roster.each([first], step)).get(first)
            if error is None:
                done.append(first)
            elif isinstance(error, EngineRefused | Conflict):
                raise error
            else:
                self.missed(first, what, error)
        if not done:
            raise error or EngineUnavailable(self._roster.why_none())
        failed = await self._roster.each(left, step)
        for worker, missed in failed.items():
            self.missed(worker, what, missed)
        return done + [worker for worker in left if worker not in failed]

    def missed(self, worker: Worker, what: str, error: TurnstileError) -> None:
        """The worker did not do what the others did: it gets no calls until it has caught up."""
        worker.version = None
        if isinstance(error, EngineUnavailable):
            self._roster.down(worker, f"it missed {what}: {error.message}")
        else:
            self._roster.fence(worker, f"it missed {what}: {error.message}")

    async def sleep(self) -> None:
        """Holds new calls, waits until the running ones have ended, then frees the memory of all workers."""
        async with self._roster.lock:
            workers = self.loadable()
            if not workers:
                raise EngineUnavailable(self._roster.why_none())
            self._roster.hold("sleep")
            try:
                await self._until_idle()
                failed = await self._roster.each(workers, lambda worker: worker.engine.sleep())
                _raise_if_all_failed(workers, failed)
            except BaseException:
                self._roster.release("sleep")
                raise
            for worker in workers:
                if worker in failed:
                    self._roster.down(worker, failed[worker].message)
                else:
                    self._roster.asleep(worker)

    async def _until_idle(self) -> None:
        limit_s = self._settings.sleep_wait_s
        with anyio.move_on_after(limit_s) as scope:
            for worker in self._roster.workers:
                await worker.wait_idle()
        if scope.cancelled_caught:
            raise Conflict(
                f"calls still run after {limit_s:g} s (fleet.sleep_wait_s); wait for them, or cancel "
                "their episodes"
            )

    async def wake(self) -> None:
        """Takes the memory back. Calls stay held, as by ``pause``, until ``resume``: new weights come first."""
        async with self._roster.lock:
            sleeping = self._roster.sleeping
            if not sleeping and not self._roster.answering:
                raise EngineUnavailable(self._roster.why_none())  # it may have died in its sleep
            if not sleeping:
                raise Conflict("the engine is not asleep")

            async def wake(worker: Worker) -> None:
                await worker.engine.wake()
                await worker.engine.pause("retract")

            failed = await self._roster.each(sleeping, wake)
            _raise_if_all_failed(sleeping, failed)
            self._roster.hold("pause")
            self._roster.release("sleep")
            for worker in sleeping:
                if worker in failed:
                    self._roster.down(worker, failed[worker].message)
                else:
                    worker.version = None
                    self._roster.fence(worker, "it woke up, and its weights are to be loaded")

    async def _undo_pause(self) -> None:
        """Some of the workers may be paused, also where the caller was cancelled."""
        with anyio.CancelScope(shield=True), suppress(TurnstileError):
            await self._resume_all()

    async def _pause_all(self, mode: PauseMode) -> None:
        await self._tell_all(lambda worker: worker.engine.pause(mode))

    async def _resume_all(self) -> None:
        await self._tell_all(lambda worker: worker.engine.resume())

    async def _tell_all(self, step: Callable[[Worker], Awaitable[None]]) -> None:
        workers = self._roster.answering
        failed = await self._roster.each(workers, step)
        for worker, error in failed.items():
            if not isinstance(error, EngineRefused):
                self._roster.down(worker, error.message)
        _raise_if_all_failed(workers, failed)


def _raise_if_all_failed(workers: Sequence[Worker], failed: dict[Worker, TurnstileError]) -> None:
    if workers and len(failed) == len(workers):
        raise next(iter(failed.values()))
