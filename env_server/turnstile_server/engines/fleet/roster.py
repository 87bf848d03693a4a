"""All workers of a fleet: who serves, who is down, who missed an update; and whether calls are held.

Owns the workers' states and the checks of their health. What must hold: a call is given only to a worker that
serves; a worker serves only while it answers and has the current weights (one that missed an update is fenced
until it has caught up); states change here alone, and whoever waits for a change is told (``on_change``).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Literal

import anyio

from turnstile_server.engines.fleet.bounds import FleetBounds
from turnstile_server.engines.fleet.worker import Worker
from turnstile_server.engines.protocol import EngineState
from turnstile_server.engines.versions import WeightVersions
from turnstile_server.errors import EngineTimeout, TurnstileError
from turnstile_server.settings import FleetSettings

log = logging.getLogger(__name__)

HoldReason = Literal["pause", "update", "sleep"]

FOLDER = "folder "
"""The prefix of the source of a version whose weights are in a folder: that version can be loaded again."""


class Roster:
    """``on_change``: called after every change that may let a waiting call go on, or must make it give up."""

    def __init__(
        self, settings: FleetSettings, versions: WeightVersions, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.versions = versions
        self.on_change = on_change
        self.lock = anyio.Lock()
        """Held by whatever changes weights, pauses or wakes workers: one thing at a time."""
        self.adapters: dict[str, str] = {}
        """LoRA adapters by name: the folder of each."""
        self.unloaded_adapters: set[str] = set()
        """Those that were unloaded: no call may name them, and a worker that was not there then may still have
        them."""
        self._settings = settings
        self._bounds = settings.bounds_of(FleetBounds)
        self._workers: dict[str, Worker] = {}
        self._holds: dict[HoldReason, float] = {}
        self._released_at = 0.0
        """When calls were held last (monotonic seconds)."""
        self._none_since: float | None = None

    # Who is there

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(self._workers.values())

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    @property
    def serving(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.serving]

    @property
    def answering(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.answers]

    @property
    def sleeping(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.status == "asleep"]

    @property
    def none_since(self) -> float | None:
        """Since when no worker serves (monotonic seconds); None while one does."""
        return self._none_since

    @property
    def hopeless(self) -> bool:
        """Every worker is gone for good."""
        return all(worker.gone for worker in self._workers.values())

    def why_none(self) -> str:
        """The reason that no worker serves, in a sentence for the caller."""
        reasons = [f"{worker.worker_id} is {worker.status}: {worker.detail}" for worker in self.workers]
        return "No engine serves: " + ("; ".join(reasons) or "there is none") + "."

    def add(self, worker: Worker) -> None:
        self._workers[worker.worker_id] = worker
        self._changed()

    def remove(self, worker: Worker) -> None:
        self._workers.pop(worker.worker_id, None)
        self._changed()

    # States

    def settle(self, worker: Worker) -> None:
        """A worker that answers: it serves if it has the current weights and all adapters, else it is fenced."""
        current = self.versions.current
        missing = sorted(self.adapters.keys() - worker.adapters)
        if (current is None or worker.version == current.name) and missing:
            self.fence(worker, f"it lacks the adapters {missing}")
        elif current is None or worker.version == current.name:
            self._set(worker, "serving", "")
        else:
            has = "weights that are not known" if worker.version is None else f"the weights {worker.version!r}"
            self.fence(worker, f"it has {has}, and the current ones are {current.name!r}")

    def fence(self, worker: Worker, detail: str) -> None:
        """It answers, but gets no calls until it has the current weights."""
        self._set(worker, "fenced", detail)

    def down(self, worker: Worker, detail: str, *, gone: bool = False) -> None:
        """It does not answer."""
        worker.gone = gone
        worker.adapters.clear()  # it may have been started anew when it answers again
        worker.failures = self._bounds.health_failures
        self._set(worker, "down", detail)

    def drain(self, worker: Worker) -> None:
        """It gets no further calls, and is about to be removed."""
        self._set(worker, "draining", "it is being removed")

    def asleep(self, worker: Worker, failing: str = "") -> None:
        """``failing``: what its health checks say, where it may have ended in its sleep."""
        self._set(
            worker, "asleep", "its memory was freed; " + (f"it may be gone: {failing}" if failing else "wake it")
        )

    def _set(self, worker: Worker, status: str, detail: str) -> None:
        if (worker.status, worker.detail) == (status, detail):
            return
        if worker.status != status:
            level = logging.WARNING if status in ("down", "fenced") else logging.INFO
            log.log(level, "engine %s is %s%s", worker.worker_id, status, f": {detail}" if detail else "")
        worker.status, worker.detail = status, detail  # type: ignore[assignment]
        self._changed()

    def _changed(self) -> None:
        if self.serving:
            self._none_since = None
        elif self._none_since is None:
            self._none_since = anyio.current_time()
        self.on_change()

    # Holds

    @property
    def held(self) -> bool:
        """No call is given to any worker now."""
        return bool(self._holds)

    @property
    def held_at(self) -> float | None:
        """Since when calls have been held (monotonic seconds)."""
        return min(self._holds.values(), default=None)

    def held_since(self, reason: HoldReason) -> float | None:
        return self._holds.get(reason)

    def hold(self, reason: HoldReason) -> None:
        self._holds.setdefault(reason, anyio.current_time())

    def release(self, reason: HoldReason) -> None:
        self._holds.pop(reason, None)
        self._released_at = anyio.current_time()
        if self._none_since is not None:  # time in which calls were held counts against no wait for a worker
            self._none_since = anyio.current_time()
        for worker in self.workers:
            worker.window.disturbed()
        self._changed()

    # All workers at once

    async def each(
        self, workers: Iterable[Worker], step: Callable[[Worker], Awaitable[None]]
    ) -> dict[Worker, TurnstileError]:
        """Does ``step`` with all of ``workers`` at once. Returns the errors of those that failed."""
        failed: dict[Worker, TurnstileError] = {}

        async def one(worker: Worker) -> None:
            try:
                await step(worker)
            except TurnstileError as error:
                failed[worker] = error

        async with anyio.create_task_group() as group:
            for worker in workers:
                group.start_soon(one, worker)
        return failed

    # Health

    async def watch(self) -> None:
        """Asks busy workers for their load, and all for their health, until cancelled."""
        health_at = catch_up_at = anyio.current_time()
        while True:
            await anyio.sleep(min(self._bounds.load_interval_s, self._bounds.health_interval_s))
            now = anyio.current_time()
            await self.each([worker for worker in self.serving if worker.calls], self.measure)
            if now >= health_at:
                health_at = now + self._bounds.health_interval_s
                await self.each(self.workers, self.check)
            if now >= catch_up_at:
                catch_up_at = now + self._bounds.catch_up_s
                await self.each([worker for worker in self.workers if worker.status == "fenced"], self.catch_up)
            self.on_change()  # calls that wait for their own worker may have waited long enough

    async def measure(self, worker: Worker) -> None:
        """Its limit follows its load. A worker that does not tell it for ``fleet.hang_s`` hangs: it is down.
        Raises the engine's errors."""
        asked_at = anyio.current_time()
        silent_since: float | None = asked_at
        with suppress(EngineTimeout), anyio.move_on_after(self._bounds.health_timeout_s):
            worker.load = await worker.engine.load()
            silent_since = self._stale_since(worker)
        if silent_since is not None and not self._may_be_silent:
            worker.deaf_since = silent_since if worker.deaf_since is None else worker.deaf_since
            deaf_s = anyio.current_time() - worker.deaf_since
            if deaf_s >= self._settings.hang_s and worker.serving:
                worker.silent_since = worker.deaf_since
                self.down(worker, f"it takes requests and has answered none for {deaf_s:.0f} s")
            return
        worker.deaf_since = worker.silent_since = None  # while it is paused or loads weights it may be silent
        if worker.load is not None and silent_since is None:
            worker.limit.observe(worker.load, worker.calls)

    def _stale_since(self, worker: Worker) -> float | None:
        """Since when its scheduler, which is said to be busy, has told nothing of itself; None: it tells."""
        age_s = None if worker.load is None else worker.load.age_s
        if age_s is None or age_s <= self._bounds.health_timeout_s:
            return None
        since = anyio.current_time() - age_s
        return max(since, worker.busy_since, self._released_at) if worker.calls else since

    @property
    def _may_be_silent(self) -> bool:
        """The workers are paused, or get new weights: one that says nothing need not hang."""
        return self.held or self.lock.locked()

    async def check(self, worker: Worker) -> None:
        """Asks whether it lives and which weights it has, and acts on the answer."""
        if worker.status == "asleep":
            await self._check_asleep(worker)
        if worker.status in ("asleep", "joining"):
            return
        asked_at, excused, state = anyio.current_time(), self._may_be_silent, None
        with anyio.move_on_after(self._bounds.health_timeout_s):
            state = await worker.engine.state()
        if state is None or not state.ok:
            self._failed(worker, state, None if excused or self._may_be_silent else asked_at)
            return
        worker.failures = 0
        worker.gone = False
        if worker.deaf_since is None:
            worker.silent_since = None
        elif worker.status == "down":  # its HTTP server answers; does its scheduler?
            await self.each([worker], self.measure)
            if worker.deaf_since is not None:
                return
        if self.lock.locked() or self.held_since("update") is not None:
            return  # an update or a pause is under way: what it says of its weights may change at once
        self._told(worker, state.weight_version)

    async def _check_asleep(self, worker: Worker) -> None:
        """One that is gone for good is down. One that only does not answer is left asleep, and says so: it may
        come back as it was, and waking it says what it has."""
        state = None
        with anyio.move_on_after(self._bounds.health_timeout_s):
            state = await worker.engine.state()
        if self.lock.locked() or worker.status != "asleep":
            return  # a check that was asked later may have found meanwhile that it is gone
        if state is not None and state.gone:
            self.down(worker, state.detail, gone=True)
            if not self.sleeping:  # nobody is left to be woken: calls that wait are to hear why
                self.release("sleep")
        elif state is not None and state.ok:
            worker.failures = 0
            self.asleep(worker)
        else:
            worker.failures += 1
            detail = self._unanswered(state)
            if worker.failures == self._bounds.health_failures:
                log.warning("engine %s is asleep and may be gone: %s", worker.worker_id, detail)
            if worker.failures >= self._bounds.health_failures:
                self.asleep(worker, detail)

    def _failed(self, worker: Worker, state: EngineState | None, asked_at: float | None) -> None:
        """``asked_at``: None where it may be busy with new weights, under which its calls wait."""
        if asked_at is None or worker.silent_since is None:
            worker.silent_since = asked_at
        detail = self._unanswered(state)
        worker.failures += 1
        if state is not None and state.gone:
            self.down(worker, detail, gone=True)
        elif worker.failures >= self._bounds.health_failures and worker.status != "draining":
            self.down(worker, detail)

    def _unanswered(self, state: EngineState | None) -> str:
        return f"it did not answer within {self._bounds.health_timeout_s:g} s" if state is None else state.detail

    def _told(self, worker: Worker, version: str | None) -> None:
        """``version``: what the engine says that it has; None: it does not know."""
        changed = version != worker.version
        worker.version = version
        if version is not None and changed and not self.versions.was_served(version):
            self.versions.observe(version)  # somebody loaded it past us
            for other in self.serving:
                self.settle(other)
        if worker.status == "down" or (changed and worker.status in ("serving", "fenced")):
            self.settle(worker)

    async def catch_up(self, worker: Worker) -> None:
        """Gives a fenced worker the current weights, where they are in a folder."""
        async with self.lock:
            current = self.versions.current
            if worker.status != "fenced" or current is None or self.held_since("update") is not None:
                return  # new weights come, in pieces: between two of them nobody has the lock
            if worker.version != current.name:
                if current.source is None or not current.source.startswith(FOLDER):
                    return  # the next update brings it back
                try:
                    await self._load(worker, current.source.removeprefix(FOLDER), current.name)
                except TurnstileError as error:
                    self.fence(worker, f"it missed the weights {current.name!r}: {error.message}")
                    return
            await self.load_adapters(worker)
            self.settle(worker)

    async def _load(self, worker: Worker, path: str, version: str) -> None:
        await worker.engine.pause("retract")
        try:
            await worker.engine.update_weights(path, version)
            worker.version = version
        finally:
            if self.held_since("pause") is None:
                with anyio.CancelScope(shield=True):  # an engine left paused would hold every call
                    await worker.engine.resume()

    async def unload_leftovers(self, worker: Worker) -> None:
        """A worker that joins may have adapters that the others have unloaded."""
        for name in self.unloaded_adapters:
            try:
                await worker.engine.unload_adapter(name)
            except TurnstileError as error:
                log.warning("engine %s may have the adapter %s: %s", worker.worker_id, name, error.message)

    async def load_adapters(self, worker: Worker) -> None:
        """Gives a worker that joins, or was started anew, the adapters of the others."""
        for name in self.adapters.keys() - worker.adapters:
            try:
                # It may be one that was a worker before, and have it, or another one of that name.
                await worker.engine.unload_adapter(name)
                await worker.engine.load_adapter(name, self.adapters[name])
                worker.adapters.add(name)
            except TurnstileError as error:
                log.warning("engine %s has no adapter %s: %s", worker.worker_id, name, error.message)
