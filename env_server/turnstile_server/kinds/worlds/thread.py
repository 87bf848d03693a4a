"""One thread for one world: every method of an instance runs in it, one at a time, plain functions and coroutines.

What must hold: nothing that a world does holds up the event loop, another world or the end of the process, because
the thread is a daemon and callers wait for it only so long. A thread cannot be killed: a call that never returns
keeps its thread, and ``ended`` stays false, until the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from turnstile_server.threads import result_of

T = TypeVar("T")


class WorldRaised(Exception):
    """The world's code raised ``error``, which may be any: also what would end a thread or a task."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class WorldBusy(Exception):
    """A call did not return in time. ``running``: the call that the thread was in, which may be an earlier one."""

    def __init__(self, running: str) -> None:
        super().__init__(running)
        self.running = running


@dataclass(slots=True)
class _Job:
    name: str
    function: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)
    ended: Future[None] = field(default_factory=Future)
    """Done when the call has returned, also where nobody waits for its result."""
    given_up: bool = False
    task: asyncio.Task[Any] | None = None
    """The task of a coroutine, while it runs."""


class WorldThread:
    """Started by the first call; ``finish`` ends it. ``on_end`` is called in the thread when it ends."""

    def __init__(self, name: str, on_end: Callable[[], None]) -> None:
        self._name = name
        self._on_end = on_end
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._runner = asyncio.Runner()
        """The event loop of the world's coroutines; opens nothing before the first one."""
        self._job: _Job | None = None
        """The one that runs."""
        self._finished = False

    async def call(self, name: str, function: Callable[[], T | Awaitable[T]], timeout_s: float) -> T:
        """The result of ``function``. Raises WorldRaised, and WorldBusy after ``timeout_s``.

        A call that is given up, in time or by cancellation, does not begin any more; one that has begun is
        cancelled where it is a coroutine, and else goes on unheard.
        """
        job = _Job(name, function)
        self._put(job)
        try:
            with anyio.fail_after(timeout_s):
                result: T = await result_of(job.result)
                return result
        except TimeoutError:
            running = self._job
            raise WorldBusy(name if running is None else running.name) from None
        finally:
            self._give_up(job)

    async def overdue(self, grace_s: float) -> str | None:
        """The call that was given up and does not end within ``grace_s``; None: there is none. A coroutine that
        was cancelled ends soon."""
        job = self._job
        if job is None or not job.given_up:
            return None
        with anyio.move_on_after(grace_s):
            await result_of(job.ended)
        return None if job.ended.done() else job.name

    def finish(self, last: Callable[[], object] | None = None) -> None:
        """Ends the thread after the calls that were asked for and after ``last``, whose result nobody hears. May
        be repeated; only the first call counts."""
        if self._finished:
            return
        self._finished = True
        if last is not None:
            self._put(_Job("close", last, given_up=True))
        if self._thread is None:
            self._on_end()
        else:
            self._jobs.put(None)

    def _put(self, job: _Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _give_up(self, job: _Job) -> None:
        if job.result.done() or job.result.cancel():
            return
        job.given_up = True
        if job.task is not None:
            with contextlib.suppress(RuntimeError):  # the thread has ended meanwhile
                job.task.get_loop().call_soon_threadsafe(job.task.cancel)

    # In the thread

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                if job.result.set_running_or_notify_cancel():
                    self._do(job)
        finally:
            try:
                self._runner.close()
            finally:
                self._on_end()

    def _do(self, job: _Job) -> None:
        self._job = job
        result, raised = None, None
        try:
            result = job.function()
            if inspect.isawaitable(result):
                result = self._runner.run(_awaited(result, job))
        except BaseException as error:  # noqa: BLE001 - a user's code: whatever it raises is the caller's
            raised = WorldRaised(error)
        self._job = None
        job.ended.set_result(None)
        if job.given_up:  # nobody waits, and the caller's event loop may be closed by now
            return
        if raised is not None:
            job.result.set_exception(raised)
        else:
            job.result.set_result(result)


async def _awaited(awaitable: Awaitable[Any], job: _Job) -> Any:
    job.task = task = asyncio.current_task()
    assert task is not None
    if job.given_up:
        task.cancel()
    return await awaitable
