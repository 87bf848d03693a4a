"""The owner task of an episode: whatever requests a stop, in each phase, it ends once and releases everything."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
from conversation import END, body, raw, url
from fake_backends import fake_backends, result
from gate_support import Prompted, Said, says, staged
from test_life import gathered
from test_played_life import EpisodeServer, call, opened

from turnstile_server.episodes.broadcast import Broadcast
from turnstile_server.episodes.outcome import Outcome
from turnstile_server.episodes.run import EpisodeRun
from turnstile_server.errors import JournalUnavailable, SandboxFailed, SandboxUnavailable, TaskFailed
from turnstile_server.gate.pipeline import CallPipeline
from turnstile_server.grading.protocol import Grade, Work
from turnstile_server.journal.protocol import Record, RecordType
from turnstile_server.tasks.model import Task
from waiting import wait_until

pytestmark = pytest.mark.anyio

ENDED = ("completed", "failed", "cancelled", "timed_out", "truncated")
Leave = Callable[[], None]
Episode = dict[str, Any]


class RecordingServer(EpisodeServer):
    """A server whose journal notes each end that it stores. ``refuse`` is raised instead while it is set.

    It has one place for running episodes, and waits long for calls in flight. ``background`` is cancelled when the
    server stops.
    """

    background: anyio.abc.TaskGroup

    def record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends: list[tuple[str, str]] = []
        """Episode and status."""
        self.sandboxes_at_ends: list[list[str]] = []
        self.others: list[str] = []
        """Sandboxes of an episode that is not the one under test."""
        self.refuse: Exception | None = None
        self.refused = anyio.Event()
        self.stops: list[str] = []
        """Episodes whose end was asked for, once for each time."""
        request = EpisodeRun.request_stop

        def noted(run: EpisodeRun, outcome: Outcome) -> None:
            self.stops.append(run.episode_id)
            request(run, outcome)

        monkeypatch.setattr(EpisodeRun, "request_stop", noted)
        self._append = self.stage.journal.append
        monkeypatch.setattr(self.stage.journal, "append", self._append_noted)

    async def _append_noted(self, record: Record) -> int:
        status = record.meta["status"] if record.type is RecordType.EPISODE else None
        if status in ENDED and self.refuse is not None:
            self.refused.set()
            raise self.refuse
        size = await self._append(record)
        if status in ENDED:
            self.ends.append((record.episode_id, status))
            self.sandboxes_at_ends.append(self.sandboxes)
        return size

    @property
    def sandboxes(self) -> list[str]:
        return [made for made in self.provider.open if made not in self.others]

    async def stops_asked(self, episode: dict[str, Any], count: int) -> None:
        """Returns when the end of the episode was asked for so often, or it has ended."""
        running = self.running
        await wait_until(
            lambda: self.stops.count(episode["episode_id"]) >= count or episode["episode_id"] not in running
        )

    async def place_is_free(self) -> None:
        """Another episode is prepared and run."""
        self.provider.making = anyio.lowlevel.checkpoint
        other = await self.play(agent="external")
        await self.status(other, "running")
        await self.stage.post(other, "cancel")


@asynccontextmanager
async def recording(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, max_running: int = 1
) -> AsyncIterator[RecordingServer]:
    fakes = fake_backends(folder / "installs")
    settings: dict[str, Any] = {
        "episodes": {"watch_interval_s": 0.02, "max_running": max_running},
        "gate": {"drain_s": 60.0, "abort_grace_s": 60.0},
    }
    async with staged(model, folder / "data", work=fakes.backends, **settings) as stage:
        stage.engine.answers = [says([*stage.encode("hm"), *stage.encode(END)])]
        server = RecordingServer(stage, fakes)
        server.record(monkeypatch)
        async with anyio.create_task_group() as server.background:
            yield server
            server.background.cancel_scope.cancel()


# Phases: each takes an episode into one, which lasts until the second result is called.


async def queued(server: RecordingServer) -> tuple[Episode, Leave]:
    before = await server.play(agent="external")
    await server.status(before, "running")
    server.others = server.provider.open

    def leave() -> None:
        server.background.start_soon(server.stage.post, before, "cancel")

    return await server.play(agent="external"), leave


async def preparing(server: RecordingServer) -> tuple[Episode, Leave]:
    asked, go = anyio.Event(), anyio.Event()

    async def slow() -> None:
        asked.set()
        await go.wait()

    server.provider.making = slow
    created = await server.play(agent="external")
    await asked.wait()
    return created, go.set


async def running(server: RecordingServer) -> tuple[Episode, Leave]:
    created = await server.play(agent="external")
    await server.status(created, "running")
    return created, lambda: None


async def draining(server: RecordingServer) -> tuple[Episode, Leave]:
    """Finished during a call."""
    created, leave = await calling(server)
    server.background.start_soon(server.stage.control.post, f"/episodes/{created['episode_id']}/finish")
    await server.stop_requested(created)
    return created, leave


async def calling(server: RecordingServer, **fields: Any) -> tuple[Episode, Leave]:
    """A call is in flight."""
    go = anyio.Event()

    async def slow(_: Prompted) -> AsyncIterator[Said | Exception]:
        await go.wait()
        yield Said(server.stage.encode("hm"), "stop")

    server.stage.engine.answers = [slow]
    created = await server.play(agent="external", **fields)
    await server.status(created, "running")
    server.background.start_soon(call, server, created)
    await wait_until(lambda: server.stage.engine.calls)
    return created, go.set


async def worked(server: RecordingServer) -> Episode:
    """Its agent has ended well."""
    created = await server.play()
    process = await server.provider.agent()
    await server.think(process)
    process.end(result())
    return created


async def grading(server: RecordingServer) -> tuple[Episode, Leave]:
    go = anyio.Event()

    async def slow(task: Task, work: Work) -> Grade:
        await go.wait()
        return Grade(1.0)

    server.grader.grade_it = slow
    created = await worked(server)
    await server.status(created, "grading")
    return created, go.set


async def storing(server: RecordingServer) -> tuple[Episode, Leave]:
    """The journal refuses its end."""
    server.refuse = JournalUnavailable("the disk is full")
    created = await worked(server)
    with anyio.fail_after(60):
        await server.refused.wait()

    def leave() -> None:
        server.refuse = None

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
    async with recording(tiny_model, tmp_path, monkeypatch) as server:
        created, leave = await PHASES[phase](server)
        before = server.stops.count(created["episode_id"])
        server.background.start_soon(server.stage.control.post, f"/episodes/{created['episode_id']}/{how}")
        await server.stops_asked(created, before + 1)
        leave()
        shown = await server.ended(created)
        cancelled = how == "cancel" and phase not in DECIDED
        assert (shown["status"], shown["reward"]) == (("cancelled", None) if cancelled else ("completed", 1.0))
        assert [status for episode, status in server.ends if episode == created["episode_id"]] == [shown["status"]]
        assert server.sandboxes == []
        assert not any(server.sandboxes_at_ends), "a sandbox is gone before the end is stored"
        assert len(server.grader.graded) <= 1
        await server.place_is_free()


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
async def test_many_stops_at_once_are_one_end(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    async with recording(tiny_model, tmp_path, monkeypatch) as server:
        created, leave = await PHASES[phase](server)
        path = f"/episodes/{created['episode_id']}"
        before = server.stops.count(created["episode_id"])

        async def soon() -> None:
            await server.stops_asked(created, before + 8)
            leave()

        stops = [lambda how=how: server.stage.control.post(f"{path}/{how}") for how in ("finish", "cancel") * 4]
        *answers, _ = await gathered(*stops, soon)
        shown = await server.ended(created)
        assert shown["status"] in ENDS_OF_BOTH.get(phase, {"completed", "cancelled"})
        if phase not in DECIDED:  # there each attempt that fails meanwhile is a 503
            assert {answer.json()["status"] for answer in answers} == {shown["status"]}
        assert [status for episode, status in server.ends if episode == created["episode_id"]] == [shown["status"]]
        assert server.sandboxes == []
        await server.place_is_free()


async def test_a_budget_that_ends_beside_a_finish_does_not_change_the_first_reason(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with recording(tiny_model, tmp_path, monkeypatch) as server:
        created, leave = await calling(server, limits={"max_turns": 1})
        async with server.stage.agent(created) as agent, anyio.create_task_group() as tasks:
            with pytest.raises(Exception, match="turns are used up"):
                await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "second"}])
            before = server.stops.count(created["episode_id"])
            tasks.start_soon(server.stage.post, created, "finish")
            await server.stops_asked(created, before + 1)
            leave()
        shown = await server.ended(created)
        assert (shown["status"], shown["error"]["type"]) == ("truncated", "budget_exhausted")
        assert len(server.ends) == 1


async def test_a_caller_that_goes_away_does_not_stop_the_end(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with recording(tiny_model, tmp_path, monkeypatch) as server:
        created, leave = await calling(server)
        async with anyio.create_task_group() as caller:
            caller.start_soon(server.stage.post, created, "finish")
            await server.stop_requested(created)
            caller.cancel_scope.cancel()
        leave()
        assert (await server.ended(created))["status"] == "completed"


# The server stops in each phase


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
async def test_a_shutdown_in_each_phase_leaves_no_sandbox_and_a_restart_to_tell(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    with anyio.fail_after(60):
        async with recording(tiny_model, tmp_path, monkeypatch) as server:
            created, leave = await PHASES[phase](server)
            provider = server.provider
            if phase == "draining":  # a stopping server waits for calls, too, but not for a grading

                async def for_ever(task: Task, work: Work) -> Grade:
                    await anyio.sleep_forever()
                    raise AssertionError

                server.grader.grade_it = for_ever
                leave()
    assert provider.open == []
    assert server.ends == []
    async with opened(tiny_model, tmp_path) as after:
        shown = await after.stage.get(created)
        assert (shown["status"], shown["error"]["type"]) == ("failed", "server_restarted")
        assert shown["reward"] is None


async def test_a_stop_that_needs_no_grade_is_stored_although_the_server_stops(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with recording(tiny_model, tmp_path, monkeypatch) as server:
        created, leave = await calling(server, task={"instruction": "t"})
        server.background.start_soon(server.stage.control.post, f"/episodes/{created['episode_id']}/finish")
        await server.stop_requested(created)
        leave()
    assert server.ends == [(created["episode_id"], "completed")]


# Everything at once


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
async def test_in_a_storm_of_stops_and_failures_each_episode_ends_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    pick = random.Random(seed)
    storm = Storm(pick)
    async with recording(tiny_model, tmp_path, monkeypatch, max_running=4) as server:
        server.provider.making = storm.make
        server.grader.grade_it = storm.grade
        created = [await server.play(agent=pick.choice(["external", "fake", "eager"])) for _ in range(24)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(storm.break_disks, server)
            tasks.start_soon(storm.break_sandboxes, server)
            for episode in created:
                tasks.start_soon(storm.stop, server, episode)
            ended = [await server.ended(episode) for episode in created]
            tasks.cancel_scope.cancel()
        server.refuse = None
        assert sorted(server.ends) == sorted((shown["episode_id"], shown["status"]) for shown in ended)
        assert server.provider.open == []
        for shown in ended:
            by_agent = shown["error"] is not None and shown["error"]["fault"] == "agent"
            lost = shown["status"] == "cancelled" or (shown["status"] == "failed" and not by_agent)
            assert (shown["reward"] is None) == lost, shown
        assert len({shown["status"] for shown in ended}) > 1, "the storm is varied"
        await server.place_is_free()


class Storm:
    def __init__(self, pick: random.Random) -> None:
        self._pick = pick

    async def make(self) -> None:
        await anyio.sleep(self._pick.random() * 0.05)
        if self._pick.random() < 0.2:
            raise self._pick.choice([SandboxUnavailable("no room"), RuntimeError("a bug")])

    async def grade(self, task: Task, work: Work) -> Grade:
        await anyio.sleep(self._pick.random() * 0.1)
        if self._pick.random() < 0.2:
            raise self._pick.choice([TaskFailed("no tests"), RuntimeError("a bug")])
        return Grade(1.0)

    async def break_disks(self, server: RecordingServer) -> None:
        while True:
            broken = self._pick.random() < 0.4
            server.refuse = JournalUnavailable("the disk is full") if broken else None
            await anyio.sleep(self._pick.random() * 0.05)

    async def break_sandboxes(self, server: RecordingServer) -> None:
        while True:
            await anyio.sleep(self._pick.random() * 0.05)
            for sandbox in server.provider.made:
                if self._pick.random() < 0.05:
                    sandbox.dead.set()
                for process in sandbox.processes:
                    if self._pick.random() < 0.1:
                        process.end(self._pick.choice([result(), result(1), SandboxFailed("gone")]))

    async def stop(self, server: RecordingServer, episode: Episode) -> None:
        """Finishes or cancels it until it has ended; callers often go away."""
        while True:
            await anyio.sleep(self._pick.random() * 0.5)
            with anyio.move_on_after(self._pick.choice([0.01, 0.1, 5.0])):
                how = self._pick.choice(["finish", "finish", "finish", "cancel"])
                reply = await server.stage.control.post(f"/episodes/{episode['episode_id']}/{how}")
                assert reply.status_code in (200, 503), reply.text


# Bugs


async def no_room(server: RecordingServer) -> Episode:
    async def broken() -> None:
        raise RuntimeError("a bug")

    server.provider.making = broken
    return await server.play()


async def process_breaks(server: RecordingServer) -> Episode:
    created = await server.play()
    process = await server.provider.agent()
    process.end(RuntimeError("a bug"))
    return created


async def abort_breaks(server: RecordingServer) -> Episode:
    created, leave = await calling(server)

    async def cancel() -> None:
        with anyio.fail_after(60):
            await server.stage.control.post(f"/episodes/{created['episode_id']}/cancel")
        leave()

    server.background.start_soon(cancel)
    return created


async def grader_breaks(server: RecordingServer) -> Episode:
    async def broken(task: Task, work: Work) -> Grade:
        raise RuntimeError("a bug")

    server.grader.grade_it = broken
    return await worked(server)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [no_room, process_breaks, abort_breaks, grader_breaks])
async def test_a_bug_fails_its_own_episode_and_releases_its_sandbox(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[[RecordingServer], Awaitable[Episode]],
) -> None:
    async with recording(tiny_model, tmp_path, monkeypatch) as server:
        other = await server.stage.episode()
        if broken is abort_breaks:

            def abandon(*_: object) -> None:
                raise RuntimeError("a bug")

            monkeypatch.setattr(CallPipeline, "abandon", abandon)
        created = await broken(server)
        shown = await server.ended(created)
        monkeypatch.undo()
        assert (shown["status"], shown["reward"]) == ("failed", None)
        assert shown["error"]["type"] == "internal_error"
        assert "log" in shown["error"]["message"]
        assert server.sandboxes == []
        assert (await server.stage.get(other))["status"] == "running"
        await server.place_is_free()


@pytest.mark.slow
async def test_a_bug_before_any_stop_was_requested_closes_the_model_api_before_the_end_is_stored(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(EpisodeRun, "_prepare_and_run", broken)
    async with recording(tiny_model, tmp_path, monkeypatch) as server:
        server.refuse = JournalUnavailable("the disk is full")
        created = await server.play(agent="external")
        with anyio.fail_after(60):
            await server.refused.wait()
        async with raw(created) as client:
            assert (await client.post(url(created), json=body())).status_code == 410
        server.refuse = None
        shown = await server.ended(created)
        assert (shown["status"], shown["error"]["type"]) == ("failed", "internal_error")


async def test_a_bug_in_the_journal_delays_an_end_and_loses_none(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with recording(tiny_model, tmp_path, monkeypatch) as server:
        server.refuse = RuntimeError("a bug")
        created = await worked(server)
        await server.refused.wait()
        assert server.sandboxes == []
        server.refuse = None
        assert (await server.ended(created))["status"] == "completed"
        assert len(server.grader.graded) == len(server.ends) == 1
        await server.place_is_free()


async def test_a_bug_in_the_reports_of_changes_fails_no_episode(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(*_: object) -> None:
        raise RuntimeError("a bug")

    async with recording(tiny_model, tmp_path, monkeypatch) as server:
        created = await server.play()
        process = await server.provider.agent()
        await server.think(process)
        monkeypatch.setattr(Broadcast, "publish", publish)
        process.end(result())
        shown = await server.ended(created)
        assert (shown["status"], shown["reward"]) == ("completed", 1.0)
        monkeypatch.undo()
        await server.place_is_free()


async def test_the_death_of_a_sandbox_beside_a_finish_changes_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with recording(tiny_model, tmp_path, monkeypatch) as server:
        created, leave = await draining(server)
        server.provider.made[0].dead.set()
        for _ in range(20):  # its watcher takes notice
            await anyio.lowlevel.checkpoint()
        leave()
        assert (await server.ended(created))["status"] == "completed"


async def test_an_agent_that_dies_while_its_calls_are_drained_changes_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with recording(tiny_model, tmp_path, monkeypatch) as server:
        created = await server.play(limits={"max_turns": 1})
        process = await server.provider.agent()
        assert [(await server.think(process)).status_code for _ in range(2)] == [200, 400]
        process.end(SandboxFailed("gone"))
        shown = await server.ended(created)
        assert (shown["status"], shown["error"]["type"]) == ("truncated", "budget_exhausted")
