"""Many engines as one: the ``Engine`` that the gate samples with, and the ``EngineAdmin`` of the control API.

Owns the workers' engines: starts them, lets others join, closes them. Calls go through ``FleetCalls``, pauses and
weights through ``FleetPauses`` and ``FleetUpdates``; the ``Roster`` knows who serves.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence

import anyio
from anyio.abc import TaskGroup

from turnstile.models import Float32Array, Int32Array, PauseMode
from turnstile_server.engines.admin import EngineAdmin
from turnstile_server.engines.fleet.bounds import FleetBounds
from turnstile_server.engines.fleet.calls import FleetCalls
from turnstile_server.engines.fleet.completion import Decode
from turnstile_server.engines.fleet.limit import WorkerLimit
from turnstile_server.engines.fleet.pauses import FleetPauses
from turnstile_server.engines.fleet.placement import Placement
from turnstile_server.engines.fleet.roster import Roster
from turnstile_server.engines.fleet.updates import FleetUpdates
from turnstile_server.engines.fleet.window import EpisodeWindow
from turnstile_server.engines.fleet.worker import Worker
from turnstile_server.engines.protocol import (
    CallOrigin,
    Engine,
    EngineCapabilities,
    EngineChunk,
    EngineSampling,
    EngineState,
)
from turnstile_server.engines.versions import WeightVersions
from turnstile_server.engines.weights import UpdateWay, WeightBucket, WeightGroup
from turnstile_server.errors import (
    Conflict,
    EngineRefused,
    EngineUnavailable,
    NotFound,
    StartupError,
    TurnstileError,
    Unprocessable,
)
from turnstile_server.settings import EngineSettings, FleetSettings


class Fleet(Engine, EngineAdmin):
    """``first``: the engines that are there from the start, by URL (None: the server's own). ``join``: makes the
    engine of a URL that joins later; None where none can. ``decode``: for stop strings across a cut.
    ``placement``: where episodes go; None: as the settings say."""

    def __init__(
        self,
        first: Sequence[tuple[str | None, Engine]],
        engine_settings: EngineSettings,
        settings: FleetSettings,
        versions: WeightVersions,
        *,
        join: Callable[[str], Engine] | None = None,
        decode: Decode | None = None,
        placement: Placement | None = None,
    ) -> None:
        self._max_calls = engine_settings.max_connections
        self._settings = settings
        self._join = join
        self._numbers = 0
        self._capabilities: EngineCapabilities | None = None
        self._watching: TaskGroup | None = None
        self._first = [self._new_worker(url, engine) for url, engine in first]
        self.roster = Roster(settings, versions)
        bounds = settings.bounds_of(FleetBounds)
        self.placement = placement or Placement(bounds.load_factor, bounds.remembered_episodes)
        self.calls = FleetCalls(self.roster, self.placement, settings, decode)
        self.roster.on_change = self.calls.roster_changed
        self._pauses = FleetPauses(self.roster, settings)
        self._updates = FleetUpdates(self.roster, self._pauses, settings)

    @property
    def capabilities(self) -> EngineCapabilities:
        """Those of the first worker; the others are like it."""
        if self._capabilities is None:
            raise RuntimeError("the fleet was not started")
        return self._capabilities

    # Life

    async def start(self) -> None:
        """Starts the first engines at once. Raises the StartupError of one that cannot be used."""
        errors: list[StartupError] = []

        async def start(worker: Worker) -> None:
            try:
                await worker.engine.start()
            except StartupError as error:
                errors.append(error)

        async with anyio.create_task_group() as group:
            for worker in self._first:
                group.start_soon(start, worker)
        if errors:
            raise errors[0]
        self._capabilities = self._first[0].engine.capabilities
        for worker in self._first:
            self._check_alike(worker)
            await self._admit(worker)

    async def close(self) -> None:
        self.calls.close()
        for worker in {*self._first, *self.roster.workers}:
            await worker.engine.close()

    async def watch(self) -> None:
        async with anyio.create_task_group() as self._watching:
            self._watching.start_soon(self.roster.watch)
            self._watching.start_soon(self._updates.watch)
            self._watching.start_soon(self.calls.watch)
            for worker in {*self._first, *self.roster.workers}:
                self._watching.start_soon(worker.watch)

    def _new_worker(self, url: str | None, engine: Engine) -> Worker:
        self._numbers += 1
        settings, bounds = self._settings, self._settings.bounds_of(FleetBounds)
        limit = WorkerLimit(
            start=bounds.start_calls,
            floor=bounds.min_calls,
            ceiling=self._max_calls,
            adaptive=settings.adaptive,
        )
        window = EpisodeWindow(
            floor=bounds.min_episodes,
            idle_s=bounds.idle_episode_s,
            fill=settings.cache_fill,
            adaptive=settings.adaptive,
        )
        return Worker(f"w{self._numbers}", url, engine, limit, window)

    async def _admit(self, worker: Worker) -> None:
        """A started engine becomes a worker, with the weights that it has."""
        worker.version = (await worker.engine.state()).weight_version
        if worker.version is not None and self.roster.versions.current is None:
            self.roster.versions.serve(worker.version)
        try:
            if await worker.engine.load() is None:
                worker.limit.blind()
        except TurnstileError:
            worker.limit.blind()
        if worker.engine.capabilities.keeps_prefixes:
            worker.window.hold(worker.engine.capabilities.cache_tokens)
        else:
            worker.window.open()
        self.roster.add(worker)
        self.roster.settle(worker)

    def _check_alike(self, worker: Worker) -> None:
        """Raises StartupError for an engine that differs from the others."""
        theirs = _alike(self.capabilities)
        for name, mine in _alike(worker.engine.capabilities).items():
            if mine != theirs[name]:
                raise StartupError(
                    f"The engine at {worker.url} differs from the others: its {name} is {mine}, theirs is "
                    f"{theirs[name]}. All workers must serve one model in one way."
                )

    async def add_worker(self, url: str) -> None:
        """An engine joins. It gets the current weights first, where they are in a folder; else it is fenced until
        the next update. Raises Unprocessable for one that cannot be used."""
        if self._join is None:
            raise EngineRefused("No other engine can join this one.")
        url = url.rstrip("/")  # else one engine could be two workers
        if any(worker.url is not None and worker.url.rstrip("/") == url for worker in self.roster.workers):
            raise Conflict(f"the engine at {url} is a worker already")
        worker = self._new_worker(url, self._join(url))
        try:
            await worker.engine.start()
            self._check_alike(worker)
            await self._admit(worker)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await worker.engine.close()
            if isinstance(error, StartupError):
                raise Unprocessable(error.message) from error
            raise
        if self._watching is not None:
            self._watching.start_soon(worker.watch)
        await self.roster.unload_leftovers(worker)
        await self.roster.catch_up(worker)
        await self.roster.load_adapters(worker)

    async def remove_worker(self, worker_id: str) -> None:
        """The worker gets no further calls, and goes when its calls have ended, after ``fleet.drain_s`` at the
        latest."""
        worker = self.roster.get(worker_id)
        if worker is None:
            raise NotFound(f"there is no worker {worker_id}")
        if len(self.roster.workers) == 1:
            raise Conflict("the last worker cannot be removed: add another one first")
        self.roster.drain(worker)
        with anyio.move_on_after(self._settings.drain_s):
            await worker.wait_idle()
        self.roster.remove(worker)
        worker.watching.cancel()
        await worker.engine.close()

    # What the gate asks for

    def generate(
        self,
        input_ids: Int32Array,
        sampling: EngineSampling,
        *,
        rid: str,
        origin: CallOrigin,
        stream: bool,
    ) -> AsyncGenerator[EngineChunk]:
        return self.calls.generate(input_ids, sampling, rid=rid, origin=origin, stream=stream)

    async def abort(self, rid: str) -> None:
        await self.calls.abort(rid)

    def forget(self, episode_id: str) -> None:
        self.calls.forget(episode_id)

    async def score(self, input_ids: Int32Array, start: int, temperature: float) -> Float32Array:
        """On the least busy worker."""
        if self.roster.held:
            raise EngineUnavailable("The engine is paused; resume it, then score.")
        serving = self.roster.serving
        if not serving:
            raise EngineUnavailable(self.roster.why_none())
        worker = min(serving, key=lambda worker: worker.calls)
        return await worker.engine.score(input_ids, start, temperature)

    async def state(self) -> EngineState:
        """Asks every worker."""
        await self.roster.each(self.roster.workers, self.roster.check)
        current, paused_at = self.roster.versions.current, self.roster.held_since("pause")
        workers = self.roster.workers
        asleep = self.roster.held_since("sleep") is not None
        ok = bool(self.roster.answering) or asleep
        return EngineState(
            ok=ok,
            weight_version=None if current is None or not ok else current.name,
            paused=(paused_at is not None) if ok else None,
            detail="" if self.roster.serving or asleep else self.roster.why_none(),
            gone=self.roster.hopeless,
            paused_s=None if paused_at is None else anyio.current_time() - paused_at,
            asleep=asleep,
            running_calls=sum(worker.calls for worker in workers),
            waiting_calls=self.calls.waiting,
            versions=0 if current is None else current.order + 1,
            workers=tuple(worker.info() for worker in workers),
        )

    # What the trainer does to all of them

    @property
    def held_s(self) -> float | None:
        since = self.roster.held_at
        return None if since is None else anyio.current_time() - since

    @property
    def why_none_serves(self) -> str | None:
        return None if self.roster.serving or self.roster.held else self.roster.why_none()

    async def pause(self, mode: PauseMode) -> None:
        self._updates.check_no_pieces()
        await self._pauses.pause(mode)

    async def resume(self) -> None:
        self._updates.check_no_pieces()
        await self._pauses.resume()

    async def load_weights(self, path: str, version: str, mode: PauseMode) -> None:
        await self._updates.from_folder(path, version, mode)

    async def begin_weights(self, way: UpdateWay, version: str, mode: PauseMode) -> None:
        await self._updates.begin(way, version, mode)

    async def load_piece(self, bucket: WeightBucket) -> None:
        await self._updates.bucket(bucket)

    async def end_weights(self) -> None:
        await self._updates.end()

    async def cancel_weights(self) -> None:
        await self._updates.cancel()

    async def join_workers(self, group: WeightGroup, ranks_per_worker: int, ranks: int | None = None) -> None:
        await self._updates.join_group(group, ranks_per_worker, ranks)

    async def leave_workers(self, name: str) -> None:
        await self._updates.leave_group(name)

    async def load_adapter(self, name: str, path: str) -> None:
        await self._updates.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        await self._updates.unload_adapter(name)

    async def sleep(self) -> None:
        self._updates.check_no_pieces()
        await self._pauses.sleep()

    async def wake(self) -> None:
        await self._pauses.wake()

    async def update_weights(self, path: str, version: str, mode: PauseMode = "retract") -> None:
        await self.load_weights(path, version, mode)


def _alike(can: EngineCapabilities) -> dict[str, object]:
    """The capabilities that all workers must have alike: an episode may have calls on any of them."""
    return {
        "vocabulary size": can.vocab_size,
        "context length": can.context_length,
        "constrained decoding": (can.constrained, can.structural_tags, can.resumes_grammars),
        "truncated sampling": can.exact_truncation,
        "LoRA": can.adapters,
    }
