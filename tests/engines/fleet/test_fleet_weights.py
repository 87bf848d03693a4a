"""A fleet of engines that do what the test tells them: weights, sleep, workers that join and leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from fleet_support import QUICK, Said, ToldEngine, fleet_of, running, statuses

from bounded import rebounded
from turnstile_server.engines.protocol import EngineState
from turnstile_server.engines.weights import TensorBucket, WeightGroup
from turnstile_server.errors import (
    Conflict,
    EngineProtocolError,
    EngineRefused,
    EngineUnavailable,
    NotFound,
    StartupError,
    Unprocessable,
)
from waiting import wait_until

pytestmark = pytest.mark.anyio


# Weights


async def test_new_weights_go_to_all_workers_while_calls_run() -> None:
    engines, said = (ToldEngine(), ToldEngine()), Said()
    async with running(*engines) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said.run(fleet, 80))
        await said.begun.wait()
        await fleet.load_weights("/v1", "v1", "retract")
    assert said.error is None
    assert set(said.versions) == {"v0", "v1"}
    assert [engine.version for engine in engines] == ["v1", "v1"]
    assert [engine.paused for engine in engines] == [False, False]


async def test_a_folder_that_is_refused_changes_no_worker() -> None:
    engines = ToldEngine(), ToldEngine()
    for engine in engines:
        engine.fails["update_weights"] = EngineRefused("no such folder")
    async with running(*engines) as fleet:
        with pytest.raises(EngineRefused, match="no such folder"):
            await fleet.load_weights("/missing", "v1", "retract")
        assert statuses(fleet) == ["serving", "serving"]
        assert len([True for engine in engines if engine.asked("update_weights")]) == 1, "one was asked"
        assert [engine.paused for engine in engines] == [False, False]
        state = await fleet.state()
        assert state.weight_version == "v0"


async def test_a_worker_that_misses_an_update_is_fenced_until_it_has_caught_up() -> None:
    engines = ToldEngine(), ToldEngine()
    said = Said()
    async with running(*engines) as fleet:
        engines[1].fails["update_weights"] = EngineProtocolError("it came back with other weights")
        await fleet.load_weights("/v1", "v1", "retract")
        assert statuses(fleet) == ["serving", "fenced"]
        for number in range(6):
            said = Said()
            await said.run(fleet, 2, episode=f"ep_{number}")
            assert set(said.versions) == {"v1"}
        assert engines[1].asked("generate") == []
        engines[1].fails.clear()
        await wait_until(lambda: statuses(fleet) == ["serving", "serving"])
        assert engines[1].version == "v1"


async def test_a_worker_that_was_started_anew_gets_the_current_weights_before_any_call() -> None:
    engines = ToldEngine(), ToldEngine()
    async with running(*engines) as fleet:
        await fleet.load_weights("/v1", "v1", "retract")
        engines[1].version = "v0"  # as after a restart
        await wait_until(lambda: engines[1].version == "v1")
        await wait_until(lambda: statuses(fleet) == ["serving", "serving"])


async def test_a_name_of_weights_is_never_used_for_others_and_never_again() -> None:
    engine = ToldEngine()
    async with running(engine) as fleet:
        await fleet.load_weights("/a", "v1", "retract")
        await fleet.load_weights("/a", "v1", "retract")
        with pytest.raises(Conflict, match="names other weights"):
            await fleet.load_weights("/b", "v1", "retract")
        with pytest.raises(Conflict, match="served before"):
            await fleet.load_weights("/a", "v0", "retract")
        assert (await fleet.state()).versions == 2


async def test_weights_in_pieces_are_served_when_they_are_complete() -> None:
    engines, said = (ToldEngine(), ToldEngine()), Said()
    async with running(*engines) as fleet, anyio.create_task_group() as tasks:
        await fleet.begin_weights("tensors", "v1", "retract")
        tasks.start_soon(lambda: said.run(fleet, 3))
        for _ in range(3):
            await fleet.load_piece(TensorBucket(("x",)))
        with pytest.raises(Conflict, match="in pieces"):
            await fleet.load_weights("/a", "v2", "retract")
        assert said.ids == []
        await fleet.end_weights()
    assert set(said.versions) == {"v1"}
    assert [len(engine.asked("load_bucket")) for engine in engines] == [3, 3]


async def test_nobody_gives_a_worker_its_old_weights_back_between_two_pieces() -> None:
    engine = ToldEngine()
    async with running(engine) as fleet:
        await fleet.load_weights("/v1", "v1", "retract")
        (worker,) = fleet.roster.workers
        await fleet.begin_weights("tensors", "v2", "retract")
        await fleet.load_piece(TensorBucket(("x",)))
        engine.version = None  # it names no weights while it has some of the pieces
        await fleet.roster.check(worker)
        await fleet.roster.catch_up(worker)
        assert (worker.status, engine.paused) == ("serving", True)
        await fleet.load_piece(TensorBucket(("x",)))
        await fleet.end_weights()
        assert (worker.status, worker.version, engine.paused) == ("serving", "v2", False)
    assert len(engine.asked("update_weights")) == 1


async def test_an_update_that_no_trainer_ends_is_cancelled_and_the_next_one_mends_it() -> None:
    engine, said = ToldEngine(), Said()
    brief = QUICK.model_copy(update={"update_idle_s": 0.05, "no_worker_s": 5.0})
    async with running(engine, settings=brief) as fleet, anyio.create_task_group() as tasks:
        await fleet.begin_weights("tensors", "v1", "retract")
        await fleet.load_piece(TensorBucket(("x",)))
        tasks.start_soon(lambda: said.run(fleet, 3))
        await wait_until(lambda: statuses(fleet) == ["fenced"])
        await wait_until(lambda: not engine.paused)
        assert "mixture" in fleet.roster.workers[0].detail
        assert engine.asked("generate") == [], "no call is sampled by a mixture"
        with pytest.raises(Conflict, match="no weight update is under way"):
            await fleet.end_weights()
        await fleet.load_weights("/v2", "v2", "retract")
    assert set(said.versions) == {"v2"}


async def test_an_update_that_is_cancelled_before_its_first_piece_leaves_the_old_weights_serving() -> None:
    engine, said = ToldEngine(), Said()
    async with running(engine) as fleet:
        await fleet.begin_weights("tensors", "v1", "retract")
        await fleet.cancel_weights()
        await said.run(fleet, 3)
    assert set(said.versions) == {"v0"}


UNCHECKED = rebounded(QUICK, health_interval_s=60.0)
"""No health check puts right what an update says of its workers."""


async def test_a_first_piece_that_all_refuse_leaves_them_serving_the_old_weights() -> None:
    engines, said = (ToldEngine(), ToldEngine()), Said()
    for engine in engines:
        engine.fails["load_bucket"] = EngineRefused("they do not fit")
    async with running(*engines, settings=UNCHECKED) as fleet:
        await fleet.begin_weights("tensors", "v1", "retract")
        with pytest.raises(EngineRefused, match="do not fit"):
            await fleet.load_piece(TensorBucket(("x",)))
        assert statuses(fleet) == ["serving", "serving"]
        await said.run(fleet, 3)
    assert set(said.versions) == {"v0"}


async def test_a_worker_that_alone_refuses_a_first_piece_has_its_old_weights_and_misses_the_update() -> None:
    engines = ToldEngine(), ToldEngine()
    engines[1].fails["load_bucket"] = EngineRefused("they do not fit")
    async with running(*engines, settings=UNCHECKED) as fleet:
        await fleet.begin_weights("tensors", "v1", "retract")
        for _ in range(2):
            await fleet.load_piece(TensorBucket(("x",)))
        await fleet.end_weights()
        assert statuses(fleet) == ["serving", "fenced"]
        assert "it has the weights 'v0'" in fleet.roster.workers[1].detail


async def test_a_piece_that_is_refused_after_others_were_taken_leaves_a_mixture() -> None:
    engine = ToldEngine()
    async with running(engine, settings=UNCHECKED) as fleet:
        await fleet.begin_weights("tensors", "v1", "retract")
        await fleet.load_piece(TensorBucket(("x",)))
        engine.fails["load_bucket"] = EngineRefused("they do not fit")
        with pytest.raises(EngineRefused, match="do not fit"):
            await fleet.load_piece(TensorBucket(("x",)))
        assert statuses(fleet) == ["fenced"]
        assert "mixture" in fleet.roster.workers[0].detail


async def test_weights_that_somebody_loaded_past_the_server_are_noticed() -> None:
    engines = ToldEngine(), ToldEngine()
    async with running(*engines) as fleet:
        engines[0].version = "theirs"
        await wait_until(lambda: statuses(fleet) == ["serving", "fenced"])
        engines[1].version = "theirs"
        await wait_until(lambda: statuses(fleet) == ["serving", "serving"])
        assert (await fleet.state()).weight_version == "theirs"


# Groups


class JoiningEngine(ToldEngine):
    async def join_group(self, group: WeightGroup) -> None:
        self._said("join_group", group.rank_offset, group.world_size)


async def test_every_worker_joins_a_group_with_ranks_of_its_own() -> None:
    engines = JoiningEngine(), JoiningEngine()
    group = WeightGroup("g", "127.0.0.1", 29500, world_size=9, rank_offset=3)
    async with running(*engines) as fleet:
        with pytest.raises(EngineRefused, match="make 7"):
            await fleet.join_workers(group, 2)
        with pytest.raises(EngineRefused, match="up to 9 for this server"):
            await fleet.join_workers(group, 2, 6)
        with pytest.raises(EngineRefused, match="make 11"):
            await fleet.join_workers(group, 4, 8)
        await fleet.join_workers(group, 2, 4)
    assert [engine.asked("join_group") for engine in engines] == [[(3, 9)], [(5, 9)]]


# Sleep


async def test_sleep_waits_for_running_calls_and_new_ones_wait_until_weights_came_and_resume() -> None:
    engine, first, second = ToldEngine(), Said(), Said()
    async with running(engine) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: first.run(fleet, 40, rid="a"))
        await first.begun.wait()
        await fleet.sleep()
        assert first.ids == [7] * 40, "it ended before the memory was freed"
        tasks.start_soon(lambda: second.run(fleet, 3, rid="b"))
        await fleet.wake()
        await fleet.load_weights("/v1", "v1", "retract")
        await wait_until(lambda: fleet.calls.waiting == 1)
        assert second.ids == []
        await fleet.resume()
    assert set(second.versions) == {"v1"}


async def test_a_sleeping_engine_that_cannot_be_reached_says_so_until_it_can() -> None:
    engine = ToldEngine()
    async with running(engine) as fleet:
        await fleet.sleep()
        worker = fleet.roster.workers[0]
        engine.dead = True
        await wait_until(lambda: "may be gone: it is dead" in worker.detail)
        assert worker.status == "asleep", "it may come back as it was"
        engine.dead = False
        await wait_until(lambda: "wake it" in worker.detail)
        await fleet.wake()
        assert statuses(fleet) == ["fenced"]


@pytest.mark.parametrize("late", [EngineState(True, "v0", False), EngineState(False, None, None, "it broke off")])
async def test_a_late_answer_puts_no_engine_to_sleep_that_was_found_gone(late: EngineState) -> None:
    """The health checks ask, and so does each ``GET /engine``."""
    engine, asked, answered = ToldEngine(), anyio.Event(), anyio.Event()
    unwatched = rebounded(QUICK, health_interval_s=60.0)

    async def answer_late() -> EngineState:
        asked.set()
        await answered.wait()
        return late

    async def say_gone() -> EngineState:
        return EngineState(False, None, None, "it ended", gone=True)

    async with running(engine, settings=unwatched) as fleet:
        await fleet.sleep()
        (worker,) = fleet.roster.workers
        engine.state = answer_late  # type: ignore[method-assign]
        async with anyio.create_task_group() as group:
            group.start_soon(fleet.roster.check, worker)
            await asked.wait()
            engine.state = say_gone  # type: ignore[method-assign]
            await fleet.roster.check(worker)
            assert worker.status == "down"
            answered.set()
        assert (worker.status, worker.detail, worker.gone) == ("down", "it ended", True)


async def test_sleep_is_given_up_where_calls_do_not_end() -> None:
    engine, said = ToldEngine(), Said()
    brief = QUICK.model_copy(update={"sleep_wait_s": 0.05})
    async with running(engine, settings=brief) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said.run(fleet, 100))
        await said.begun.wait()
        with pytest.raises(Conflict, match="sleep_wait_s"):
            await fleet.sleep()
    assert said.ids == [7] * 100
    assert engine.asked("sleep") == []


# Workers


async def test_a_worker_joins_with_the_current_weights_and_takes_calls() -> None:
    first, second = ToldEngine(), ToldEngine("other")
    async with running(first, join=lambda url: second) as fleet:
        await fleet.load_weights("/v1", "v1", "retract")
        await fleet.load_adapter("poet", "/lora")
        await fleet.add_worker("http://new")
        assert statuses(fleet) == ["serving", "serving"]
        assert second.version == "v1"
        assert second.asked("load_adapter") == [("poet", "/lora")]
        for number in range(20):
            await Said().run(fleet, 1, episode=f"ep_{number}")
        assert len(second.asked("generate")) > 3
        for same in ("http://new", "http://new/"):
            with pytest.raises(Conflict, match="already"):
                await fleet.add_worker(same)


async def test_a_worker_that_comes_again_has_the_adapters_of_the_others_and_no_more() -> None:
    """It kept what it had: an adapter that was unloaded since, and one whose name stands for another now."""
    first, again, said = ToldEngine(), ToldEngine(), Said()
    again.adapters = {"poet": "/old", "gone": "/gone"}
    async with running(first, join=lambda url: again) as fleet:
        await fleet.load_adapter("poet", "/new")
        await fleet.load_adapter("gone", "/gone")
        await fleet.unload_adapter("gone")
        await fleet.add_worker("http://again")
        assert statuses(fleet) == ["serving", "serving"]
        assert again.adapters["poet"] == "/new"
        await said.run(fleet, 3, adapter="gone")
        assert isinstance(said.error, EngineRefused)
        await fleet.load_adapter("gone", "/gone again")
        assert statuses(fleet) == ["serving", "serving"]
        assert again.adapters == {"poet": "/new", "gone": "/gone again"}
        later = Said()
        await later.run(fleet, 3, adapter="gone")
        assert later.ids == [7] * 3


async def test_a_call_that_waits_while_its_adapter_is_unloaded_is_refused_and_not_sent() -> None:
    """SGLang would load the adapter again."""
    engine, said = ToldEngine(), Said()
    async with running(engine) as fleet, anyio.create_task_group() as tasks:
        await fleet.load_adapter("poet", "/lora")
        await fleet.pause("retract")
        tasks.start_soon(lambda: said.run(fleet, 3, adapter="poet"))
        await wait_until(lambda: fleet.calls.waiting == 1)
        await fleet.unload_adapter("poet")
        await fleet.resume()
    assert isinstance(said.error, EngineRefused)
    assert engine.asked("generate") == []
    assert [worker.calls for worker in fleet.roster.workers] == [0]


async def test_a_worker_that_is_removed_ends_its_calls_first() -> None:
    engines, said = (ToldEngine(), ToldEngine()), Said()
    async with running(*engines) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: said.run(fleet, 50))
        await said.begun.wait()
        worker = next(worker for worker in fleet.roster.workers if worker.calls)
        await fleet.remove_worker(worker.worker_id)
        assert said.ids == [7] * 50
        assert len(fleet.roster.workers) == 1
        with pytest.raises(Conflict, match="last worker"):
            await fleet.remove_worker(fleet.roster.workers[0].worker_id)
        with pytest.raises(NotFound):
            await fleet.remove_worker("w9")
    assert [engine.closed for engine in engines] == [True, True]


async def test_calls_that_outlast_a_worker_that_is_removed_go_on_elsewhere_or_fail() -> None:
    """Those of which a token has left fail, the others begin anew."""
    engines, begun, waiting = (ToldEngine(), ToldEngine()), Said(), Said()
    brief = QUICK.model_copy(update={"drain_s": 0.1})
    async with running(*engines, settings=brief) as fleet, anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: begun.run(fleet, 100_000, rid="begun"))
        await begun.begun.wait()
        worker = next(worker for worker in fleet.roster.workers if worker.calls)
        tasks.start_soon(lambda: waiting.run(fleet, 200, rid="waiting", stream=False))
        await wait_until(lambda: worker.calls == 2)
        await fleet.remove_worker(worker.worker_id)
        await wait_until(lambda: begun.error is not None and waiting.finish is not None)
        assert isinstance(begun.error, EngineUnavailable)
        assert waiting.ids == [7] * 200
        assert [left.calls for left in fleet.roster.workers] == [0]


class WatchedEngine(ToldEngine):
    """Works by itself for as long as it is used."""

    watched = False

    async def watch(self) -> None:
        self.watched = True
        try:
            await anyio.sleep_forever()
        finally:
            self.watched = False


async def test_an_engine_works_by_itself_for_as_long_as_it_is_a_worker() -> None:
    first, second = WatchedEngine(), WatchedEngine()
    async with running(first, join=lambda url: second) as fleet:
        await fleet.add_worker("http://late")
        await wait_until(lambda: first.watched and second.watched)
        await fleet.remove_worker("w2")
        await wait_until(lambda: not second.watched)
        assert first.watched
    assert not first.watched


async def test_a_worker_of_another_model_may_not_join() -> None:
    other = ToldEngine()
    other.can = replace(other.can, vocab_size=101)
    async with running(ToldEngine(), join=lambda url: other) as fleet:
        with pytest.raises(Unprocessable, match="vocabulary size is 101, theirs is 100"):
            await fleet.add_worker("http://new")
        assert statuses(fleet) == ["serving"]
        assert other.closed
    other = ToldEngine()
    other.can = replace(other.can, vocab_size=101)
    with pytest.raises(StartupError, match="vocabulary size"):
        await fleet_of(ToldEngine(), other).start()


async def test_a_fleet_whose_first_engine_cannot_be_used_does_not_start(tmp_path: Path) -> None:
    broken = ToldEngine()
    broken.fails["start"] = StartupError("wrong model")
    with pytest.raises(StartupError, match="wrong model"):
        await fleet_of(ToldEngine(), broken).start()


async def test_calls_wait_while_the_trainer_gives_its_weights_and_no_engine_is_mended_meanwhile() -> None:
    engines, said = (ToldEngine(), ToldEngine()), Said()
    async with running(*engines) as fleet, anyio.create_task_group() as tasks:
        await fleet.load_weights("/v1", "v1", "retract")
        await fleet.begin_weights("trainer", "v2", "abort")
        tasks.start_soon(lambda: said.run(fleet, 3))
        for engine, worker in zip(engines, fleet.roster.workers, strict=True):
            engine.version = "v2"  # the trainer names what it gives
            await fleet.roster.check(worker)
            await fleet.roster.catch_up(worker)
        assert fleet.roster.versions.current is not None
        assert fleet.roster.versions.current.name == "v1"
        assert said.ids == []
        await fleet.end_weights()
    assert set(said.versions) == {"v2"}
    assert [len(engine.asked("update_weights")) for engine in engines] == [1, 1]


async def test_an_engine_that_says_it_has_other_weights_than_the_trainer_is_fenced() -> None:
    engines = ToldEngine(), ToldEngine()
    engines[1].fails["end_update"] = EngineProtocolError("it names them 'theirs'")
    async with running(*engines, settings=UNCHECKED) as fleet:
        await fleet.begin_weights("trainer", "v2", "retract")
        await fleet.end_weights()
        assert statuses(fleet) == ["serving", "fenced"]
        assert "theirs" in fleet.roster.workers[1].detail


@pytest.mark.parametrize("silent", [False, True])
async def test_what_a_trainer_that_gave_up_has_written_serves_nothing(silent: bool) -> None:
    engine, said = ToldEngine(), Said()
    brief = QUICK.model_copy(update={"update_idle_s": 0.05 if silent else 60.0, "no_worker_s": 5.0})
    async with running(engine, settings=brief) as fleet, anyio.create_task_group() as tasks:
        await fleet.begin_weights("trainer", "v1", "retract")
        tasks.start_soon(lambda: said.run(fleet, 3))
        if not silent:
            await fleet.cancel_weights()
        await wait_until(lambda: statuses(fleet) == ["fenced"])
        assert "mixture" in fleet.roster.workers[0].detail
        await fleet.load_weights("/v2", "v2", "retract")
    assert set(said.versions) == {"v2"}
