"""The single engine of ``--launch``: what its restarts mean for calls, pauses and weights."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch_support import Toy, engine_settings

from bounded import bounded
from turnstile.models import Int32Array, WeightSpan
from turnstile_server.engines.launch.launched import LaunchedEngine
from turnstile_server.engines.protocol import (
    CallOrigin,
    Engine,
    EngineCapabilities,
    EngineChunk,
    EngineContext,
    EngineFinish,
    EngineSampling,
    EngineState,
)
from turnstile_server.engines.registry import create_engine
from turnstile_server.engines.weights import UpdateWay
from turnstile_server.errors import EngineUnavailable, StartupError
from turnstile_server.settings import EngineSettings
from waiting import wait_until

pytestmark = pytest.mark.anyio
PROMPT = np.arange(5, dtype=np.int32)


@asynccontextmanager
async def launched(toy: Toy, model: Path, **changes: Any) -> AsyncIterator[LaunchedEngine]:
    engine = create_engine(engine_settings(), model, None, toy.launch(**changes))
    assert isinstance(engine, LaunchedEngine)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def call(engine: LaunchedEngine, tokens: int = 3, adapter: str | None = None) -> EngineChunk:
    sampling = EngineSampling(max_new_tokens=tokens, adapter=adapter)
    chunks = engine.generate(PROMPT, sampling, rid="call", origin=CallOrigin("e"), stream=False)
    [chunk] = [chunk async for chunk in chunks]
    return chunk


async def killed(engine: LaunchedEngine) -> None:
    """Returns when the engine is not reached any more."""
    assert engine.process.pid is not None
    os.kill(engine.process.pid, signal.SIGKILL)
    await wait_until(lambda: engine.process.down is not None)


async def answers_again(engine: LaunchedEngine) -> None:
    async def reached() -> bool:
        return (await engine.state()).weight_version is not None

    await wait_until(reached)


@pytest.mark.slow
async def test_it_samples_and_serves_again_after_a_restart_with_the_same_weights(
    toy: Toy, tiny_model: Path
) -> None:
    async with launched(toy, tiny_model, backoff_start_s=0.5) as engine:
        assert (await call(engine)).weight_version == "default"
        assert engine.capabilities.context_length == 4096
        await killed(engine)
        with pytest.raises(EngineUnavailable, match=r"SIGKILL. It is started again in 0.5 s") as caught:
            await call(engine)
        assert caught.value.retry_after_s == 0.5
        state = await engine.state()
        assert (state.ok, state.weight_version) == (False, None)
        assert "SIGKILL" in state.detail
        await answers_again(engine)
        assert (await call(engine)).weight_version == "default"


async def test_a_call_in_flight_fails_when_the_process_ends(toy: Toy, tiny_model: Path) -> None:
    async with launched(toy, tiny_model, backoff_start_s=60.0) as engine:
        waiting = asyncio.create_task(call(engine, tokens=1000))
        await wait_until((toy.folder / "generating").exists)
        await killed(engine)
        with pytest.raises(EngineUnavailable):
            await waiting


@pytest.mark.slow
async def test_weights_that_a_restart_lost_are_not_replaced_in_silence(toy: Toy, tiny_model: Path) -> None:
    async with launched(toy, tiny_model) as engine:
        await engine.update_weights("/weights/2", "v2")
        assert (await call(engine)).weight_version == "v2"
        for _ in range(2):  # a second restart does not make the first weights the right ones
            await killed(engine)
            await answers_again(engine)
            with pytest.raises(EngineUnavailable, match=r"first weights \(default\), not v2: load weights"):
                await call(engine)
            with pytest.raises(EngineUnavailable, match="not v2"):
                await engine.score(PROMPT, 1, 1.0)
            state = await engine.state()
            assert (state.ok, state.weight_version) == (True, "default"), (
                "a fleet sees what it has, and reloads it"
            )
        await engine.update_weights("/weights/2", "v2")
        assert (await call(engine)).weight_version == "v2"
        assert (await engine.state()).ok


@pytest.mark.slow
async def test_a_pause_outlives_a_restart(toy: Toy, tiny_model: Path) -> None:
    async with launched(toy, tiny_model) as engine:
        await engine.pause("retract")
        (toy.folder / "posts").unlink()
        await killed(engine)
        await answers_again(engine)
        assert toy.lines("posts") == ['/pause_generation {"mode": "retract"}']
        assert (await engine.state()).paused
        await engine.resume()
        assert (await call(engine)).weight_version == "default"


class Client(Engine):
    """A client of an engine with adapters, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(context_length=64, vocab_size=64, model_name="toy")

    async def generate(
        self, input_ids: Int32Array, sampling: EngineSampling, *, rid: str, origin: CallOrigin, stream: bool
    ) -> AsyncGenerator[EngineChunk]:
        finish = EngineFinish("length", None, (WeightSpan(start=0, end=1, version="default"),))
        yield EngineChunk(np.full(1, 7, np.int32), np.full(1, -0.5, np.float32), finish, "default")

    async def abort(self, rid: str) -> None:
        self.asked.append(rid)

    async def state(self) -> EngineState:
        return EngineState(ok=True, weight_version="default", paused=False)

    async def load_adapter(self, name: str, path: str) -> None:
        self.asked.append(f"load {name}")

    async def sleep(self) -> None:
        self.asked.append("sleep")

    async def begin_update(self, way: UpdateWay) -> None:
        self.asked.append(f"begin {way}")

    async def end_update(self, version: str) -> None:
        self.asked.append(f"end {version}")


@asynccontextmanager
async def with_clients(toy: Toy, model: Path) -> AsyncIterator[tuple[LaunchedEngine, list[Client]]]:
    clients: list[Client] = []

    def create(context: EngineContext) -> Client:
        assert context.settings.url is not None
        clients.append(Client())
        return clients[-1]

    engine = LaunchedEngine(EngineContext(engine_settings(), model, None), toy.launch(), create)
    try:
        await engine.start()
        yield engine, clients
    finally:
        await engine.close()


async def test_adapters_that_a_restart_lost_are_refused_until_loaded_again(toy: Toy, tiny_model: Path) -> None:
    async with with_clients(toy, tiny_model) as (engine, clients):
        await engine.load_adapter("policy-a", "/adapters/a")
        assert (await call(engine, adapter="policy-a")).finish is not None
        await killed(engine)
        await answers_again(engine)
        assert (await call(engine)).finish is not None
        with pytest.raises(EngineUnavailable, match="without the adapter 'policy-a': load it again"):
            await call(engine, adapter="policy-a")
        await engine.load_adapter("policy-a", "/adapters/a")
        assert (await call(engine, adapter="policy-a")).finish is not None
        assert [client.asked for client in clients] == [["load policy-a"]] * 2


@pytest.mark.slow
async def test_an_engine_that_slept_sleeps_again_after_a_restart(toy: Toy, tiny_model: Path) -> None:
    async with with_clients(toy, tiny_model) as (engine, clients):
        await engine.sleep()
        await killed(engine)
        await answers_again(engine)
        assert [client.asked for client in clients] == [["sleep"], ["sleep"]]


async def test_an_update_that_a_restart_cut_leaves_no_weights_to_be_taken_for_the_right_ones(
    toy: Toy, tiny_model: Path
) -> None:
    async with with_clients(toy, tiny_model) as (engine, clients):
        await engine.begin_update("tensors")
        await killed(engine)
        await answers_again(engine)
        with pytest.raises(EngineUnavailable, match="begin the update again"):
            await engine.end_update("v2")
        await engine.begin_update("tensors")
        await engine.end_update("v2")
        assert (await call(engine)).finish is not None
        assert clients[1].asked == ["begin tensors", "end v2"]


@pytest.mark.slow
async def test_a_restarted_engine_that_is_no_use_is_given_up_with_the_reason(toy: Toy, tiny_model: Path) -> None:
    async with launched(toy, tiny_model, max_restarts=1) as engine:
        toy.behave("nameless")
        await killed(engine)
        await wait_until(lambda: engine.process.down is not None and engine.process.down.restart_in_s is None)
        with pytest.raises(EngineUnavailable, match=r"does not name its weights .* launch.max_restarts"):
            await call(engine)
        assert len(toy.starts) == 2


@pytest.mark.slow
async def test_an_engine_whose_client_cannot_start_is_ended(toy: Toy, tiny_model: Path) -> None:
    toy.behave("nameless")
    with pytest.raises(StartupError, match="does not name its weights"):
        async with launched(toy, tiny_model):
            pass
    assert toy.left() == []


async def test_no_engine_is_started_again_after_close(toy: Toy, tiny_model: Path) -> None:
    async with launched(toy, tiny_model, backoff_start_s=60.0) as engine:
        await killed(engine)
    assert len(toy.starts) == 1
    with pytest.raises(EngineUnavailable):
        await call(engine)
    await engine.close()


@pytest.mark.parametrize(
    ("engine", "launch", "reason"),
    [
        ({"kind": "sglang", "url": "http://x"}, {}, "--launch starts an engine, --engine-url attaches"),
        ({"kind": "embedded"}, {}, "--engine embedded is none"),
        ({"kind": "trainer"}, {}, "--engine trainer is none"),
        ({"kind": "sglang"}, {"arguments": ("--host", "0.0.0.0")}, "--host"),
    ],
)
async def test_what_cannot_be_launched_is_refused(
    toy: Toy, tiny_model: Path, engine: dict[str, Any], launch: dict[str, Any], reason: str
) -> None:
    with pytest.raises(StartupError) as caught:
        create_engine(bounded(EngineSettings, **engine), tiny_model, None, toy.launch(**launch))
    assert reason in caught.value.message
