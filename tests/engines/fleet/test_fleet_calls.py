"""A fleet of engines that do what the test tells them: calls that wait, are cut, continued and sent again."""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest
from fleet_support import QUICK, Said, ToldEngine, running, statuses

from bounded import rebounded
from turnstile_server.engines.fleet.bounds import FleetBounds
from turnstile_server.engines.protocol import EngineLoad
from turnstile_server.errors import (
    EngineUnavailable,
    TooManyCalls,
)
from waiting import wait_until

pytestmark = pytest.mark.anyio


# Cut and continued


@pytest.mark.parametrize("stream", [True, False])
async def test_a_generation_that_a_pause_aborts_goes_on_with_its_own_tokens_and_the_new_weights(
    stream: bool,
) -> None:
    engine, said = ToldEngine(), Said()
    async with running(engine) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said.run(fleet, 60, stream=stream))
        await wait_until(lambda: engine.sampled >= 10)
        await fleet.pause("abort")
        await fleet.load_weights("/v1", "v1", "abort")
        await anyio.sleep(0.02)
        assert said.finish is None, "the caller notices nothing but time"
        await fleet.resume()
    assert said.error is None
    assert said.finish is not None
    assert (said.ids, said.finish.reason) == ([7] * 60, "length")
    cut = said.versions.index("v1")
    assert 0 < cut < 60
    assert said.versions == ["v0"] * cut + ["v1"] * (60 - cut)
    first, second = engine.asked("generate")
    assert second[1:] == (4 + cut, 60 - cut), "the prompt has every token so far, the budget is what is left"
    assert not second[0].startswith(first[0]), "SGLang aborts by prefix"
    assert fleet.calls.counts.resumed == 1


async def test_an_unstreamed_caller_has_the_tokens_of_a_cut_part_also_when_the_call_fails_later() -> None:
    """So that it can account for them: they were sampled."""
    engine, said = ToldEngine(), Said()
    async with running(engine) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said.run(fleet, 100_000, stream=False))
        await wait_until(lambda: engine.sampled >= 10)
        await fleet.pause("abort")
        await wait_until(lambda: said.ids)
        engine.fails["generate"] = EngineUnavailable("it broke")
        await fleet.resume()
    assert isinstance(said.error, EngineUnavailable)
    assert 0 < len(said.ids) < 1000


async def test_tokens_that_a_call_with_a_format_gives_up_are_told() -> None:
    engine, said = ToldEngine(), Said()
    async with running(engine) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said.run(fleet, 60, stream=False, json_schema="{}"))
        await wait_until(lambda: engine.sampled >= 10)
        await fleet.pause("abort")
        await fleet.resume()
    assert said.ids == [7] * 60
    assert said.given_up > 0


async def test_a_call_with_a_format_goes_on_where_the_engine_follows_the_grammar() -> None:
    engine, said = ToldEngine(), Said()
    engine.can = replace(engine.can, resumes_grammars=True)
    async with running(engine) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said.run(fleet, 60, json_schema="{}"))
        await said.begun.wait()
        await fleet.pause("abort")
        await fleet.resume()
    assert (said.error, said.ids, said.given_up) == (None, [7] * 60, 0)
    assert len(engine.asked("generate")) == 2


async def test_with_keep_a_generation_that_is_cut_ends_with_what_it_has() -> None:
    engine, said = ToldEngine(), Said()
    keep = QUICK.model_copy(update={"on_abort": "keep"})
    async with running(engine, settings=keep) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said.run(fleet, 600))
        await said.begun.wait()
        await fleet.pause("abort")
        await wait_until(lambda: said.finish is not None)
    assert said.finish is not None
    assert (said.finish.reason, said.finish.kept) == ("abort", True)
    assert 0 < len(said.ids) < 600


async def test_a_generation_is_resumed_a_bounded_number_of_times() -> None:
    engine, said = ToldEngine(), Said()
    twice = rebounded(QUICK, max_resumes=2)
    async with running(engine, settings=twice) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said.run(fleet, 100_000))
        await said.begun.wait()
        while said.finish is None:
            await fleet.pause("abort")
            await fleet.resume()
            before = engine.sampled
            await wait_until(lambda before=before: engine.sampled > before or said.finish)
    assert said.finish is not None
    assert said.finish.kept
    assert len(engine.asked("generate")) == 3


async def test_a_caller_that_aborts_gets_what_was_sampled_and_nothing_is_continued() -> None:
    engine, said = ToldEngine(), Said()
    async with running(engine) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said.run(fleet, 100_000, begun_at=5))
        await said.begun.wait()
        await fleet.abort("call")
        await wait_until(lambda: said.finish is not None)
    assert said.finish is not None
    assert (said.finish.reason, said.finish.kept) == ("abort", False)
    assert len(said.ids) >= 5
    assert len(engine.asked("generate")) == 1
    assert fleet.roster.workers[0].calls == 0


async def test_a_call_that_waits_can_be_aborted() -> None:
    engine, said = ToldEngine(), Said()
    async with running(engine) as fleet, anyio.create_task_group() as tasks:
        await fleet.pause("retract")
        tasks.start_soon(lambda: said.run(fleet, 5))
        await wait_until(lambda: fleet.calls.waiting == 1)
        await fleet.abort("call")
        await wait_until(lambda: said.finish is not None)
        assert fleet.calls.waiting == 0
    assert said.finish is not None
    assert (said.finish.reason, said.ids) == ("abort", [])
    assert engine.asked("generate") == []


# Pauses


async def test_calls_that_come_during_a_pause_wait_however_long_it_lasts() -> None:
    engine, said = ToldEngine(), Said()
    impatient = QUICK.model_copy(update={"no_worker_s": 0.01})
    async with running(engine, settings=impatient) as fleet, anyio.create_task_group() as tasks:
        await fleet.pause("retract")
        tasks.start_soon(lambda: said.run(fleet, 5))
        await anyio.sleep(0.1)
        state = await fleet.state()
        assert (state.paused, state.waiting_calls, engine.asked("generate")) == (True, 1, [])
        assert state.paused_s is not None
        assert state.paused_s > 0.05
        assert fleet.held_s is not None
        await fleet.resume()
    assert said.ids == [7] * 5
    assert fleet.held_s is None


@pytest.mark.parametrize("how", ["pause", "update"])
async def test_a_pause_whose_trainer_is_gone_before_its_end_pauses_nothing(how: str) -> None:
    engine, slow, said = ToldEngine(), ToldEngine(), Said()
    slow.pause_s = 30.0
    async with running(engine, slow) as fleet:
        with anyio.move_on_after(0.1) as gone:
            await (fleet.pause("retract") if how == "pause" else fleet.load_weights("/v1", "v1", "retract"))
        assert gone.cancelled_caught
        assert (engine.paused, slow.paused, fleet.roster.held) == (False, False, False)
        await said.run(fleet, 5)
    assert said.ids == [7] * 5


async def test_a_pause_outlives_an_update_that_happens_in_it() -> None:
    engine = ToldEngine()
    async with running(engine) as fleet:
        await fleet.pause("retract")
        await fleet.load_weights("/v1", "v1", "retract")
        state = await fleet.state()
        assert (state.paused, state.weight_version, engine.paused) == (True, "v1", True)
        await fleet.resume()
        assert not engine.paused


# Failures


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_of_which_no_token_has_left_goes_to_another_worker(stream: bool) -> None:
    engines = ToldEngine(step_s=0.2), ToldEngine(step_s=0.2)
    said = Said()
    async with running(*engines) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said.run(fleet, 2, stream=stream))
        await wait_until(lambda: any(engine.running for engine in engines))
        victim = next(engine for engine in engines if engine.running)
        victim.dead = True
    assert said.error is None
    assert said.ids == [7, 7]
    assert fleet.calls.counts.failed_over == 1
    assert sorted(statuses(fleet)) == ["down", "serving"]


async def test_a_call_of_which_tokens_have_left_fails_with_its_worker() -> None:
    engines, said = (ToldEngine(), ToldEngine()), Said()
    async with running(*engines) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said.run(fleet, 100_000))
        await said.begun.wait()
        next(engine for engine in engines if engine.running).dead = True
    assert isinstance(said.error, EngineUnavailable)
    assert len(said.ids) > 0
    assert fleet.calls.counts.failed_over == 0


async def test_calls_wait_for_a_worker_that_comes_back_and_fail_when_none_does() -> None:
    engine, early, late = ToldEngine(), Said(), Said()
    async with running(engine) as fleet:
        engine.dead = True
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: early.run(fleet, 3))
            await wait_until(lambda: statuses(fleet) == ["down"])
            engine.dead = False
        assert early.ids == [7] * 3
        engine.dead = True
        await late.run(fleet, 3)
    assert isinstance(late.error, EngineUnavailable)
    assert "it is dead" in late.error.message


async def test_a_worker_that_flaps_is_tried_a_bounded_number_of_times() -> None:
    engine, said = ToldEngine(), Said()
    async with running(engine) as fleet:
        engine.fails["generate"] = EngineUnavailable("it broke again")
        await said.run(fleet, 3)
    assert isinstance(said.error, EngineUnavailable)
    assert len(engine.asked("generate")) == 1 + FleetBounds().failovers


async def test_an_engine_that_says_it_is_full_lives_and_is_given_less() -> None:
    engine, said = ToldEngine(), Said()
    engine.told_load = EngineLoad(1, 0, 0.1, 0)
    async with running(engine) as fleet, anyio.create_task_group() as tasks:
        before = fleet.roster.workers[0].limit.value
        engine.fails["generate"] = EngineUnavailable("full", detail={"engine_status": 503})
        tasks.start_soon(lambda: said.run(fleet, 3))
        await wait_until(lambda: engine.asked("generate"))
        engine.fails.clear()
        await wait_until(lambda: said.finish is not None)
        assert statuses(fleet) == ["serving"]
        assert fleet.roster.workers[0].limit.value < before
    assert said.ids == [7] * 3


async def test_a_call_that_has_waited_for_its_worker_goes_elsewhere_before_one_that_just_came() -> None:
    engines = ToldEngine(), ToldEngine()
    for engine in engines:
        engine.told_load = EngineLoad(1, 0, 0.1, 0)
    one_each = rebounded(
        QUICK,
        **(
            {"start_calls": 1, "min_calls": 1, "move_after_s": 0.05}
            | {"load_interval_s": 60.0, "health_interval_s": 60.0}
        ),
    )
    first, waits, new = Said(), Said(), Said()
    async with running(*engines, settings=one_each) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: first.run(fleet, 100_000, rid="first", episode="one"))
        await first.begun.wait()
        tasks.start_soon(lambda: waits.run(fleet, 100_000, rid="waits", episode="one"))
        await wait_until(lambda: fleet.calls.waiting == 1)
        await anyio.sleep(0.06)
        assert fleet.calls.waiting == 1, "nobody has looked at it"
        tasks.start_soon(lambda: new.run(fleet, 1, rid="new", episode="another"))
        await waits.begun.wait()
        assert new.ids == []
        tasks.cancel_scope.cancel()


async def test_more_calls_than_may_wait_are_refused() -> None:
    full = QUICK.model_copy(update={"max_waiting": 2})
    waiting = [Said(), Said(), Said()]
    async with running(ToldEngine(), settings=full) as fleet, anyio.create_task_group() as tasks:
        await fleet.pause("retract")
        for number, said in enumerate(waiting):
            tasks.start_soon(lambda number=number, said=said: said.run(fleet, 1, rid=f"c{number}"))
            await wait_until(lambda number=number: fleet.calls.waiting == min(number + 1, 2))
        await wait_until(lambda: waiting[2].error)
        assert isinstance(waiting[2].error, TooManyCalls)
        await fleet.resume()
    assert [said.ids for said in waiting] == [[7], [7], []]


async def test_a_full_worker_holds_calls_back_and_its_limit_is_never_passed() -> None:
    engine = ToldEngine()
    engine.told_load = EngineLoad(2, 5, 0.5, 0)  # so the limit stays at what runs, and one
    few = rebounded(QUICK, start_calls=3)
    calls = [Said() for _ in range(20)]
    most = 0

    async with running(engine, settings=few) as fleet, anyio.create_task_group() as tasks:
        for number, said in enumerate(calls):
            episode = f"ep_{number}"
            tasks.start_soon(lambda n=number, s=said, e=episode: s.run(fleet, 4, rid=f"c{n}", episode=e))
        while not all(said.finish for said in calls):
            most = max(most, len(engine.running))
            await anyio.sleep(0.001)
    assert most == 3
    assert all(said.ids == [7] * 4 for said in calls)
