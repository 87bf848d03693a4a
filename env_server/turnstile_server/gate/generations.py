"""The tasks in which generations run.

A generation outlives the callers that leave, so it has a task of its own, and one cancel scope, its call's, by
which everything ends it: an abort, the server's last words, the end of the pipeline. A scope does it, and not
the task's own cancellation, because a scope asks again until the generation has ended, and because a commit is
shielded from it.

It is written on asyncio: a task group of anyio costs three times as much for each task, and all that it would
add is said here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import anyio

from turnstile_server.errors import EngineUnavailable
from turnstile_server.gate.call import ModelCall


class Generations:
    """Every generation that goes on, until ``close``."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[None], ModelCall] = {}
        self._closed = False

    def idle(self) -> bool:
        """True if no generation goes on."""
        return not self._running

    def check_open(self) -> None:
        """Raises EngineUnavailable after ``close``."""
        if self._closed:
            raise EngineUnavailable("the server has stopped")

    def start(self, call: ModelCall, generation: Coroutine[Any, Any, None]) -> None:
        """Runs ``generation``, which enters the call's scope and raises nothing. After ``check_open``."""
        task = asyncio.get_running_loop().create_task(generation)
        self._running[task] = call
        task.add_done_callback(self._running.pop)

    async def close(self) -> None:
        """Cancels all; returns when they have ended, whatever happens to its caller."""
        self._closed = True
        for call in self._running.values():
            call.scope.cancel()
        with anyio.CancelScope(shield=True):
            while self._running:
                await asyncio.wait(list(self._running))
