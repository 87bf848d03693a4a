"""The owner task of an episode: one end, whatever asks for it, in whichever phase, and everything released."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
from conversation import END
from gate_support import Prompted, Said, says, staged
from puppets import result, theatre
from test_life import gathered
from test_played_life import House, call, opened

from turnstile_server.errors import JournalUnavailable, SandboxFailed
from turnstile_server.gate.pipeline import CallPipeline
from turnstile_server.grading.protocol import Grade, Work
from turnstile_server.journal.protocol import Record, RecordType
from turnstile_server.tasks.model import Task

pytestmark = pytest.mark.anyio

ENDED = ("completed", "failed", "cancelled", "timed_out", "truncated")
Leave = Callable[[], None]
Episode = dict[str, Any]


class Watched(House):
    """A house whose journal notes each end that it stores. ``refuse`` is raised instead while it is set.

    It has one place for running episodes, and waits long for calls in flight. ``background`` is cancelled when the
    server stops.
    """

    background: anyio.abc.TaskGroup

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends: list[tuple[str, str]] = []
        """Episode and status."""
        self.sandboxes_at_ends: list[list[str]] = []
        self.others: list[str] = []
        """Sandboxes of an episode that is not the one under test."""
        self.refuse: Exception | None = None
        self.refused = anyio.Event()
        self._append = self.stage.journal.append
        monkeypatch.setattr(self.stage.journal, "append", self._append_noted)

    async def _append_noted(self, record: Record) -> None:
        status = record.meta["status"] if record.type is RecordType.EPISODE else None
        if status in ENDED and self.refuse is not None:
            self.refused.set()
            raise self.refuse
        await self._append(record)
        if status in ENDED:
            self.ends.append((record.episode_id, status))
            self.sandboxes_at_ends.append(self.sandboxes)

    @property
    def sandboxes(self) -> list[str]:
        return [made for made in self.provider.open if made not in self.others]

    async def place_is_free(self) -> None:
        """Another episode is prepared and run."""
        self.provider.making = anyio.lowlevel.checkpoint
        other = await self.play(agent="external")
        await self.status(other, "running")
        await self.stage.post(other, "cancel")


@asynccontextmanager
async def watched(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    puppets = theatre(folder / "installs")
    settings: dict[str, Any] = {
        "episodes": {"watch_interval_s": 0.02, "max_running": 1},
        "gate": {"drain_s": 60.0, "abort_grace_s": 60.0},
    }
    async with staged(model, folder / "data", work=puppets.work, **settings) as stage:
        stage.engine.answers = [says([*stage.encode("hm"), *stage.encode(END)])]
        house = Watched(stage, puppets)
        house.watch(monkeypatch)
        async with anyio.create_task_group() as house.background:
            yield house
            house.background.cancel_scope.cancel()


# Phases: each takes an episode into one, which lasts until the second result is called.


async def queued(house: Watched) -> tuple[Episode, Leave]:
    before = await house.play(agent="external")
    await house.status(before, "running")
    house.others = house.provider.open

    def leave() -> None:
        house.background.start_soon(house.stage.post, before, "cancel")

    return await house.play(agent="external"), leave


async def preparing(house: Watched) -> tuple[Episode, Leave]:
    asked, go = anyio.Event(), anyio.Event()

    async def slow() -> None:
        asked.set()
        await go.wait()

    house.provider.making = slow
    created = await house.play(agent="external")
    await asked.wait()
    return created, go.set


async def running(house: Watched) -> tuple[Episode, Leave]:
    created = await house.play(agent="external")
    await house.status(created, "running")
    return created, lambda: None


async def draining(house: Watched) -> tuple[Episode, Leave]:
    """Finished during a call."""
    created, leave = await calling(house)
    house.background.start_soon(house.stage.control.post, f"/episodes/{created['episode_id']}/finish")
    await anyio.sleep(0.1)
    return created, leave


async def calling(house: Watched, **fields: Any) -> tuple[Episode, Leave]:
    """A call is in flight."""
    go = anyio.Event()

    async def slow(_: Prompted) -> AsyncIterator[Said | Exception]:
        await go.wait()
        yield Said(house.stage.encode("hm"), "stop")

    house.stage.engine.answers = [slow]
    created = await house.play(agent="external", **fields)
    await house.status(created, "running")
    house.background.start_soon(call, house, created)
    with anyio.fail_after(60):
        while not house.stage.engine.calls:  # noqa: ASYNC110 - a list, not an event
            await anyio.sleep(0.005)
    return created, go.set


async def worked(house: Watched) -> Episode:
    """Its agent has ended well."""
    created = await house.play()
    process = await house.provider.agent()
    await house.think(process)
    process.end(result())
    return created


async def grading(house: Watched) -> tuple[Episode, Leave]:
    go = anyio.Event()

    async def slow(task: Task, work: Work) -> Grade:
        await go.wait()
        return Grade(1.0)

    house.grader.grade_it = slow
    created = await worked(house)
    await house.status(created, "grading")
    return created, go.set


async def storing(house: Watched) -> tuple[Episode, Leave]:
    """The journal refuses its end."""
    house.refuse = JournalUnavailable("the disk is full")
    created = await worked(house)
    with anyio.fail_after(60):
        await house.refused.wait()

    def leave() -> None:
        house.refuse = None

    return created, leave


PHASES = {phase.__name__: phase for phase in (queued, preparing, running, draining, grading, storing)}
DECIDED = {"storing"}
"""Phases in which a cancellation comes too late."""
ENDS_OF_BOTH = {"draining": {"cancelled"}, "grading": {"cancelled"}, "storing": {"completed"}}
"""How an episode can end that is finished and cancelled at once, in phases that outlast both requests."""


# A stop in each phase


@pytest.mark.parametrize(("phase", "how"), list(product(PHASES, ["finish", "cancel"])))
async def test_a_stop_in_each_phase_ends_the_episode_once_and_releases_everything(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, how: str
) -> None:
    async with watched(tiny_model, tmp_path, monkeypatch) as house:
        created, leave = await PHASES[phase](house)
        house.background.start_soon(house.stage.control.post, f"/episodes/{created['episode_id']}/{how}")
        await anyio.sleep(0.05)
        leave()
        shown = await house.ended(created)
        cancelled = how == "cancel" and phase not in DECIDED
        assert (shown["status"], shown["reward"]) == (("cancelled", None) if cancelled else ("completed", 1.0))
        assert [status for episode, status in house.ends if episode == created["episode_id"]] == [shown["status"]]
        assert house.sandboxes == []
        assert not any(house.sandboxes_at_ends), "a sandbox is gone before the end is stored"
        assert len(house.grader.graded) <= 1
        await house.place_is_free()


@pytest.mark.parametrize("phase", PHASES)
async def test_many_stops_at_once_are_one_end(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    async with watched(tiny_model, tmp_path, monkeypatch) as house:
        created, leave = await PHASES[phase](house)
        path = f"/episodes/{created['episode_id']}"

        async def soon() -> None:
            await anyio.sleep(0.05)
            leave()

        stops = [lambda how=how: house.stage.control.post(f"{path}/{how}") for how in ("finish", "cancel") * 4]
        *answers, _ = await gathered(*stops, soon)
        shown = await house.ended(created)
        assert shown["status"] in ENDS_OF_BOTH.get(phase, {"completed", "cancelled"})
        if phase not in DECIDED:  # there each attempt that fails meanwhile is a 503
            assert {answer.json()["status"] for answer in answers} == {shown["status"]}
        assert [status for episode, status in house.ends if episode == created["episode_id"]] == [shown["status"]]
        assert house.sandboxes == []
        await house.place_is_free()


async def test_a_budget_that_ends_beside_a_finish_does_not_change_the_first_reason(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(tiny_model, tmp_path, monkeypatch) as house:
        created, leave = await calling(house, limits={"max_turns": 1})
        async with house.stage.agent(created) as agent, anyio.create_task_group() as tasks:
            with pytest.raises(Exception, match="turns are used up"):
                await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "second"}])
            tasks.start_soon(house.stage.post, created, "finish")
            await anyio.sleep(0.05)
            leave()
        shown = await house.ended(created)
        assert (shown["status"], shown["error"]["type"]) == ("truncated", "budget_exhausted")
        assert len(house.ends) == 1


async def test_a_caller_that_goes_away_does_not_stop_the_end(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(tiny_model, tmp_path, monkeypatch) as house:
        created, leave = await calling(house)
        with anyio.move_on_after(0.1):
            await house.stage.post(created, "finish")
        leave()
        assert (await house.ended(created))["status"] == "completed"


# The server stops in each phase


@pytest.mark.parametrize("phase", PHASES)
async def test_a_shutdown_in_each_phase_leaves_no_sandbox_and_a_restart_to_tell(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    with anyio.fail_after(60):
        async with watched(tiny_model, tmp_path, monkeypatch) as house:
            created, leave = await PHASES[phase](house)
            provider = house.provider
            if phase == "draining":  # a stopping server waits for calls, too, but not for a grading

                async def for_ever(task: Task, work: Work) -> Grade:
                    await anyio.sleep_forever()
                    raise AssertionError

                house.grader.grade_it = for_ever
                leave()
    assert provider.open == []
    assert house.ends == []
    async with opened(tiny_model, tmp_path) as after:
        shown = await after.stage.get(created)
        assert (shown["status"], shown["error"]["type"]) == ("failed", "server_restarted")
        assert shown["reward"] is None


async def test_a_stop_that_needs_no_grade_is_stored_although_the_server_stops(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(tiny_model, tmp_path, monkeypatch) as house:
        created, leave = await calling(house, task={"instruction": "t"})
        house.background.start_soon(house.stage.control.post, f"/episodes/{created['episode_id']}/finish")
        await anyio.sleep(0.1)
        leave()
    assert house.ends == [(created["episode_id"], "completed")]


# Bugs


async def no_room(house: Watched) -> Episode:
    async def broken() -> None:
        raise RuntimeError("a bug")

    house.provider.making = broken
    return await house.play()


async def process_breaks(house: Watched) -> Episode:
    created = await house.play()
    process = await house.provider.agent()
    process.end(RuntimeError("a bug"))
    return created


async def abort_breaks(house: Watched) -> Episode:
    created, leave = await calling(house)

    async def cancel() -> None:
        with anyio.fail_after(60):
            await house.stage.control.post(f"/episodes/{created['episode_id']}/cancel")
        leave()

    house.background.start_soon(cancel)
    return created


async def grader_breaks(house: Watched) -> Episode:
    async def broken(task: Task, work: Work) -> Grade:
        raise RuntimeError("a bug")

    house.grader.grade_it = broken
    return await worked(house)


@pytest.mark.parametrize("broken", [no_room, process_breaks, abort_breaks, grader_breaks])
async def test_a_bug_fails_its_own_episode_and_releases_its_sandbox(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[[Watched], Awaitable[Episode]],
) -> None:
    async with watched(tiny_model, tmp_path, monkeypatch) as house:
        other = await house.stage.episode()
        if broken is abort_breaks:

            def abandon(*_: object) -> None:
                raise RuntimeError("a bug")

            monkeypatch.setattr(CallPipeline, "abandon", abandon)
        created = await broken(house)
        shown = await house.ended(created)
        monkeypatch.undo()
        assert (shown["status"], shown["reward"]) == ("failed", None)
        assert shown["error"]["type"] == "internal_error"
        assert "log" in shown["error"]["message"]
        assert house.sandboxes == []
        assert (await house.stage.get(other))["status"] == "running"
        await house.place_is_free()


async def test_a_bug_in_the_journal_delays_an_end_and_loses_none(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(tiny_model, tmp_path, monkeypatch) as house:
        house.refuse = RuntimeError("a bug")
        created = await worked(house)
        await house.refused.wait()
        assert house.sandboxes == []
        house.refuse = None
        assert (await house.ended(created))["status"] == "completed"
        assert len(house.grader.graded) == len(house.ends) == 1
        await house.place_is_free()


async def test_the_death_of_a_sandbox_beside_a_finish_changes_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(tiny_model, tmp_path, monkeypatch) as house:
        created, leave = await draining(house)
        house.provider.made[0].dead.set()
        await anyio.sleep(0.05)
        leave()
        assert (await house.ended(created))["status"] == "completed"


async def test_an_agent_that_dies_while_its_calls_are_drained_changes_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with watched(tiny_model, tmp_path, monkeypatch) as house:
        created = await house.play(limits={"max_turns": 1})
        process = await house.provider.agent()
        assert [(await house.think(process)).status_code for _ in range(2)] == [200, 400]
        process.end(SandboxFailed("gone"))
        shown = await house.ended(created)
        assert (shown["status"], shown["error"]["type"]) == ("truncated", "budget_exhausted")
