"""An engine that the server starts itself: its process, and the client of its kind.

What must hold: no token is sampled by weights that the trainer does not know of. An engine that was started again
serves its first weights. Where those are not the ones that were served, calls are refused until weights are
loaded, which a fleet does by itself. A pause outlives a restart. Calls in flight when the process ends fail with
EngineUnavailable.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

import anyio

from turnstile.models import Float32Array, Int32Array, PauseMode
from turnstile_server.engines.launch.supervisor import EngineDown, EngineProcess, EngineUp
from turnstile_server.engines.protocol import (
    CallOrigin,
    Engine,
    EngineCapabilities,
    EngineChunk,
    EngineContext,
    EngineLoad,
    EngineSampling,
    EngineState,
)
from turnstile_server.engines.weights import UpdateWay, WeightBucket, WeightGroup
from turnstile_server.errors import EngineUnavailable, StartupError
from turnstile_server.settings import LaunchSettings

Create = Callable[[EngineContext], Engine]
"""Makes the client of an engine that runs elsewhere, from a context with its URL."""


class LaunchedEngine(Engine):
    """An ``Engine`` whose process is ours. ``create`` makes its client, anew for each life of the process."""

    def __init__(
        self,
        context: EngineContext,
        launch: LaunchSettings,
        create: Create,
        tell: Callable[[str], None] | None = None,
        replica: int = 0,
    ) -> None:
        self.process = EngineProcess(
            context.settings,
            launch,
            context.model_dir,
            replica=replica,
            on_up=self._up,
            on_down=self._down,
            tell=tell,
        )
        self._context = context
        self._create = create
        self._client: Engine | None = None
        """None while the process does not answer."""
        self._capabilities: EngineCapabilities | None = None
        self._served: str | None = None
        """The weights that were last seen to be served."""
        self._fence = ""
        """The reason that calls are refused although the engine answers; empty where they are not."""
        self._paused: PauseMode | None = None
        self._asleep = False
        self._updated: Engine | None = None
        """The client with which the last update in pieces began."""
        self._lost_adapters: set[str] = set()
        self._adapters: set[str] = set()

    @property
    def capabilities(self) -> EngineCapabilities:
        if self._capabilities is None:
            raise RuntimeError("the engine was not started")
        return self._capabilities

    async def start(self) -> None:
        client = await self._connected(await self.process.start())
        self._capabilities, self._client = client.capabilities, client
        self._served = (await client.state()).weight_version

    async def close(self) -> None:
        client, self._client = self._client, None
        try:
            if client is not None:
                await client.close()
        finally:
            await self.process.stop()

    async def _connected(self, url: str) -> Engine:
        settings = self._context.settings.model_copy(update={"url": url})
        client = self._create(replace(self._context, settings=settings))
        try:
            await client.start()
        except BaseException:
            with anyio.CancelScope(shield=True):
                await client.close()
            raise
        return client

    async def _down(self, _down: EngineDown) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _up(self, up: EngineUp) -> None:
        """The process was started again: the state of the one before is restored, or its loss is said."""
        client = await self._connected(up.url)
        try:
            if self._asleep:
                await client.sleep()
            first = (await client.state()).weight_version
            if self._paused is not None:
                await client.pause(self._paused)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await client.close()
            raise
        self._fence = ""
        if first != self._served:
            self._fence = (
                f"The engine was started again and serves its first weights ({first}), not {self._served}: load "
                "weights (POST /engine/weights)."
            )
        self._lost_adapters |= self._adapters
        self._adapters.clear()
        self._client = client

    def _answering(self) -> Engine:
        if self._client is None:
            raise self.process.unavailable()
        return self._client

    def _serving(self) -> Engine:
        client = self._answering()
        if self._fence:
            raise EngineUnavailable(self._fence)
        return client

    async def generate(
        self,
        input_ids: Int32Array,
        sampling: EngineSampling,
        *,
        rid: str,
        origin: CallOrigin,
        stream: bool,
    ) -> AsyncGenerator[EngineChunk]:
        client = self._serving()
        if sampling.adapter in self._lost_adapters:
            raise EngineUnavailable(
                f"The engine was started again without the adapter {sampling.adapter!r}: load it again."
            )
        chunks = client.generate(input_ids, sampling, rid=rid, origin=origin, stream=stream)
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
        except EngineUnavailable as error:
            if self._client is None:
                raise self.process.unavailable() from error
            raise

    def forget(self, episode_id: str) -> None:
        if self._client is not None:
            self._client.forget(episode_id)

    async def abort(self, rid: str) -> None:
        if self._client is not None:  # else the call ended with its process
            await self._client.abort(rid)

    async def score(self, input_ids: Int32Array, start: int, temperature: float) -> Float32Array:
        return await self._serving().score(input_ids, start, temperature)

    async def state(self) -> EngineState:
        client = self._client
        if client is None:
            down = self.process.down
            gone = down is not None and down.restart_in_s is None
            return EngineState(False, None, None, self.process.unavailable().message, gone=gone)
        state = await client.state()
        if state.ok and not self._fence:
            self._served = state.weight_version
        return state

    async def load(self) -> EngineLoad | None:
        return await self._answering().load()

    async def pause(self, mode: PauseMode) -> None:
        await self._answering().pause(mode)
        self._paused = mode

    async def resume(self) -> None:
        await self._answering().resume()
        self._paused = None

    async def update_weights(self, path: str, version: str, mode: PauseMode = "retract") -> None:
        client = self._answering()
        await client.update_weights(path, version, mode)
        self._loaded(client, version)

    async def begin_update(self, way: UpdateWay) -> None:
        client = self._answering()
        await client.begin_update(way)
        self._updated = client

    async def load_bucket(self, bucket: WeightBucket) -> None:
        await self._updating().load_bucket(bucket)

    async def end_update(self, version: str) -> None:
        client = self._updating()
        await client.end_update(version)
        self._loaded(client, version)

    def _updating(self) -> Engine:
        client = self._answering()
        if self._updated not in (None, client):
            raise EngineUnavailable(
                "The engine was started again in the middle of the update, and has none of its pieces: begin the "
                "update again."
            )
        return client

    def _loaded(self, client: Engine, version: str) -> None:
        self._served = version
        if client is self._client:
            self._fence = ""

    async def join_group(self, group: WeightGroup) -> None:
        await self._answering().join_group(group)

    async def leave_group(self, name: str) -> None:
        await self._answering().leave_group(name)

    async def load_adapter(self, name: str, path: str) -> None:
        await self._answering().load_adapter(name, path)
        self._adapters.add(name)
        self._lost_adapters.discard(name)

    async def unload_adapter(self, name: str) -> None:
        if name not in self._lost_adapters:
            await self._answering().unload_adapter(name)
        self._adapters.discard(name)
        self._lost_adapters.discard(name)

    async def sleep(self) -> None:
        await self._answering().sleep()
        self._asleep = True

    async def wake(self) -> None:
        await self._answering().wake()
        self._asleep = False


def create(
    context: EngineContext,
    launch: LaunchSettings,
    client: Create,
    tell: Callable[[str], None] | None,
    replica: int = 0,
) -> LaunchedEngine:
    """The engine of ``--launch``. Raises StartupError where the settings cannot be."""
    if context.settings.url is not None or context.settings.urls:
        raise StartupError("--launch starts an engine, --engine-url attaches to one that runs: give one of them.")
    if sys.platform != "linux":
        raise StartupError("--launch needs Linux, where the engine ends with the server: start it yourself.")
    return LaunchedEngine(context, launch, client, tell, replica)
