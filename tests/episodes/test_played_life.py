"""Episodes whose agent the server launches: each step, each way to end, and nothing left behind."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
from conversation import END
from episode_clock import EpisodeClock
from fake_backends import FakeBackends, FakeProcess, fake_backends, result
from gate_support import CONTEXT, Prompted, Said, Stage, fails, says, staged
from test_life import Breaking

from local import ROOT
from turnstile_server.episodes.run import EpisodeRun
from turnstile_server.episodes.service import Episodes
from turnstile_server.errors import (
    EngineUnavailable,
    FileProblem,
    SandboxDeath,
    SandboxFailed,
    SandboxUnavailable,
    TaskFailed,
)
from turnstile_server.grading.protocol import Grade, Work
from turnstile_server.kinds.worlds.episode_world import Worlds
from turnstile_server.tasks.model import Task
from waiting import wait_until

pytestmark = pytest.mark.anyio

TESTS = {"files": {"inline": {"test_it.py": ""}}, "expected": ["test_it.T.test"]}
TASK: dict[str, Any] = {"instruction": "Mend it.", "base": {"inline": {"a.py": "1"}}, "tests": TESTS}
PLAYED: dict[str, Any] = {"task": TASK, "agent": "fake"}


class EpisodeServer:
    """A server with fake sandboxes, agents and grader, and the steps that tests take."""

    def __init__(self, stage: Stage, fakes: FakeBackends) -> None:
        self.stage = stage
        self.fakes = fakes
        self.provider, self.grader = fakes.provider, fakes.grader

    async def play(self, **fields: Any) -> dict[str, Any]:
        return await self.stage.episode(**{**PLAYED, **fields})

    async def status(self, episode: dict[str, Any], *wanted: str) -> dict[str, Any]:
        """The episode once its status is one of ``wanted``."""

        async def as_wanted() -> dict[str, Any] | None:
            shown: dict[str, Any] = await self.stage.get(episode)
            return shown if shown["status"] in wanted else None

        shown = await wait_until(as_wanted)
        assert shown is not None
        return shown

    @property
    def running(self) -> dict[str, EpisodeRun]:
        """The episodes that have not ended, as the server has them."""
        episodes = self.stage.apps.tools
        assert isinstance(episodes, Episodes)
        return episodes._running

    async def stop_requested(self, episode: dict[str, Any], status: str | None = None) -> None:
        """Returns when its end was asked for, with this ``status``."""

        def stopping() -> bool:
            run = self.running.get(episode["episode_id"])
            stop = None if run is None else run._life.stop
            return run is None or (stop is not None and status in (None, stop.status.value))

        await wait_until(stopping)

    async def ended(self, episode: dict[str, Any]) -> dict[str, Any]:
        return await self.status(episode, "completed", "failed", "cancelled", "timed_out", "truncated")

    async def think(self, process: FakeProcess, text: str = "go") -> httpx.Response:
        """One model call, as the agent's process would make it."""
        path = process.command.argv[2].removeprefix("http://127.0.0.1:8001")
        async with httpx.AsyncClient(base_url=self.stage.agent_url, timeout=60) as http:
            return await http.post(
                f"{path}/chat/completions",
                headers={"authorization": f"Bearer {process.command.env['KEY']}"},
                json={"model": "m", "messages": [{"role": "user", "content": text}]},
            )


@pytest.fixture
async def server(tiny_model: Path, tmp_path: Path) -> AsyncIterator[EpisodeServer]:
    async with opened(tiny_model, tmp_path) as found:
        yield found
        assert found.provider.open == []


@asynccontextmanager
async def opened(model: Path, folder: Path, **episodes: Any) -> AsyncIterator[EpisodeServer]:
    """A server on ``folder``; ``episodes``: settings of that section."""
    fakes, settings = fake_backends(folder / "installs"), {"watch_interval_s": 0.02, **episodes}
    async with staged(model, folder / "data", work=fakes.backends, episodes=settings) as stage:
        stage.engine.answers = [says([*stage.encode("hm"), *stage.encode(END)])]
        yield EpisodeServer(stage, fakes)


# From the queue to the reward


async def test_an_episode_is_played_from_queue_to_reward(server: EpisodeServer) -> None:
    created = await server.play(metadata={"m": 1})
    assert created["episode_key"] is None
    process = await server.provider.agent()
    assert (await server.think(process)).status_code == 200
    assert (await server.stage.get(created))["status"] == "running"
    process.end(result(0, b"done"))
    shown = await server.ended(created)
    assert (shown["status"], shown["reward"], shown["error"]) == ("completed", 1.0, None)
    assert shown["reward_components"] == {"tests": 1.0}
    assert shown["grading"] == {"passed": ["t"]}
    assert (shown["agent_exit_code"], shown["agent_output"]) == (0, "done")
    timings = shown["timings"]
    steps = [timings[name] for name in ("preparing_s", "running_s", "grading_s", "ended_s")]
    assert steps == sorted(steps)
    (sandbox,) = server.provider.made
    assert sandbox.admitted == created["episode_id"]
    assert sandbox.stopped == 1, "what the agent left running is stopped before its work is fetched"
    assert [(work.archive, work.answer) for _, work in server.grader.graded] == [(b"work", None)]


async def test_the_agent_gets_its_instruction_its_urls_and_its_key(server: EpisodeServer) -> None:
    created = await server.play(env={"EXTRA": "secret-value"}, limits={"max_turns": 9})
    command = (await server.provider.agent()).command
    url = f"http://127.0.0.1:8001/e/{created['episode_id']}"
    assert command.argv == ("play", "Mend it.", f"{url}/v1", f"{url}/mcp")
    assert command.env["TURNS"] == "9"
    assert command.env["EXTRA"] == "secret-value"
    assert server.provider.made[0].files["/home/agent/instruction.md"] == b"Mend it."
    assert "secret-value" not in (await server.stage.control.get(f"/episodes/{created['episode_id']}")).text
    await server.stage.post(created, "cancel")


@pytest.mark.slow
async def test_what_a_stopped_agent_had_printed_is_in_its_record(server: EpisodeServer) -> None:
    created = await server.play(limits={"wall_s": 0.2})
    (await server.provider.agent()).printed = b"waiting for a server"
    shown = await server.ended(created)
    assert (shown["status"], shown["agent_exit_code"]) == ("timed_out", None)
    assert shown["agent_output"] == "waiting for a server"


@pytest.mark.parametrize("stopped", [True, False])
async def test_a_key_that_an_agent_prints_is_not_in_its_record(server: EpisodeServer, stopped: bool) -> None:
    created = await server.play(limits={"wall_s": 0.2 if stopped else 60})
    process = await server.provider.agent()
    key = process.command.env["KEY"]
    process.printed = f"KEY={key} URL=x".encode()
    if not stopped:
        process.end(result(1, process.printed))
    shown = await server.ended(created)
    assert shown["agent_output"] == "KEY=[the episode's key] URL=x"
    assert key not in json.dumps(shown)


async def test_no_more_than_max_running_are_played_at_once(tiny_model: Path, tmp_path: Path) -> None:
    async with opened(tiny_model, tmp_path, max_running=2) as server:
        created = [await server.play() for _ in range(4)]
        processes = [await server.provider.agent(index) for index in range(2)]
        statuses = sorted([(await server.stage.get(one))["status"] for one in created])
        assert statuses == ["queued", "queued", "running", "running"]
        for process in processes:
            await server.think(process)
            process.end(result())
        for index in (2, 3):
            process = await server.provider.agent(index)
            await server.think(process)
            process.end(result())
        assert {(await server.ended(one))["status"] for one in created} == {"completed"}


async def test_an_equal_creation_is_played_once(server: EpisodeServer) -> None:
    first = await server.play(idempotency_key="k")
    again = await server.stage.control.post("/episodes", json={**PLAYED, "idempotency_key": "k"})
    assert again.json()["episode_id"] == first["episode_id"]
    await server.provider.agent()
    # A second one would be made before an episode that was created later.
    other = await server.play()
    await server.provider.agent(1)
    assert len(server.provider.made) == 2
    await server.stage.post(other, "cancel")
    await server.stage.post(first, "cancel")


async def test_a_sandbox_for_an_external_agent_is_there_when_the_episode_runs(server: EpisodeServer) -> None:
    created = await server.play(agent="external")
    await server.status(created, "running")
    assert created["episode_key"] is not None
    done = await server.stage.post(created, "finish")
    assert (done["status"], done["reward"]) == ("completed", 1.0)


async def test_an_external_agents_episode_fails_with_its_sandbox(server: EpisodeServer) -> None:
    created = await server.play(agent="external")
    await server.status(created, "running")
    server.provider.made[0].dead.set()
    shown = await server.ended(created)
    assert (shown["status"], shown["reward"]) == ("failed", None)
    assert (shown["error"]["type"], shown["error"]["fault"]) == ("sandbox_failed", "infrastructure")


# Whose fault a failure is


@pytest.mark.parametrize(
    ("calls", "exit_code", "status", "fault"),
    [(1, 0, "completed", None), (1, 7, "completed", None), (1, 1, "failed", "agent"), (0, 0, "failed", "agent")],
)
async def test_an_agents_exit_is_judged_by_its_spec_and_its_calls(
    server: EpisodeServer, calls: int, exit_code: int, status: str, fault: str | None
) -> None:
    created = await server.play()
    process = await server.provider.agent()
    for _ in range(calls):
        await server.think(process)
    process.end(result(exit_code, b"words of the agent"))
    shown = await server.ended(created)
    assert shown["status"] == status
    if fault:
        assert shown["error"]["fault"] == fault
        assert shown["error"]["type"] == "agent_failed"
        assert "words of the agent" in shown["error"]["message"]
        assert (shown["reward"], shown["reward_components"]) == (0.0, {"tests": 0.0})
        assert "words of the agent" in shown["grading"]["summary"][0]
        assert server.grader.graded == []


async def test_an_agents_own_log_decides_before_its_exit_code(server: EpisodeServer) -> None:
    created = await server.play(agent="talker")
    process = await server.provider.agent()
    assert process.command.stdin.startswith(b"Please: ")
    await server.think(process)
    process.end(result(0, b'{"type": "end", "ok": false, "why": "The file is gone."}\n'))
    shown = await server.ended(created)
    assert (shown["status"], shown["agent_exit_code"], shown["reward"]) == ("failed", 0, 0.0)
    assert shown["error"]["message"] == "the agent says that it failed: The file is gone."


async def test_half_characters_in_an_agents_log_keep_no_episode_from_ending(server: EpisodeServer) -> None:
    """JSON may hold them, the record may not: its end could never be stored."""
    created = await server.play(agent="talker")
    process = await server.provider.agent()
    await server.think(process)
    process.end(result(0, b'{"type": "end", "ok": false, "why": "gone \\ud83d"}\n'))
    shown = await server.ended(created)
    assert (shown["status"], shown["reward"]) == ("failed", 0.0)
    assert "gone \\ud83d" in shown["error"]["message"]


async def test_half_characters_in_a_grades_details_keep_no_episode_from_ending(server: EpisodeServer) -> None:
    async def quoting(task: Task, work: Work) -> Grade:
        return Grade(0.0, {"tests": 0.0}, {"said": ["\ud83d", {"\udcff": "\udcff"}], "n": 1})

    server.grader.grade_it = quoting
    created = await server.play()
    process = await server.provider.agent()
    await server.think(process)
    process.end(result())
    shown = await server.ended(created)
    assert (shown["reward"], shown["grading"]["said"][0]) == (0.0, "\\ud83d")


@pytest.mark.slow
async def test_an_agent_that_gave_up_on_a_broken_engine_is_the_infrastructures_failure(
    server: EpisodeServer,
) -> None:
    server.stage.engine.answers = [fails(EngineUnavailable("the engine is gone"))]
    created = await server.play()
    process = await server.provider.agent()
    assert (await server.think(process)).status_code == 503
    process.end(result(0))
    shown = await server.ended(created)
    assert (shown["status"], shown["reward"]) == ("failed", None)
    assert shown["error"]["fault"] == "infrastructure"
    assert shown["error"]["type"] == "engine_unavailable"


async def test_an_agent_that_got_over_a_broken_call_is_judged_as_usual(server: EpisodeServer) -> None:
    good = server.stage.engine.answers[0]
    server.stage.engine.answers = [fails(EngineUnavailable("for a moment")), good]
    created = await server.play()
    process = await server.provider.agent()
    assert [(await server.think(process)).status_code for _ in range(2)] == [503, 200]
    process.end(result(0))
    assert (await server.ended(created))["status"] == "completed"


@pytest.mark.slow
async def test_a_sandbox_that_cannot_be_made_is_the_infrastructures_failure(server: EpisodeServer) -> None:
    async def fail() -> None:
        raise SandboxUnavailable("no room")

    server.provider.making = fail
    shown = await server.ended(await server.play())
    assert (shown["status"], shown["error"]["fault"]) == ("failed", "infrastructure")
    assert shown["timings"]["running_s"] is None


async def test_a_set_up_that_fails_is_the_tasks_failure_and_tells_its_output(server: EpisodeServer) -> None:
    server.provider.execs["make it"] = result(2, b"no rule")
    shown = await server.ended(await server.play(task={**TASK, "setup": ["make it"]}))
    assert (shown["status"], shown["error"]["fault"]) == ("failed", "task")
    assert "make it" in shown["error"]["message"]
    assert "no rule" in shown["error"]["message"]


_AS_THE_AGENTS = ("agent_failed", "agent", 0.0)
_AS_THE_MACHINES = ("sandbox_failed", "infrastructure", None)


@pytest.mark.parametrize(
    ("death", "as_whose"),
    [
        (SandboxDeath.INSIDE, _AS_THE_AGENTS),
        (SandboxDeath.MEMORY, _AS_THE_AGENTS),
        (SandboxDeath.OUTSIDE, _AS_THE_MACHINES),
    ],
)
async def test_a_sandbox_that_dies_under_its_agent_is_the_agents_failure_unless_something_outside_ended_it(
    server: EpisodeServer, death: SandboxDeath, as_whose: tuple[str, str, float | None]
) -> None:
    created = await server.play()
    process = await server.provider.agent()
    await server.think(process)
    process.end(SandboxFailed.of(death, "the container is gone"))
    shown = await server.ended(created)
    assert (shown["error"]["type"], shown["error"]["fault"], shown["reward"]) == as_whose
    assert shown["status"] == "failed"
    assert "the container is gone" in shown["error"]["message"]
    assert shown["error"]["detail"] == {"death": death.value}


@pytest.mark.parametrize(
    ("death", "status", "reward"),
    [(SandboxDeath.MEMORY, "completed", 0.0), (SandboxDeath.OUTSIDE, "failed", None)],
)
async def test_a_sandbox_that_dies_while_its_work_is_fetched_is_judged_alike(
    server: EpisodeServer, death: SandboxDeath, status: str, reward: float | None
) -> None:
    created = await server.play()
    process = await server.provider.agent()
    await server.think(process)
    server.provider.made[0].work = SandboxFailed.of(death, "the container is gone")
    process.end(result())
    shown = await server.ended(created)
    assert (shown["status"], shown["reward"]) == (status, reward)


@pytest.mark.slow
async def test_a_sandbox_that_dies_before_its_agent_runs_is_the_infrastructures_failure(
    server: EpisodeServer,
) -> None:
    server.provider.write_error = SandboxFailed("the container is gone")
    shown = await server.ended(await server.play())
    assert (shown["status"], shown["reward"]) == ("failed", None)
    assert shown["error"]["fault"] == "infrastructure"


@pytest.mark.parametrize(
    ("error", "fault"),
    [(SandboxUnavailable("no room"), "infrastructure"), (TaskFailed("tests do not run"), "task")],
)
async def test_a_grading_that_fails_gives_no_reward(server: EpisodeServer, error: Exception, fault: str) -> None:
    async def fail(task: Task, work: Work) -> Grade:
        raise error

    server.grader.grade_it = fail
    created = await server.play()
    process = await server.provider.agent()
    await server.think(process)
    process.end(result())
    shown = await server.ended(created)
    assert (shown["status"], shown["reward"], shown["error"]["fault"]) == ("failed", None, fault)


@pytest.mark.parametrize(
    ("error", "told"), [(RuntimeError("a bug"), "internal_error"), (MemoryError(), "server_exhausted")]
)
async def test_a_bug_or_a_shortage_in_the_grader_ends_its_episode_and_no_other(
    server: EpisodeServer, error: Exception, told: str
) -> None:
    async def broken(task: Task, work: Work) -> Grade:
        raise error

    server.grader.grade_it = broken
    created = await server.play()
    process = await server.provider.agent()
    await server.think(process)
    process.end(result())
    shown = await server.ended(created)
    assert (shown["status"], shown["reward"], shown["error"]["type"]) == ("failed", None, told)
    assert (await server.stage.episode())["status"] == "running"


@pytest.mark.parametrize(
    ("error", "told"), [(RuntimeError("a bug"), "internal_error"), (MemoryError(), "server_exhausted")]
)
@pytest.mark.parametrize("turns", [0, 1])
async def test_an_agent_that_gives_up_after_a_bug_of_the_gate_is_not_scored(
    server: EpisodeServer, error: Exception, told: str, turns: int
) -> None:
    created = await server.play()
    process = await server.provider.agent()
    for _ in range(turns):
        await server.think(process)
    server.stage.engine.answers = [fails(error)]
    assert (await server.think(process)).status_code in (500, 503)
    process.end(result(1))
    shown = await server.ended(created)
    assert (shown["status"], shown["reward"], shown["error"]["type"]) == ("failed", None, told)


async def test_work_that_cannot_be_fetched_scores_0(server: EpisodeServer) -> None:
    created = await server.play()
    process = await server.provider.agent()
    await server.think(process)
    server.provider.made[0].work = FileProblem("larger than 64 MiB")
    process.end(result())
    shown = await server.ended(created)
    assert (shown["status"], shown["error"], shown["reward"]) == ("completed", None, 0.0)
    assert "64 MiB" in shown["grading"]["summary"][0]


# Limits


async def test_an_agent_that_gave_up_at_the_end_of_its_context_was_truncated(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with opened(tiny_model, tmp_path) as server:
        created = await server.play()
        process = await server.provider.agent()
        await server.think(process)
        answer = await server.think(process, "word " * CONTEXT)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        process.end(result(1))
        shown = await server.ended(created)
        assert (shown["status"], shown["reward"]) == ("truncated", 1.0)
        assert shown["error"]["type"] == "context_length_exceeded"


async def test_the_wall_limit_counts_from_the_end_of_the_queue_and_the_work_is_graded(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = EpisodeClock(monkeypatch)
    async with opened(tiny_model, tmp_path, max_running=1) as server:
        first = await server.play(limits={"wall_s": 6000})
        await server.provider.agent()
        second = await server.play(limits={"wall_s": 600})
        await clock.pass_time(1200)
        assert (await server.stage.get(second))["status"] == "queued"
        await server.stage.post(first, "cancel")
        process = await server.provider.agent(1)
        await clock.pass_time(600)
        shown = await server.ended(second)
        assert (shown["status"], shown["error"]["type"], shown["reward"]) == ("timed_out", "time_limit", 1.0)
        assert process.killed


async def test_an_agent_that_never_ends_is_stopped_by_the_idle_limit(
    server: EpisodeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = EpisodeClock(monkeypatch)
    created = await server.play(limits={"idle_s": 600})
    process = await server.provider.agent()
    await clock.pass_time(600)
    shown = await server.ended(created)
    assert (shown["status"], shown["error"]["type"]) == ("timed_out", "time_limit")
    assert process.killed


@pytest.mark.slow
async def test_the_end_of_a_budget_stops_the_agent_and_the_work_is_graded(server: EpisodeServer) -> None:
    created = await server.play(limits={"max_turns": 1})
    process = await server.provider.agent()
    assert [(await server.think(process)).status_code for _ in range(2)] == [200, 400]
    shown = await server.ended(created)
    assert (shown["status"], shown["error"]["type"], shown["reward"]) == ("truncated", "budget_exhausted", 1.0)
    assert shown["error"]["fault"] is None
    assert process.killed


# Cancelled at every stage


async def test_a_queued_episode_is_cancelled_without_a_sandbox(tiny_model: Path, tmp_path: Path) -> None:
    async with opened(tiny_model, tmp_path, max_running=1) as server:
        first = await server.play()
        await server.provider.agent()
        second = await server.play()
        assert (await server.stage.post(second, "cancel"))["status"] == "cancelled"
        assert len(server.provider.made) == 1
        await server.stage.post(first, "cancel")


async def test_a_cancellation_during_set_up_leaves_no_sandbox(server: EpisodeServer) -> None:
    asked = anyio.Event()

    async def for_ever() -> None:
        asked.set()
        await anyio.sleep_forever()

    server.provider.making = for_ever
    created = await server.play()
    await asked.wait()
    shown = await server.stage.post(created, "cancel")
    assert (shown["status"], shown["reward"]) == ("cancelled", None)


async def test_a_cancellation_kills_the_agent_and_grades_nothing(server: EpisodeServer) -> None:
    created = await server.play()
    process = await server.provider.agent()
    await server.think(process)
    shown = await server.stage.post(created, "cancel")
    assert (shown["status"], shown["reward"]) == ("cancelled", None)
    assert process.killed
    assert server.grader.graded == []
    assert server.provider.open == []


async def test_a_cancellation_while_an_end_waits_for_a_call_grades_nothing(server: EpisodeServer) -> None:
    answered = anyio.Event()

    async def slow(_: Prompted) -> AsyncIterator[Said | Exception]:
        await answered.wait()
        yield Said(server.stage.encode("hm"), "stop")

    server.stage.engine.answers = [slow]
    created = await server.play(agent="external")
    await server.status(created, "running")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, server, created)
        await wait_until(lambda: server.stage.engine.calls)
        tasks.start_soon(server.stage.post, created, "finish")
        await server.stop_requested(created)
        tasks.start_soon(server.stage.post, created, "cancel")
        await server.stop_requested(created, "cancelled")
        answered.set()
    shown = await server.ended(created)
    assert (shown["status"], shown["reward"]) == ("cancelled", None)
    assert server.grader.graded == []


async def call(server: EpisodeServer, created: dict[str, Any]) -> None:
    async with server.stage.agent(created) as agent:
        with contextlib.suppress(openai.APIError):
            await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])


async def test_a_cancellation_cuts_a_grading_short(server: EpisodeServer) -> None:
    async def for_ever(task: Task, work: Work) -> Grade:
        await anyio.sleep_forever()
        raise AssertionError

    server.grader.grade_it = for_ever
    created = await server.play()
    process = await server.provider.agent()
    await server.think(process)
    process.end(result())
    await server.status(created, "grading")
    with anyio.fail_after(60):
        shown = await server.stage.post(created, "cancel")
    assert (shown["status"], shown["reward"]) == ("cancelled", None)


async def test_a_deletion_while_it_is_played_leaves_nothing(server: EpisodeServer) -> None:
    created = await server.play()
    await server.provider.agent()
    assert (await server.stage.control.delete(f"/episodes/{created['episode_id']}")).status_code == 204
    assert server.provider.open == []
    assert (await server.stage.control.get(f"/episodes/{created['episode_id']}")).status_code == 404


async def test_places_are_free_again_after_every_kind_of_end(tiny_model: Path, tmp_path: Path) -> None:
    async with opened(tiny_model, tmp_path, max_running=1) as server:
        for round_ in range(6):
            created = await server.play()
            process = await server.provider.agent(round_)
            if round_ % 3 == 0:
                await server.stage.post(created, "cancel")
            else:
                process.end(result(round_ % 3) if round_ % 2 else SandboxFailed("gone"))
            await server.ended(created)
        assert server.provider.open == []


# Ends


async def test_finish_answers_grading_while_it_takes_long_and_ends_once(tiny_model: Path, tmp_path: Path) -> None:
    async with opened(tiny_model, tmp_path, finish_wait_s=0.05) as server:
        go = anyio.Event()

        async def slow(task: Task, work: Work) -> Grade:
            await go.wait()
            return Grade(0.0, {"tests": 0.0})

        server.grader.grade_it = slow
        created = await server.play(agent="external")
        await server.status(created, "running")
        for _ in range(2):
            assert (await server.stage.post(created, "finish"))["status"] == "grading"
        go.set()
        shown = await server.ended(created)
        assert (shown["status"], shown["reward"]) == ("completed", 0.0)
        assert len(server.grader.graded) == 1


async def test_a_submission_ends_an_episode_whose_agent_says_so(server: EpisodeServer) -> None:
    created = await server.play(agent="eager", task={**TASK, "answer": {"value": "42"}})
    process = await server.provider.agent()
    await server.think(process)
    key = process.command.env["KEY"]
    assert server.stage.apps.tools is not None
    await server.stage.apps.tools.open_tools(created["episode_id"], key).submit("42")
    shown = await server.ended(created)
    assert shown["status"] == "completed"
    assert shown["why"].endswith("; the agent ended with its answer after 1 turn")
    assert server.grader.graded[0][1].answer == "42"
    assert process.killed


@pytest.mark.slow
async def test_a_submission_that_a_user_answers_ends_nothing_until_the_conversation_is_over(
    tiny_model: Path, tmp_path: Path
) -> None:
    source = str(ROOT / "examples" / "worlds" / "refund_desk.py")
    fakes = fake_backends(tmp_path / "installs", tasks={"sources": (source,)})
    async with staged(tiny_model, tmp_path / "data", work=fakes.backends, episodes={}) as stage:
        stage.engine.answers = [says([*stage.encode("hm"), *stage.encode(END)])]
        server = EpisodeServer(stage, fakes)
        created = await server.play(agent="eager", task={"id": "refund-0"})
        process = await server.provider.agent()
        await server.think(process)
        assert stage.apps.tools is not None
        tools = stage.apps.tools.open_tools(created["episode_id"], process.command.env["KEY"])
        assert tools.has_user
        assert tools.sandbox is None, "the agent's home is no place for its tools"
        assert [tool.spec.name for tool in tools.own_tools] == ["list_orders", "refund"]
        for _ in range(2):
            assert await tools.submit("Hello?") is not None
            assert (await stage.get(created))["status"] == "running"
        assert await tools.submit("Goodbye.") is None
        shown = await server.ended(created)
        assert shown["status"] == "completed"
        ((task, work),) = server.grader.graded
        assert (task, work.answer) == ("refund-0", "Goodbye.")
        assert work.environment_scores == {"state": 0.0, "policy": 1.0}
        assert not fakes.backends.shared.get(Worlds, lambda: pytest.fail("no world was opened")).open_worlds
        assert shown["instruction"].startswith("You work at the refund desk")


@pytest.mark.slow
async def test_an_end_that_the_disk_refused_is_graded_once_and_stored_later(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tiny_model, tmp_path) as server:
        breaking = Breaking(server.stage.journal, monkeypatch)
        created = await server.play()
        process = await server.provider.agent()
        await server.think(process)
        breaking.broken = True
        process.end(result())
        await wait_until(lambda: breaking.refused >= 3)
        assert (await server.stage.get(created))["status"] == "grading"
        assert server.provider.open == []
        breaking.broken = False
        shown = await server.ended(created)
        assert (shown["status"], shown["reward"]) == ("completed", 1.0)
        assert len(server.grader.graded) == 1


@pytest.mark.slow
async def test_a_server_that_stops_leaves_no_sandbox_and_the_next_says_what_happened(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def for_ever(task: Task, work: Work) -> Grade:
        await anyio.sleep_forever()
        raise AssertionError

    async with opened(tiny_model, tmp_path, max_running=2) as server:
        server.grader.grade_it = for_ever
        playing, grading, queued = [await server.play() for _ in range(3)]
        agents = [await server.provider.agent(index) for index in range(2)]  # in either order
        (process,) = [one for one in agents if grading["episode_id"] in one.command.argv[2]]
        await server.think(process)
        process.end(result())
        await server.status(grading, "grading")
        provider = server.provider
    assert provider.open == []
    async with opened(tiny_model, tmp_path) as server:
        for episode in (playing, grading, queued):
            shown = await server.stage.get(episode)
            assert (shown["status"], shown["reward"]) == ("failed", None)
            assert shown["error"]["type"] == "server_restarted"
            assert shown["error"]["fault"] == "infrastructure"
        assert len(await server.stage.get(grading, "/turns")) == 1


async def test_a_sandbox_that_cannot_be_destroyed_keeps_no_episode_from_ending(server: EpisodeServer) -> None:
    created = await server.play()
    process = await server.provider.agent()
    await server.think(process)

    async def stuck() -> None:
        server.provider.made[0].destroyed += 1
        raise RuntimeError("the engine says no")

    server.provider.made[0].destroy = stuck  # type: ignore[method-assign]
    process.end(result())
    assert (await server.ended(created))["reward"] == 1.0
    assert (await server.stage.episode())["status"] == "running"


# Refused before anything is spent


async def test_without_sandboxes_what_needs_one_is_refused_with_what_to_do(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with staged(tiny_model, tmp_path, sandboxes={"kind": "none"}) as stage:
        for fields in (PLAYED | {"agent": "tool-loop"}, {"task": TASK}):
            answer = await stage.control.post("/episodes", json=fields)
            assert (answer.status_code, answer.json()["error"]["type"]) == (422, "invalid_value")
            assert "sandboxes.kind" in answer.json()["error"]["message"]
        assert (await stage.episode())["status"] == "running"


@pytest.mark.parametrize(
    ("fields", "status", "named"),
    [
        ({"agent": "nobody"}, 422, "fake"),
        ({"task": {"id": "no-such-task"}}, 422, "no-such-task"),
        ({"task": {**TASK, "sandbox": {"memory_mb": 10**6}}}, 422, "sandboxes.memory_mb"),
        ({"agent": "external", "env": {"A": "b"}}, 422, "env"),
    ],
)
async def test_what_cannot_be_played_is_refused_by_name(
    server: EpisodeServer, fields: dict[str, Any], status: int, named: str
) -> None:
    answer = await server.stage.control.post("/episodes", json={**PLAYED, **fields})
    assert answer.status_code == status
    assert named in answer.json()["error"]["message"]
    assert server.provider.specs == []
