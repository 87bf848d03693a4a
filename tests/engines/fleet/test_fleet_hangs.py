"""Workers that hang: nothing breaks, and nothing comes any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import anyio
import numpy as np
import pytest
from fleet_support import QUICK, Said, ToldEngine, running, statuses

from bounded import rebounded
from turnstile_server.engines.fleet.call import FleetCall
from turnstile_server.engines.fleet.limit import WorkerLimit
from turnstile_server.engines.fleet.window import EpisodeWindow
from turnstile_server.engines.fleet.worker import Worker
from turnstile_server.engines.protocol import CallOrigin, EngineChunk, EngineLoad
from turnstile_server.errors import EngineUnavailable
from waiting import wait_until

pytestmark = pytest.mark.anyio

HURRY = rebounded(QUICK, health_timeout_s=0.05, health_failures=2, hang_s=0.2)


HOW = ["hangs", "deaf", "stuck_at"]


def hang(engine: ToldEngine, how: str) -> None:
    setattr(engine, how, anyio.current_time() if how == "stuck_at" else True)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_without_a_token_leaves_a_worker_that_hangs(how: str, stream: bool) -> None:
    engines, said = [ToldEngine("v0"), ToldEngine("v0")], Said()
    async with running(*engines, settings=HURRY) as fleet, anyio.create_task_group() as tasks:
        for engine in engines:
            engine.step_s = 0.05
        tasks.start_soon(lambda: said.run(fleet, 3, stream=stream))
        await wait_until(lambda: any(engine.running for engine in engines))
        stuck = next(engine for engine in engines if engine.running)
        hang(stuck, how)
        await wait_until(lambda: said.finish is not None)
        assert said.ids == [7] * 3
        assert sorted(statuses(fleet)) == ["down", "serving"]
        assert fleet.calls.counts.failed_over == 1
        assert not stuck.running, "its connection was closed"


@pytest.mark.parametrize("how", HOW)
async def test_a_call_whose_tokens_left_fails_with_a_worker_that_hangs(how: str) -> None:
    engine, said = ToldEngine(), Said()
    async with running(engine, ToldEngine(), settings=HURRY) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said.run(fleet, 50_000))
        await said.begun.wait()
        stuck = engine if engine.running else fleet.roster.workers[1].engine
        assert isinstance(stuck, ToldEngine)
        hang(stuck, how)
        await wait_until(lambda: said.error is not None)
        assert isinstance(said.error, EngineUnavailable)
        assert "hangs" in said.error.message


async def test_a_worker_that_is_slow_to_say_how_it_is_keeps_the_calls_that_it_serves() -> None:
    """Its health is not told in time, but tokens come: it gets no further calls, and loses none."""
    engine, said = ToldEngine(step_s=0.01), Said()
    async with running(engine, settings=HURRY) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said.run(fleet, 60))
        await said.begun.wait()
        engine.state = anyio.sleep_forever  # type: ignore[method-assign,assignment]
        await wait_until(lambda: statuses(fleet) == ["down"])
        await wait_until(lambda: said.finish is not None)
        assert (said.error, len(said.ids)) == (None, 60)


@pytest.mark.parametrize("how", HOW)
async def test_a_worker_that_comes_back_serves_again(how: str) -> None:
    engine, said = ToldEngine(), Said()
    settings = HURRY.model_copy(update={"no_worker_s": 20.0})
    async with running(engine, settings=settings) as fleet, anyio.create_task_group() as tasks:
        hang(engine, how)
        tasks.start_soon(lambda: said.run(fleet, 3))
        await wait_until(lambda: statuses(fleet) == ["down"])
        await anyio.sleep(0.2)
        assert statuses(fleet) == ["down"], "it takes requests, which is not enough"
        setattr(engine, how, None if how == "stuck_at" else False)
        await wait_until(lambda: said.finish is not None)
        assert (said.ids, statuses(fleet)) == ([7] * 3, ["serving"])


async def test_an_engine_that_loads_new_weights_is_not_taken_for_one_that_hangs() -> None:
    engine, said = ToldEngine(), Said()
    async with running(engine, settings=HURRY) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said.run(fleet, 50))
        await said.begun.wait()
        async with fleet.roster.lock:  # an update is under way
            engine.deaf = True
            await anyio.sleep(0.5)
        engine.deaf = False
        assert statuses(fleet) == ["serving"]
        tasks.cancel_scope.cancel()


async def test_an_engine_that_said_nothing_while_it_was_idle_does_not_hang() -> None:
    """Its scheduler slept for want of calls: what it said last is old when the next one comes."""
    engine, said = ToldEngine(step_s=0.01), Said()
    engine.told_load = EngineLoad(0, 0, 0.0, 0, age_s=600.0)
    patient = HURRY.model_copy(update={"hang_s": 0.5})
    async with running(engine, settings=patient) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said.run(fleet, 40))
        await said.begun.wait()
        await anyio.sleep(0.1)
        engine.told_load = EngineLoad(1, 0, 0.1, 0, age_s=0.0)
        await wait_until(lambda: said.finish is not None)
        assert statuses(fleet) == ["serving"]


async def test_an_engine_that_was_paused_for_long_does_not_hang() -> None:
    """Its scheduler says nothing while it is paused, and is asked again before it has said more."""
    engine, said = ToldEngine(step_s=0.01), Said()
    patient = HURRY.model_copy(update={"hang_s": 0.3})
    async with running(engine, settings=patient) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said.run(fleet, 60))
        await said.begun.wait()
        await fleet.pause("in_place")
        engine.told_load = EngineLoad(1, 0, 0.1, 0, age_s=600.0)
        await anyio.sleep(0.6)
        assert statuses(fleet) == ["serving"]
        await fleet.resume()
        await anyio.sleep(0.1)
        engine.told_load = EngineLoad(1, 0, 0.1, 0, age_s=0.0)
        await wait_until(lambda: said.finish is not None)
        assert (said.error, len(said.ids)) == (None, 60)


async def test_calls_wait_in_an_engine_that_answers_nobody_while_it_loads_weights() -> None:
    engine, said = ToldEngine(), Said()
    async with running(engine, settings=HURRY) as fleet, anyio.create_task_group() as tasks:
        engine.step_s = 0.3
        tasks.start_soon(lambda: said.run(fleet, 3))
        await wait_until(lambda: engine.running)
        state = engine.state
        async with fleet.roster.lock:  # an update is under way
            engine.state = anyio.sleep_forever  # type: ignore[method-assign,assignment]
            await wait_until(lambda: statuses(fleet) == ["down"])
            await anyio.sleep(0.2)
        engine.state = state  # type: ignore[method-assign]
        await wait_until(lambda: said.finish is not None)
        assert (said.error, said.ids, fleet.calls.counts.failed_over) == (None, [7] * 3, 0)


class Silent:
    """A part whose worker says nothing; ``ending``: what it raises in place of a cancellation."""

    def __init__(self, ending: BaseException | None = None) -> None:
        self.call = FleetCall("r", CallOrigin("e"))
        self.cancellations: int | None = None
        """Of its task that were not taken back."""
        self._ending = ending
        self._worker = Worker(
            "w1", None, ToldEngine(), WorkerLimit(start=1, floor=1, ceiling=1), EpisodeWindow(floor=1, idle_s=1.0)
        )

    async def chunks(self) -> AsyncGenerator[EngineChunk]:
        try:
            await anyio.sleep_forever()
        except asyncio.CancelledError:
            if self._ending is not None:
                raise self._ending from None
            raise
        yield EngineChunk(np.empty(0, np.int32), np.empty(0, np.float32))

    async def hear(self) -> EngineChunk | None:
        task = asyncio.current_task()
        assert task is not None
        try:
            return await self.call.hear(self._worker, self.chunks())
        finally:
            self.cancellations = task.cancelling()


@pytest.mark.parametrize("ending", [None, ValueError("something else")])
async def test_a_wait_that_is_given_up_leaves_no_cancellation_behind(ending: Exception | None) -> None:
    silent = Silent(ending)
    waiting = asyncio.create_task(silent.hear())
    await asyncio.sleep(0)
    silent.call.give_up_silent(anyio.current_time())
    silent.call.give_up_silent(anyio.current_time())
    with pytest.raises(EngineUnavailable if ending is None else ValueError):
        await waiting
    assert silent.cancellations == 0


@pytest.mark.parametrize("how", ["task", "scope"])
@pytest.mark.parametrize("first", ["caller", "worker"])
async def test_a_caller_that_leaves_while_its_worker_is_given_up_is_cancelled(how: str, first: str) -> None:
    silent, scope = Silent(), anyio.CancelScope()

    async def play() -> None:
        with scope:
            await silent.hear()
        assert scope.cancelled_caught
        raise asyncio.CancelledError

    waiting = asyncio.create_task(play())
    await asyncio.sleep(0)
    leave = waiting.cancel if how == "task" else scope.cancel
    for end in (leave, lambda: silent.call.give_up_silent(anyio.current_time()))[
        :: 1 if first == "caller" else -1
    ]:
        end()
    await asyncio.wait({waiting})
    if (how, first) == ("scope", "worker"):  # a scope cancels at the next wait, and there is none
        assert isinstance(waiting.exception(), EngineUnavailable)
    else:
        assert waiting.cancelled()
