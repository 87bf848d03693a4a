"""Engines for tests of the fleet: each does what its test tells it, and notes what was asked of it.

All times are those of a clock that jumps (``JumpingLoop``): a short limit is tripped by no busy machine, and a
sleep says exactly how much of the fleet's time passes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np

from bounded import bounded
from turnstile.models import Int32Array, PauseMode, WeightSpan
from turnstile_server.engines.fleet.fleet import Fleet
from turnstile_server.engines.protocol import (
    CallOrigin,
    Engine,
    EngineCapabilities,
    EngineChunk,
    EngineFinish,
    EngineLoad,
    EngineSampling,
    EngineState,
)
from turnstile_server.engines.versions import WeightVersions
from turnstile_server.engines.weights import UpdateWay, WeightBucket
from turnstile_server.errors import EngineRefused, EngineUnavailable, TurnstileError
from turnstile_server.settings import EngineSettings, FleetSettings

PROMPT = np.arange(4, dtype=np.int32)


class ToldEngine(Engine):
    """Samples id 7 once per ``step_s``, ``tokens_per_step`` at a time, until the call's limit; a pause holds it,
    an abort cuts it. ``fails[name]``: the error that the method of that name raises."""

    def __init__(self, version: str = "v0", *, step_s: float = 0.001) -> None:
        self.can = EngineCapabilities(4096, 100, "told", adapters=True)
        self.version: str | None = version
        self.step_s = step_s
        self.fails: dict[str, TurnstileError] = {}
        self.adapters: dict[str, str] = {}
        self.said: list[tuple[Any, ...]] = []
        self.dead = False
        self.pause_s = 0.0
        """Time of a pause, which takes effect at once."""
        self.hangs = False
        """Nothing is answered any more, and no connection breaks."""
        self.deaf = False
        """Its scheduler stands still; what needs no scheduler is answered."""
        self.stuck_at: float | None = None
        """Its scheduler stands still since then; what it said last is told for as long."""
        self.told_load: EngineLoad | None = None
        self.running: dict[str, anyio.Event] = {}
        self.sampled = 0
        """Tokens, of all calls."""
        self.paused = False
        self.closed = False

    @property
    def capabilities(self) -> EngineCapabilities:
        return self.can

    def _said(self, name: str, *what: Any) -> None:
        self.said.append((name, *what))
        if self.dead:
            raise EngineUnavailable("it is dead")
        if name in self.fails:
            raise self.fails[name]

    async def start(self) -> None:
        self._said("start")

    async def close(self) -> None:
        self.closed = True
        self.dead = True  # its connections are closed

    async def generate(
        self, input_ids: Int32Array, sampling: EngineSampling, *, rid: str, origin: CallOrigin, stream: bool
    ) -> AsyncGenerator[EngineChunk, None]:
        self._said("generate", rid, len(input_ids), sampling.max_new_tokens)
        aborted = self.running[rid] = anyio.Event()
        count, kept = 0, []
        versions: list[str] = []
        try:
            while count < sampling.max_new_tokens and not aborted.is_set():
                await anyio.sleep(self.step_s)
                if self.hangs or self.deaf or self.stuck_at is not None:
                    await anyio.sleep_forever()
                if self.dead:
                    raise EngineUnavailable("The connection to the engine broke")
                if self.paused or aborted.is_set():
                    continue
                count += 1
                self.sampled += 1
                versions.append(str(self.version))
                if stream:
                    yield EngineChunk(np.array([7], np.int32), np.array([-0.5], np.float32), None, self.version)
                else:
                    kept.append(7)
        finally:
            del self.running[rid]
        spans = []
        for position, version in enumerate(versions):
            if spans and spans[-1].version == version:
                spans[-1] = spans[-1].model_copy(update={"end": position + 1})
            else:
                spans.append(WeightSpan(start=position, end=position + 1, version=version))
        reason = "abort" if aborted.is_set() and count < sampling.max_new_tokens else "length"
        finish = EngineFinish(reason, None, tuple(spans), cached_tokens=0)  # type: ignore[arg-type]
        yield EngineChunk(np.array(kept, np.int32), np.full(len(kept), -0.5, np.float32), finish)

    async def abort(self, rid: str) -> None:
        if rid in self.running:
            self.running[rid].set()

    async def state(self) -> EngineState:
        if self.hangs:
            await anyio.sleep_forever()
        if self.dead:
            return EngineState(False, None, None, "it is dead")
        return EngineState(True, self.version, self.paused)

    async def load(self) -> EngineLoad | None:
        self._said("load")
        if self.hangs or self.deaf:
            await anyio.sleep_forever()
        if self.stuck_at is not None:
            return EngineLoad(1, 0, 0.1, 0, age_s=anyio.current_time() - self.stuck_at)
        return self.told_load

    async def pause(self, mode: PauseMode) -> None:
        self._said("pause", mode)
        self.paused = True
        await anyio.sleep(self.pause_s)
        if mode == "abort":
            for aborted in self.running.values():
                aborted.set()

    async def resume(self) -> None:
        self._said("resume")
        self.paused = False

    async def update_weights(self, path: str, version: str, mode: PauseMode = "retract") -> None:
        assert self.paused, "weights are loaded while it is paused only"
        self._said("update_weights", path, version, mode)
        self.version = version

    async def begin_update(self, way: UpdateWay) -> None:
        self._said("begin_update", way)
        if way == "trainer":
            self.version = None  # what it has is not known until the end

    async def load_bucket(self, bucket: WeightBucket) -> None:
        self._said("load_bucket")
        self.version = None

    async def end_update(self, version: str) -> None:
        self._said("end_update", version)
        self.version = version

    async def load_adapter(self, name: str, path: str) -> None:
        self._said("load_adapter", name, path)
        if name in self.adapters:
            raise EngineRefused("it is loaded already")
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        self._said("unload_adapter", name)
        self.adapters.pop(name, None)

    async def sleep(self) -> None:
        self._said("sleep")

    async def wake(self) -> None:
        self._said("wake")
        self.version = None

    def asked(self, name: str) -> list[tuple[Any, ...]]:
        """What was asked of the method ``name``."""
        return [said[1:] for said in self.said if said[0] == name]


QUICK = bounded(
    FleetSettings,
    health_interval_s=0.02,
    load_interval_s=0.02,
    catch_up_s=0.02,
    move_after_s=0.0,
    no_worker_s=0.5,
    start_calls=64,
)


def fleet_of(*engines: Engine, settings: FleetSettings = QUICK, **options: Any) -> Fleet:
    """A fleet that is not started."""
    first = [(f"http://{number}", engine) for number, engine in enumerate(engines)]
    return Fleet(first, EngineSettings(kind="sglang"), settings, WeightVersions(), **options)


@asynccontextmanager
async def running(*engines: Engine, settings: FleetSettings = QUICK, **options: Any) -> AsyncIterator[Fleet]:
    """A started fleet that watches its workers."""
    fleet = fleet_of(*engines, settings=settings, **options)
    await fleet.start()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.watch)
        try:
            with anyio.fail_after(20):
                yield fleet
        finally:
            tasks.cancel_scope.cancel()
    await fleet.close()


def statuses(fleet: Fleet) -> list[str]:
    return [worker.status for worker in fleet.roster.workers]


class Said:
    """One call through a fleet, as its caller sees it."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.finish: EngineFinish | None = None
        self.error: TurnstileError | None = None
        self.given_up = 0
        self.begun = anyio.Event()

    @property
    def versions(self) -> list[str]:
        """The weights of each token."""
        assert self.finish is not None
        return [span.version for span in self.finish.weight_spans for _ in range(span.start, span.end)]

    async def run(
        self,
        fleet: Fleet,
        tokens: int,
        *,
        rid: str = "call",
        stream: bool = True,
        episode: str = "ep",
        begun_at: int = 1,
        **sampling: Any,
    ) -> None:
        wanted = EngineSampling(max_new_tokens=tokens, **sampling)
        try:
            async for chunk in fleet.generate(PROMPT, wanted, rid=rid, origin=CallOrigin(episode), stream=stream):
                assert self.finish is None
                self.ids += chunk.ids.tolist()
                self.given_up += chunk.given_up
                self.finish = chunk.finish
                if len(self.ids) >= begun_at:
                    self.begun.set()
        except TurnstileError as error:
            self.error = error
