"""New weights for all workers of a fleet: from a folder, in pieces, as adapters.

The order is the same for every way: hold new calls, pause every worker, load on each, read its version back,
resume. What must hold:

- All workers or none: input that the first worker refuses (a missing folder, wrong shapes) changes no other one. A
  worker that fails later is fenced, so that no call is sampled by other weights than the current ones.
- A version is served under a name that never stood for other weights (``WeightVersions``).
- Weights that come in pieces are given up when their trainer is silent for ``fleet.update_idle_s``. Workers that
  had taken pieces then have a mixture, and stay fenced until a whole update. A refused piece changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import anyio

from turnstile.models import PauseMode
from turnstile_server.engines.fleet.pauses import FleetPauses
from turnstile_server.engines.fleet.roster import FOLDER, Roster
from turnstile_server.engines.fleet.worker import Worker
from turnstile_server.engines.weights import UpdateWay, WeightBucket, WeightGroup
from turnstile_server.errors import Conflict, EngineRefused
from turnstile_server.settings import FleetSettings

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pieces:
    """An update under way. ``touched``: workers that may have taken a piece. ``alive_at``: when one last came."""

    version: str
    way: UpdateWay
    workers: list[Worker]
    alive_at: float
    touched: set[Worker] = field(default_factory=set)
    running: int = 0
    """Requests of the update that run."""

    @contextmanager
    def request(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self.alive_at = anyio.current_time()


class FleetUpdates:
    """Changes the weights of all workers of ``roster``. One thing at a time."""

    def __init__(self, roster: Roster, pauses: FleetPauses, settings: FleetSettings) -> None:
        self._roster = roster
        self._pauses = pauses
        self._settings = settings
        self._pieces: _Pieces | None = None

    async def from_folder(self, path: str, version: str, mode: PauseMode) -> None:
        """Loads the weights in ``path`` on all workers. Raises EngineRefused, with the old weights kept, for a
        folder that cannot be loaded; Conflict for a name that cannot be served."""
        async with self._roster.lock:
            self.check_no_pieces()
            self._roster.versions.check(version, FOLDER + path)

            async def load(worker: Worker) -> None:
                await worker.engine.update_weights(path, version, mode)
                worker.version = version

            async with self._pauses.all_held(mode):
                await self._pauses.on_all(self._pauses.loadable(), load, f"the weights {version!r}")
                self._roster.versions.serve(version, FOLDER + path)

    async def begin(self, way: UpdateWay, version: str, mode: PauseMode) -> None:
        """Holds calls, pauses all workers and makes them ready for the pieces of ``version``."""
        async with self._roster.lock:
            self.check_no_pieces()
            current = self._roster.versions.current
            if current is not None and current.name == version:
                raise Conflict(f"the weight version {version!r} is served already; give new weights a new name")
            self._roster.versions.check(version, None)
            if mode == "in_place":
                raise EngineRefused(
                    "Weights in pieces cannot be loaded in place: the attention cache of running calls would be "
                    "of neither weights. Use mode retract or abort."
                )
            await self._pauses.hold_all(mode)
            try:
                workers = await self._pauses.on_all(
                    self._pauses.loadable(),
                    lambda worker: worker.engine.begin_update(way),
                    f"the weights {version!r}",
                )
            except BaseException:
                await self._pauses.let_go()
                raise
            self._pieces = _Pieces(version, way, workers, anyio.current_time())
            if way == "trainer":
                self._pieces.touched.update(workers)  # by the trainer: what it writes is not seen here

    async def bucket(self, bucket: WeightBucket) -> None:
        """Loads one piece on all workers of the update. A worker that cannot leaves it, and is fenced unless it
        refused its first piece, which changed nothing; where none could, the update is cancelled and this
        raises."""
        pieces = self._current_pieces()
        untouched = set(pieces.workers) - pieces.touched
        pieces.touched.update(pieces.workers)
        with pieces.request():
            failed = await self._roster.each(
                list(pieces.workers), lambda worker: worker.engine.load_bucket(bucket)
            )
        for worker, error in failed.items():
            if worker in untouched and isinstance(error, EngineRefused | Conflict):
                pieces.touched.discard(worker)
                log.warning("engine %s refused a first piece of weights: %s", worker.worker_id, error.message)
            else:
                self._mixture(worker, f"a piece of {pieces.version!r} failed: {error.message}")
            pieces.workers.remove(worker)
        if failed and not pieces.workers:
            await self.cancel()
            raise next(iter(failed.values()))

    async def end(self) -> None:
        """All pieces are there: the version is served, calls go on. Raises where no worker has it."""
        async with self._roster.lock:
            pieces = self._current_pieces()

            async def finish(worker: Worker) -> None:
                await worker.engine.end_update(pieces.version)
                worker.version = pieces.version

            with pieces.request():
                failed = await self._roster.each(list(pieces.workers), finish)
            for worker, error in failed.items():
                self._mixture(worker, f"the update to {pieces.version!r} did not end: {error.message}")
            if len(failed) < len(pieces.workers):
                self._roster.versions.serve(pieces.version, f"pieces by {pieces.way}")
            self._pieces = None
            await self._pauses.let_go()
            if len(failed) == len(pieces.workers):
                raise next(iter(failed.values()))

    async def cancel(self) -> None:
        """Gives the update up. Workers that took pieces stay fenced; where none did, the old weights serve on.
        No-op where none is under way."""
        async with self._roster.lock:
            pieces, self._pieces = self._pieces, None
            if pieces is None:
                return
            for worker in pieces.touched.intersection(pieces.workers):
                self._mixture(worker, f"the update to {pieces.version!r} was cancelled")
            await self._pauses.let_go()

    def _mixture(self, worker: Worker, why: str) -> None:
        worker.version = None
        self._roster.fence(worker, f"its weights are a mixture: {why}; the next whole update mends it")

    async def watch(self) -> None:
        """Cancels an update whose trainer is silent, until cancelled."""
        limit_s = self._settings.update_idle_s
        while True:
            await anyio.sleep(min(1.0, limit_s / 4))
            pieces = self._pieces
            if pieces is None or pieces.running or anyio.current_time() - pieces.alive_at <= limit_s:
                continue
            log.error("no piece of the weights %r came for %g s: the update is cancelled", pieces.version, limit_s)
            await self.cancel()

    def _current_pieces(self) -> _Pieces:
        if self._pieces is None:
            raise Conflict("no weight update is under way: POST /engine/weights/begin begins one")
        return self._pieces

    def check_no_pieces(self) -> None:
        """Raises Conflict while weights are loaded in pieces: nothing else may change the workers then."""
        if self._pieces is not None:
            raise Conflict(
                f"the weights {self._pieces.version!r} are being loaded in pieces: end that update or cancel it"
            )

    # Groups and adapters

    async def join_group(self, group: WeightGroup, ranks_per_worker: int, ranks: int | None = None) -> None:
        """All workers join at once: the trainer's group is complete with the last. ``ranks``: how many of its
        ranks they are to be; None: all from ``rank_offset`` on. Raises the first error; workers that had joined
        leave again."""
        async with self._roster.lock:
            workers = self._pauses.loadable()
            end = group.world_size if ranks is None else group.rank_offset + ranks
            needed = group.rank_offset + ranks_per_worker * len(workers)
            if needed != end or end > group.world_size:
                here = "" if ranks is None else f" and ranks up to {end} for this server"
                raise EngineRefused(
                    f"The group has world_size {group.world_size}{here}, but {len(workers)} workers with "
                    f"{ranks_per_worker} ranks each, from rank {group.rank_offset} on, make {needed}."
                )
            offsets = {
                worker: group.rank_offset + ranks_per_worker * index for index, worker in enumerate(workers)
            }
            failed = await self._roster.each(
                workers, lambda worker: worker.engine.join_group(replace(group, rank_offset=offsets[worker]))
            )
            if failed:
                joined = [worker for worker in workers if worker not in failed]
                await self._roster.each(joined, lambda worker: worker.engine.leave_group(group.name))
                raise next(iter(failed.values()))

    async def leave_group(self, name: str) -> None:
        """All workers leave. Raises the first error."""
        async with self._roster.lock:
            failed = await self._roster.each(
                self._pauses.loadable(), lambda worker: worker.engine.leave_group(name)
            )
            if failed:
                raise next(iter(failed.values()))

    async def load_adapter(self, name: str, path: str) -> None:
        """Loads the adapter on all workers. Raises Conflict for a name that stands for another one."""
        async with self._roster.lock:
            known = self._roster.adapters.get(name)
            if known is not None and known != path:
                raise Conflict(f"the adapter {name!r} names other weights already; give each its own name")

            async def load(worker: Worker) -> None:
                await worker.engine.load_adapter(name, path)
                worker.adapters.add(name)

            await self._pauses.on_all(self._pauses.loadable(), load, f"the adapter {name!r}")
            self._roster.adapters[name] = path
            self._roster.unloaded_adapters.discard(name)

    async def unload_adapter(self, name: str) -> None:
        """All workers forget it. Raises the first error."""
        async with self._roster.lock:
            self._roster.adapters.pop(name, None)
            self._roster.unloaded_adapters.add(name)

            async def unload(worker: Worker) -> None:
                worker.adapters.discard(name)
                await worker.engine.unload_adapter(name)

            failed = await self._roster.each(self._pauses.loadable(), unload)
            if failed:
                raise next(iter(failed.values()))
