"""One call of the gate on its way through the fleet: its names, what left of it, its wait for a worker."""

from __future__ import annotations

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
        self.ticket = Ticket(origin, anyio.current_time(), self.wake)
        self._rid = rid
        self._parts = 0
        self._woken = anyio.Event()
        self._heard_at = NEVER
        """When its worker said something of it last."""
        self._waiting: anyio.CancelScope | None = None
        """Set while it waits for its worker."""

    def next_rid(self) -> str:
        self._parts += 1
        self.part_rid = self._rid if self._parts == 1 else f"part{self._parts}_{self._rid}"
        return self.part_rid

    # In the queue

    def wake(self) -> None:
        """Something changed that a call in the queue waits for."""
        self._woken.set()

    async def news(self) -> None:
        await self._woken.wait()
        self._woken = anyio.Event()

    # On a worker

    async def hear(self, worker: Worker, chunks: AsyncGenerator[EngineChunk]) -> AsyncGenerator[EngineChunk]:
        """The chunks of its part on ``worker``. Raises EngineUnavailable where ``give_up_silent`` ended the wait
        for the next one; ``chunks`` has ended then."""
        self._heard_at = NEVER
        while True:
            chunk = None
            # A scope for each wait: none may be open where the generator yields.
            with anyio.CancelScope() as waiting:
                self._waiting = waiting
                try:
                    chunk = await anext(chunks, None)
                finally:
                    self._waiting = None
            if chunk is None:
                if waiting.cancelled_caught:
                    raise EngineUnavailable(f"Engine {worker.worker_id} hangs: {worker.detail}")
                return
            self._heard_at = anyio.current_time()
            yield chunk

    def give_up_silent(self, since: float) -> None:
        """Its worker answers nobody since then: ends the wait for it, unless the worker has said something of the
        call after that."""
        if self._waiting is not None and self._heard_at <= since:
            self._waiting.cancel()
