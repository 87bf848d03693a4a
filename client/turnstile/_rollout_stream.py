"""Many rollouts at once: tasks in, ended rollouts out.

What must hold: every rollout that was started is given exactly once, or the stream ends with an error or is
closed, and then its episode was asked to end. At most ``max_concurrent`` run; at most twice as many run or wait to
be read, so a slow reader slows the reading of tasks. A task is read only when it can be started. Rollouts that
ended before an error are given before it.

asyncio's plain tasks rather than an anyio task group: an async generator that is left half-read is closed in
another task than the one that read it, which no task group allows.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import replace

from turnstile._retry import ClientSettings
from turnstile._rollout_run import RolloutBackend, RolloutHooks, RolloutPlan, RolloutRun
from turnstile.errors import SetupFault
from turnstile.models import ErrorInfo, Fault, TaskRef, new_id
from turnstile.rollout import Rollout, RolloutOptions, RolloutProgress, TaskLike, Tasks, task_ref

_END = object()

SETUP_FAULTS = 3
"""Rollouts in a row that the set-up may fail before the run ends: the next ones would fail in the same way."""


class RolloutStream:
    """A run of rollouts. Nothing runs before the first ``next``.

    ``next`` and ``close`` may be called from different tasks of one loop.
    """

    def __init__(
        self, backend: RolloutBackend, settings: ClientSettings, tasks: Tasks, options: RolloutOptions
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._source = tasks
        self._options = options
        self._progress = RolloutProgress()
        self._any_accepted = False
        self._fresh_groups: dict[str, str] = {}
        """By the group that the server closed for stale weights: the one that goes on in its place."""
        self._feeder: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        """Looks after the servers while rollouts are made."""
        self._running: set[asyncio.Task[None]] = set()
        self._ready: asyncio.Queue[Rollout | BaseException | None] = asyncio.Queue()
        self._slots = asyncio.Semaphore(options.max_concurrent)
        self._room = asyncio.Semaphore(2 * options.max_concurrent)
        self._closed = False
        self._stopped = False
        self._setup_faults = 0
        self._last_fault: ErrorInfo | None = None

    async def next(self) -> Rollout | None:
        """The next rollout to end, None after the last. Raises what ended the run early, and closes it."""
        if self._closed:
            return None
        if self._feeder is None:
            self._feeder = asyncio.create_task(self._feed())
            if self._backend.watches:
                self._watch = asyncio.create_task(self._look_after())
        if self._last_fault is not None and self._setup_faults >= SETUP_FAULTS:
            self._stop()
            while not self._ready.empty():
                ended = self._ready.get_nowait()
                if isinstance(ended, Rollout):
                    return ended
            await self.close()
            raise SetupFault(
                f"the last {self._setup_faults} rollouts failed because the set-up cannot work: "
                f"{self._last_fault.message}",
                type=self._last_fault.type,
            )
        item = await self._ready.get()
        if isinstance(item, Rollout):
            self._room.release()
            self._last_fault = item.error if item.fault is Fault.SETUP else None
            self._setup_faults = self._setup_faults + 1 if self._last_fault is not None else 0
            return item
        await self.close()
        if item is not None:
            raise item
        return None

    async def close(self) -> None:
        """Cancels what runs, episodes included, and waits until each was asked to end (``cancel_s`` at most)."""
        self._closed = True
        self._ready.put_nowait(None)  # for a reader in another task
        self._stop()
        own = self._own_tasks()
        if own:
            await asyncio.wait(own)
        if self._backend.watches:
            await self._backend.tidy()

    def _stop(self) -> None:
        """Cancels what runs, once: a second cancellation would cut off the first one's request to the server."""
        if not self._stopped:
            self._stopped = True
            for task in self._own_tasks() - {asyncio.current_task()}:
                task.cancel()

    def _own_tasks(self) -> set[asyncio.Task[None]]:
        return {*self._running, *(task for task in (self._feeder, self._watch) if task is not None)}

    async def _look_after(self) -> None:
        try:
            await self._backend.watch()
        except Exception as error:  # noqa: BLE001 - without it lost servers would be waited for without a word
            self._fail(error)

    async def _feed(self) -> None:
        ordinal = 0
        tasks = _iterated(self._source)
        try:
            while True:
                await self._take_place()
                following = await anext(tasks, _END)
                if following is _END:
                    break
                task = task_ref(following)  # type: ignore[arg-type]
                group_id = self._group_id(task)
                for index in range(self._options.n):
                    if index:
                        await self._take_place()
                    self._start(RolloutPlan(task, group_id, index, new_id("rollout"), ordinal))
                    ordinal += 1
        except Exception as error:  # noqa: BLE001 - the caller's iterator may raise anything; the reader gets it
            self._fail(error)
            return
        if self._running:
            await asyncio.wait(self._running)
        self._ready.put_nowait(None)

    async def _take_place(self) -> None:
        """Waits until a rollout may start, and until there is room for it once it has ended."""
        await self._room.acquire()
        await self._slots.acquire()

    def _group_id(self, task: TaskRef) -> str:
        given = self._options.group_id
        if given is None:
            return new_id("group")
        return given if isinstance(given, str) else given(task)

    def _start(self, plan: RolloutPlan) -> None:
        self._count(started=1, running=1)
        task = asyncio.create_task(self._run(plan))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run(self, plan: RolloutPlan) -> None:
        hooks = RolloutHooks(
            retried=lambda: self._count(retried=1),
            regraded=lambda: self._count(regraded=1),
            refilled=lambda: self._count(refilled=1),
            fresh_group=self._fresh_group,
            waiting=lambda change: self._count(waiting=change),
            accepted=self._accepted,
            any_accepted=lambda: self._any_accepted,
        )
        try:
            rollout = await RolloutRun(self._backend, self._settings, self._options, plan, hooks).run()
            graded, reward = rollout.reward is not None, rollout.reward or 0.0
            done = {"done": 1, "failed": rollout.failed, "stale": rollout.stale}
            self._count(running=-1, graded=graded, reward_sum=reward, **done)
        except Exception as error:  # noqa: BLE001 - the reader gets it
            self._fail(error)
            return
        finally:
            self._slots.release()
        self._ready.put_nowait(rollout)

    def _fresh_group(self, closed: str) -> str:
        return self._fresh_groups.setdefault(closed, new_id("group"))

    def _accepted(self) -> None:
        self._any_accepted = True

    def _fail(self, error: Exception) -> None:
        """Ends the run: what ended so far is still given, then ``error``."""
        self._ready.put_nowait(error)
        self._stop()

    def _count(self, **changes: float) -> None:
        before = self._progress
        self._progress = replace(before, **{name: getattr(before, name) + by for name, by in changes.items()})
        self._options.on_progress(self._progress)


async def _iterated(tasks: Tasks) -> AsyncIterator[TaskLike]:
    if isinstance(tasks, AsyncIterable):
        async for task in tasks:
            yield task
        return
    for task in tasks:
        yield task
