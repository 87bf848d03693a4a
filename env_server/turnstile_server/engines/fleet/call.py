"""One call of the gate on its way through the fleet: its names, what left of it, its wait for a worker."""

from __future__ import annotations

import asyncio
from asyncio import get_running_loop
from collections.abc import AsyncGenerator
from typing import Final

import anyio

from turnstile_server.engines.fleet.queue import Ticket
from turnstile_server.engines.fleet.worker import Worker
from turnstile_server.engines.protocol import CallOrigin, EngineChunk
from turnstile_server.errors import EngineUnavailable

NEVER: Final = float("-inf")


class FleetCall:
    """``rid`` is the gate's name of it. Each part has a name of its own on its worker; none is a prefix of
    another, because SGLang aborts by prefix."""

    def __init__(self, rid: str, origin: CallOrigin) -> None:
        self.aborted = False
        self.seen = False
        """A token has left to the caller."""
        self.failovers = 0
        self.part_rid: str | None = None
        """Its name on its worker while it is on one."""
        self.ticket = Ticket(origin, get_running_loop().time(), self.wake)
        self._rid = rid
        self._parts = 0
        self._woken: anyio.Event | None = None
        """Set while it waits in the queue."""
        self._heard_at = NEVER
        """When its worker said something of it last."""
        self._waiting: asyncio.Task[object] | None = None
        """The task that waits for its worker, while it does."""
        self._given_up = False
        """That wait was ended by ``give_up_silent``."""

    def next_rid(self) -> str:
        self._parts += 1
        self.part_rid = self._rid if self._parts == 1 else f"part{self._parts}_{self._rid}"
        return self.part_rid

    # In the queue

    def wake(self) -> None:
        """Something changed that a call in the queue waits for."""
        if self._woken is not None:
            self._woken.set()

    async def news(self) -> None:
        """Returns at the next ``wake``. What was changed before is to be looked at first."""
        self._woken = anyio.Event()
        try:
            await self._woken.wait()
        finally:
            self._woken = None

    # On a worker

    def sent(self) -> None:
        """Its worker has it from now on, and has said nothing of it."""
        self._heard_at = NEVER

    async def hear(self, worker: Worker, chunks: AsyncGenerator[EngineChunk]) -> EngineChunk | None:
        """The next chunk of its part on ``worker``; None at the end. Raises EngineUnavailable where
        ``give_up_silent`` ended the wait for it; ``chunks`` has ended then.

        The wait is ended as ``asyncio.timeout`` ends one, by a cancellation of its own, because it is entered for
        every chunk: a cancel scope costs as much as the chunk.
        """
        task = asyncio.current_task()
        assert task is not None
        cancellations, self._waiting, self._given_up = task.cancelling(), task, False
        try:
            chunk = await anext(chunks, None)
        except asyncio.CancelledError:
            if self._taken_back(task) and task.cancelling() <= cancellations:
                raise EngineUnavailable(f"Engine {worker.worker_id} hangs: {worker.detail}") from None
            raise
        finally:
            self._waiting = None
            self._taken_back(task)  # the wait may have ended by something else at the same time
        self._heard_at = get_running_loop().time()
        return chunk

    def _taken_back(self, task: asyncio.Task[object]) -> bool:
        given_up, self._given_up = self._given_up, False
        if given_up:
            task.uncancel()
        return given_up

    def give_up_silent(self, since: float) -> None:
        """Its worker answers nobody since then: ends the wait for it, unless the worker has said something of the
        call after that."""
        if self._waiting is not None and not self._given_up and self._heard_at <= since:
            self._given_up = True
            self._waiting.cancel()
