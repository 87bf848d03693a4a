"""A trainer's control of the engines: pauses, new weights, groups, adapters, sleep, workers.

``EngineAdmin`` is the seam to the control API. A fleet implements all of it. ``LoneEngineAdmin`` is that of an
engine without a fleet (the training loop as the sampler, test engines): what it lacks is refused with the reason.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Protocol

from turnstile.models import PauseMode
from turnstile_server.engines.protocol import Engine, EngineState
from turnstile_server.engines.versions import WeightVersions
from turnstile_server.engines.weights import UpdateWay, WeightBucket, WeightGroup
from turnstile_server.errors import EngineRefused

_NO_FLEET = "This engine has no workers that could "


class EngineAdmin(Protocol):
    """Each method returns when it is done on all engines. They may be called at the same time; they take turns."""

    @abstractmethod
    async def state(self) -> EngineState:
        """Never raises."""
        ...

    @property
    def held_s(self) -> float | None:
        """Seconds for which model calls have been held by a pause, an update or sleep; None while they are not."""
        return None

    @property
    def why_none_serves(self) -> str | None:
        """The reason that no engine takes calls, though calls are not held; None while one does."""
        return None

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Holds all model calls until ``resume``."""
        ...

    @abstractmethod
    async def resume(self) -> None:
        """Undoes any number of pauses."""
        ...

    @abstractmethod
    async def load_weights(self, path: str, version: str, mode: PauseMode) -> None:
        """The weights in folder ``path`` are served as ``version``. Raises Conflict for a name that cannot be
        served, EngineRefused (the old weights serve on) for a folder that cannot be loaded."""
        ...

    async def begin_weights(self, way: UpdateWay, version: str, mode: PauseMode) -> None:
        """Weights in pieces follow."""
        raise EngineRefused(_NO_FLEET + "take weights in pieces.")

    async def load_piece(self, bucket: WeightBucket) -> None:
        """One piece, for all engines. Where none can take it the update is cancelled."""
        raise EngineRefused(_NO_FLEET + "take weights in pieces.")

    async def end_weights(self) -> None:
        """The pieces are complete, and served."""
        raise EngineRefused(_NO_FLEET + "take weights in pieces.")

    async def cancel_weights(self) -> None:
        """The pieces are given up; no-op where none came."""
        return

    async def join_workers(self, group: WeightGroup, ranks_per_worker: int, ranks: int | None = None) -> None:
        """All engines join the trainer's process group, which is complete with the last of them."""
        raise EngineRefused(_NO_FLEET + "join a process group.")

    async def leave_workers(self, name: str) -> None:
        """All engines leave the group."""
        raise EngineRefused(_NO_FLEET + "join a process group.")

    async def load_adapter(self, name: str, path: str) -> None:
        """The LoRA adapter in folder ``path`` can be named by calls. Raises Conflict for a name that is taken."""
        raise EngineRefused(_NO_FLEET + "load an adapter.")

    async def unload_adapter(self, name: str) -> None:
        """It can be named no more."""
        raise EngineRefused(_NO_FLEET + "load an adapter.")

    async def sleep(self) -> None:
        """Waits until no call runs, then frees the engines' memory. Calls wait until ``wake`` and ``resume``."""
        raise EngineRefused(_NO_FLEET + "sleep.")

    async def wake(self) -> None:
        """Takes the memory back. Calls stay held until ``resume``: new weights come first."""
        raise EngineRefused(_NO_FLEET + "sleep.")

    async def add_worker(self, url: str) -> None:
        """The engine at ``url`` joins. Raises Unprocessable for one that cannot be used."""
        raise EngineRefused(_NO_FLEET + "be joined by another one.")

    async def remove_worker(self, worker_id: str) -> None:
        """The worker goes when its calls have ended. Raises NotFound."""
        raise EngineRefused(_NO_FLEET + "be removed.")


class LoneEngineAdmin(EngineAdmin):
    """The admin of one engine that is not in a fleet."""

    def __init__(self, engine: Engine, versions: WeightVersions) -> None:
        self._engine = engine
        self._versions = versions

    async def state(self) -> EngineState:
        state = await self._engine.state()
        if state.weight_version is not None:
            self._versions.observe(state.weight_version)
        return state

    async def pause(self, mode: PauseMode) -> None:
        await self._engine.pause(mode)

    async def resume(self) -> None:
        await self._engine.resume()

    async def load_weights(self, path: str, version: str, mode: PauseMode) -> None:
        self._versions.check(version, path)
        await self._engine.update_weights(path, version)
        self._versions.serve(version, path)
