"""Work that its caller's cancellation does not cut off: making, watching and destroying sandboxes.

A sandbox must be destroyed once and completely, whether or not the caller still waits. Such work
runs in the task group of ``BackgroundTasks``, which outlives the provider that uses it. ``BackgroundTask`` is the
handle: any number of callers may wait for it, and cancelling a waiter leaves the work running. What must be done
even while the process lacks descriptors, memory or threads is done ``through_shortages``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Generic, Self, TypeVar

import anyio
from anyio.abc import TaskGroup

from turnstile_server.errors import SandboxUnavailable
from turnstile_server.shortages import is_shortage

T = TypeVar("T")
_ATTEMPTS = 100
_PAUSE_S = 0.1
"""Ten seconds of trying."""


async def through_shortages(step: Callable[[], Awaitable[T]]) -> T:
    """Run ``step``, and again for ten seconds where it raises a shortage. Returns or raises what it does."""
    for _ in range(_ATTEMPTS):
        try:
            return await step()
        except Exception as error:
            if not is_shortage(error):
                raise
        await anyio.sleep(_PAUSE_S)
    return await step()


class BackgroundTask(Generic[T]):
    """One piece of work, from ``BackgroundTasks.start``."""

    def __init__(self, work: Callable[[], Awaitable[T]], name: str, shielded: bool) -> None:
        self._work = work
        self._name = name
        self._scope = anyio.CancelScope(shield=shielded)
        self.ended = anyio.Event()
        """Set when the work has returned, failed or was cancelled."""
        self._results: list[T] = []
        """Empty until the work returned."""
        self._error: Exception | None = None

    async def wait(self) -> T:
        """Waits for the end: returns what the work returned and raises what it raised.

        Raises SandboxUnavailable where the work was cancelled.
        """
        await self.ended.wait()
        if self._results:
            return self._results[0]
        raise self._error or SandboxUnavailable(f"{self._name} was cancelled: the sandbox provider is closing")

    def cancel(self) -> None:
        """Cancels the work, shielded or not."""
        self._scope.cancel()

    async def stop(self) -> None:
        """Cancels the work and waits for its end."""
        self._scope.cancel()
        await self.ended.wait()

    async def run(self) -> None:
        try:
            with self._scope:
                self._results.append(await self._work())
        except Exception as error:  # noqa: BLE001 - wait() raises it; in the group it would end the whole server
            self._error = error
        finally:
            self.ended.set()


class BackgroundTasks:
    """A task group for background work. Leaving the block cancels what is not shielded and waits for the rest."""

    def __init__(self) -> None:
        self._group: TaskGroup = anyio.create_task_group()
        self._entered: AbstractAsyncContextManager[TaskGroup] = self._group

    def start(self, work: Callable[[], Awaitable[T]], *, name: str, shielded: bool = True) -> BackgroundTask[T]:
        """Begins ``work``. ``shielded``: it goes on when the group is cancelled; it must then end by itself.

        Errors reach only the callers of ``BackgroundTask.wait``. Work that has no waiter logs its own.
        """
        task = BackgroundTask(work, name, shielded)
        self._group.start_soon(task.run, name=name)
        return task

    async def __aenter__(self) -> Self:
        await self._entered.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            await self._entered.__aexit__(kind, error, traceback)
            return
        # The group would wrap the block's own error into an exception group: it is not shown to it.
        self._group.cancel_scope.cancel()
        await self._entered.__aexit__(None, None, None)
