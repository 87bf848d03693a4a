"""Episodes that the server plays itself: every step, every way out of it, and what is left behind: nothing."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
from conversation import END
from gate_support import CONTEXT, Prompted, Said, Stage, fails, says, staged
from puppets import PuppetProcess, Theatre, result, theatre
from test_life import Breaking

from turnstile_server.errors import (
    EngineUnavailable,
    FileProblem,
    SandboxFailed,
    SandboxUnavailable,
    TaskFailed,
)
from turnstile_server.grading.protocol import Grade, Work
from turnstile_server.tasks.model import Task

pytestmark = pytest.mark.anyio

TESTS = {"files": {"inline": {"test_it.py": ""}}, "expected": ["test_it.T.test"]}
TASK: dict[str, Any] = {"instruction": "Mend it.", "base": {"inline": {"a.py": "1"}}, "tests": TESTS}
PLAYED: dict[str, Any] = {"task": TASK, "agent": "puppet"}


class House:
    """A server with a theatre, and the steps that tests take."""

    def __init__(self, stage: Stage, puppets: Theatre) -> None:
        self.stage = stage
        self.puppets = puppets
        self.provider, self.grader = puppets.provider, puppets.grader

    async def play(self, **fields: Any) -> dict[str, Any]:
        return await self.stage.episode(**{**PLAYED, **fields})

    async def status(self, episode: dict[str, Any], *wanted: str) -> dict[str, Any]:
        """The episode once its status is one of ``wanted``."""
        with anyio.fail_after(60):
            while True:
                shown: dict[str, Any] = await self.stage.get(episode)
                if shown["status"] in wanted:
                    return shown
                await anyio.sleep(0.005)

    async def ended(self, episode: dict[str, Any]) -> dict[str, Any]:
        return await self.status(episode, "completed", "failed", "cancelled", "timed_out", "truncated")

    async def think(self, process: PuppetProcess, text: str = "go") -> httpx.Response:
        """One model call, as the agent's process would make it."""
        path = process.command.argv[2].removeprefix("http://127.0.0.1:8001")
        async with httpx.AsyncClient(base_url=self.stage.agent_url) as http:
            return await http.post(
                f"{path}/chat/completions",
                headers={"authorization": f"Bearer {process.command.env['KEY']}"},
                json={"model": "m", "messages": [{"role": "user", "content": text}]},
            )


@pytest.fixture
async def house(tiny_model: Path, tmp_path: Path) -> AsyncIterator[House]:
    async with opened(tiny_model, tmp_path) as found:
        yield found
        assert found.provider.open == []


@asynccontextmanager
async def opened(model: Path, folder: Path, **episodes: Any) -> AsyncIterator[House]:
    """A server on ``folder``; ``episodes``: settings of that section."""
    puppets, settings = theatre(folder / "installs"), {"watch_interval_s": 0.02, **episodes}
    async with staged(model, folder / "data", work=puppets.work, episodes=settings) as stage:
        stage.engine.answers = [says([*stage.encode("hm"), *stage.encode(END)])]
        yield House(stage, puppets)


# The whole of it


async def test_an_episode_is_played_from_queue_to_reward(house: House) -> None:
    created = await house.play(metadata={"m": 1})
    assert created["episode_key"] is None
    process = await house.provider.agent()
    assert (await house.think(process)).status_code == 200
    assert (await house.stage.get(created))["status"] == "running"
    process.end(result(0, b"done"))
    shown = await house.ended(created)
    assert (shown["status"], shown["reward"], shown["error"]) == ("completed", 1.0, None)
    assert shown["reward_components"] == {"tests": 1.0}
    assert shown["grading"] == {"passed": ["t"]}
    assert (shown["agent_exit_code"], shown["agent_output"]) == (0, "done")
    timings = shown["timings"]
    steps = [timings[name] for name in ("preparing_s", "running_s", "grading_s", "ended_s")]
    assert steps == sorted(steps)
    (sandbox,) = house.provider.made
    assert sandbox.admitted == created["episode_id"]
    assert sandbox.stopped == 1, "what the agent left running is stopped before its work is fetched"
    assert [work for _, work in house.grader.graded] == [Work(b"work", None)]


async def test_the_agent_is_told_its_instruction_its_doors_and_its_key(house: House) -> None:
    created = await house.play(env={"EXTRA": "secret-value"}, limits={"max_turns": 9})
    command = (await house.provider.agent()).command
    door = f"http://127.0.0.1:8001/e/{created['episode_id']}"
    assert command.argv == ("play", "Mend it.", f"{door}/v1", f"{door}/mcp")
    assert command.env["TURNS"] == "9"
    assert command.env["EXTRA"] == "secret-value"
    assert house.provider.made[0].files["/home/agent/instruction.md"] == b"Mend it."
    assert "secret-value" not in (await house.stage.control.get(f"/episodes/{created['episode_id']}")).text
    await house.stage.post(created, "cancel")


async def test_no_more_than_max_running_are_played_at_once(tiny_model: Path, tmp_path: Path) -> None:
    async with opened(tiny_model, tmp_path, max_running=2) as house:
        created = [await house.play() for _ in range(4)]
        processes = [await house.provider.agent(index) for index in range(2)]
        statuses = sorted([(await house.stage.get(one))["status"] for one in created])
        assert statuses == ["queued", "queued", "running", "running"]
        for process in processes:
            await house.think(process)
            process.end(result())
        for index in (2, 3):
            process = await house.provider.agent(index)
            await house.think(process)
            process.end(result())
        assert {(await house.ended(one))["status"] for one in created} == {"completed"}


async def test_an_equal_creation_is_played_once(house: House) -> None:
    first = await house.play(idempotency_key="k")
    again = await house.stage.control.post("/episodes", json={**PLAYED, "idempotency_key": "k"})
    assert again.json()["episode_id"] == first["episode_id"]
    await house.provider.agent()
    await anyio.sleep(0.05)
    assert len(house.provider.made) == 1
    await house.stage.post(first, "cancel")


async def test_a_sandbox_for_an_external_agent_is_there_when_the_episode_runs(house: House) -> None:
    created = await house.play(agent="external")
    await house.status(created, "running")
    assert created["episode_key"] is not None
    done = await house.stage.post(created, "finish")
    assert (done["status"], done["reward"]) == ("completed", 1.0)


async def test_an_external_agents_episode_fails_with_its_sandbox(house: House) -> None:
    created = await house.play(agent="external")
    await house.status(created, "running")
    house.provider.made[0].dead.set()
    shown = await house.ended(created)
    assert (shown["status"], shown["reward"]) == ("failed", None)
    assert (shown["error"]["type"], shown["error"]["fault"]) == ("sandbox_failed", "infrastructure")


# Whose fault


@pytest.mark.parametrize(
    ("calls", "exit_code", "status", "fault"),
    [(1, 0, "completed", None), (1, 7, "completed", None), (1, 1, "failed", "agent"), (0, 0, "failed", "agent")],
)
async def test_an_agents_exit_is_judged_by_its_spec_and_its_calls(
    house: House, calls: int, exit_code: int, status: str, fault: str | None
) -> None:
    created = await house.play()
    process = await house.provider.agent()
    for _ in range(calls):
        await house.think(process)
    process.end(result(exit_code, b"words of the agent"))
    shown = await house.ended(created)
    assert shown["status"] == status
    if fault:
        assert shown["error"]["fault"] == fault
        assert shown["error"]["type"] == "agent_failed"
        assert "words of the agent" in shown["error"]["message"]
        assert shown["reward"] is None
        assert house.grader.graded == []


async def test_an_agents_own_log_tells_its_failure_whatever_its_exit_code(house: House) -> None:
    created = await house.play(agent="talker")
    process = await house.provider.agent()
    assert process.command.stdin.startswith(b"Please: ")
    await house.think(process)
    process.end(result(0, b'{"type": "end", "ok": false, "why": "The door is shut."}\n'))
    shown = await house.ended(created)
    assert (shown["status"], shown["agent_exit_code"], shown["reward"]) == ("failed", 0, None)
    assert shown["error"]["message"] == "the agent says that it failed: The door is shut."


async def test_an_agent_that_gave_up_on_a_broken_engine_is_the_infrastructures_failure(house: House) -> None:
    house.stage.engine.answers = [fails(EngineUnavailable("the engine is gone"))]
    created = await house.play()
    process = await house.provider.agent()
    assert (await house.think(process)).status_code == 503
    process.end(result(0))
    shown = await house.ended(created)
    assert (shown["status"], shown["reward"]) == ("failed", None)
    assert shown["error"]["fault"] == "infrastructure"
    assert shown["error"]["type"] == "engine_unavailable"


async def test_an_agent_that_got_over_a_broken_call_is_judged_as_usual(house: House) -> None:
    good = house.stage.engine.answers[0]
    house.stage.engine.answers = [fails(EngineUnavailable("for a moment")), good]
    created = await house.play()
    process = await house.provider.agent()
    assert [(await house.think(process)).status_code for _ in range(2)] == [503, 200]
    process.end(result(0))
    assert (await house.ended(created))["status"] == "completed"


async def test_a_sandbox_that_cannot_be_made_is_the_infrastructures_failure(house: House) -> None:
    async def fail() -> None:
        raise SandboxUnavailable("no room")

    house.provider.making = fail
    shown = await house.ended(await house.play())
    assert (shown["status"], shown["error"]["fault"]) == ("failed", "infrastructure")
    assert shown["timings"]["running_s"] is None


async def test_a_set_up_that_fails_is_the_tasks_failure_and_tells_its_output(house: House) -> None:
    house.provider.execs["make it"] = result(2, b"no rule")
    shown = await house.ended(await house.play(task={**TASK, "setup": ["make it"]}))
    assert (shown["status"], shown["error"]["fault"]) == ("failed", "task")
    assert "make it" in shown["error"]["message"]
    assert "no rule" in shown["error"]["message"]


async def test_a_sandbox_that_dies_under_its_agent_is_the_infrastructures_failure(house: House) -> None:
    created = await house.play()
    process = await house.provider.agent()
    await house.think(process)
    process.end(SandboxFailed("the container is gone"))
    shown = await house.ended(created)
    assert (shown["status"], shown["error"]["fault"]) == ("failed", "infrastructure")


@pytest.mark.parametrize(
    ("error", "fault"),
    [(SandboxUnavailable("no room"), "infrastructure"), (TaskFailed("tests do not run"), "task")],
)
async def test_a_grading_that_fails_gives_no_reward(house: House, error: Exception, fault: str) -> None:
    async def fail(task: Task, work: Work) -> Grade:
        raise error

    house.grader.grade_it = fail
    created = await house.play()
    process = await house.provider.agent()
    await house.think(process)
    process.end(result())
    shown = await house.ended(created)
    assert (shown["status"], shown["reward"], shown["error"]["fault"]) == ("failed", None, fault)


async def test_a_bug_in_the_grader_ends_its_episode_and_no_other(house: House) -> None:
    async def broken(task: Task, work: Work) -> Grade:
        raise RuntimeError("a bug")

    house.grader.grade_it = broken
    created = await house.play()
    process = await house.provider.agent()
    await house.think(process)
    process.end(result())
    shown = await house.ended(created)
    assert (shown["status"], shown["reward"], shown["error"]["type"]) == ("failed", None, "internal_error")
    assert (await house.stage.episode())["status"] == "running"


async def test_work_that_cannot_be_fetched_is_the_agents_failure(house: House) -> None:
    created = await house.play()
    process = await house.provider.agent()
    await house.think(process)
    house.provider.made[0].work = FileProblem("larger than 64 MiB")
    process.end(result())
    shown = await house.ended(created)
    assert (shown["status"], shown["error"]["fault"]) == ("failed", "agent")
    assert "64 MiB" in shown["error"]["message"]


# Limits


async def test_an_agent_that_gave_up_at_the_end_of_its_context_was_truncated(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with opened(tiny_model, tmp_path) as house:
        created = await house.play()
        process = await house.provider.agent()
        await house.think(process)
        answer = await house.think(process, "word " * CONTEXT)
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        process.end(result(1))
        shown = await house.ended(created)
        assert (shown["status"], shown["reward"]) == ("truncated", 1.0)
        assert shown["error"]["type"] == "context_length_exceeded"


async def test_the_wall_counts_from_the_place_in_the_house_and_the_work_is_graded(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with opened(tiny_model, tmp_path, max_running=1) as house:
        first = await house.play(limits={"wall_s": 5})
        await house.provider.agent()
        second = await house.play(limits={"wall_s": 0.3})
        await anyio.sleep(0.5)
        assert (await house.stage.get(second))["status"] == "queued"
        await house.stage.post(first, "cancel")
        process = await house.provider.agent(1)
        shown = await house.ended(second)
        assert (shown["status"], shown["error"]["type"], shown["reward"]) == ("timed_out", "time_limit", 1.0)
        assert process.killed


async def test_an_agent_that_never_ends_is_stopped_by_the_idle_limit(house: House) -> None:
    created = await house.play(limits={"idle_s": 0.2})
    process = await house.provider.agent()
    shown = await house.ended(created)
    assert (shown["status"], shown["error"]["type"]) == ("timed_out", "time_limit")
    assert process.killed


async def test_the_end_of_a_budget_stops_the_agent_and_the_work_is_graded(house: House) -> None:
    created = await house.play(limits={"max_turns": 1})
    process = await house.provider.agent()
    assert [(await house.think(process)).status_code for _ in range(2)] == [200, 400]
    shown = await house.ended(created)
    assert (shown["status"], shown["error"]["type"], shown["reward"]) == ("truncated", "budget_exhausted", 1.0)
    assert shown["error"]["fault"] is None
    assert process.killed


# Cancelled at every stage


async def test_a_queued_episode_is_cancelled_without_a_sandbox(tiny_model: Path, tmp_path: Path) -> None:
    async with opened(tiny_model, tmp_path, max_running=1) as house:
        first = await house.play()
        await house.provider.agent()
        second = await house.play()
        assert (await house.stage.post(second, "cancel"))["status"] == "cancelled"
        assert len(house.provider.made) == 1
        await house.stage.post(first, "cancel")


async def test_a_cancellation_during_set_up_leaves_no_sandbox(house: House) -> None:
    asked = anyio.Event()

    async def for_ever() -> None:
        asked.set()
        await anyio.sleep_forever()

    house.provider.making = for_ever
    created = await house.play()
    await asked.wait()
    shown = await house.stage.post(created, "cancel")
    assert (shown["status"], shown["reward"]) == ("cancelled", None)


async def test_a_cancellation_kills_the_agent_and_grades_nothing(house: House) -> None:
    created = await house.play()
    process = await house.provider.agent()
    await house.think(process)
    shown = await house.stage.post(created, "cancel")
    assert (shown["status"], shown["reward"]) == ("cancelled", None)
    assert process.killed
    assert house.grader.graded == []
    assert house.provider.open == []


async def test_a_cancellation_while_an_end_waits_for_a_call_grades_nothing(house: House) -> None:
    answered = anyio.Event()

    async def slow(_: Prompted) -> AsyncIterator[Said | Exception]:
        await answered.wait()
        yield Said(house.stage.encode("hm"), "stop")

    house.stage.engine.answers = [slow]
    created = await house.play(agent="external")
    await house.status(created, "running")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, house, created)
        with anyio.fail_after(60):
            while not house.stage.engine.calls:  # noqa: ASYNC110 - a list, not an event
                await anyio.sleep(0.005)
        tasks.start_soon(house.stage.post, created, "finish")
        await anyio.sleep(0.1)
        tasks.start_soon(house.stage.post, created, "cancel")
        await anyio.sleep(0.1)
        answered.set()
    shown = await house.ended(created)
    assert (shown["status"], shown["reward"]) == ("cancelled", None)
    assert house.grader.graded == []


async def call(house: House, created: dict[str, Any]) -> None:
    async with house.stage.agent(created) as agent:
        with contextlib.suppress(openai.APIError):
            await agent.chat.completions.create(model="m", messages=[{"role": "user", "content": "go"}])


async def test_a_cancellation_cuts_a_grading_short(house: House) -> None:
    async def for_ever(task: Task, work: Work) -> Grade:
        await anyio.sleep_forever()
        raise AssertionError

    house.grader.grade_it = for_ever
    created = await house.play()
    process = await house.provider.agent()
    await house.think(process)
    process.end(result())
    await house.status(created, "grading")
    with anyio.fail_after(60):
        shown = await house.stage.post(created, "cancel")
    assert (shown["status"], shown["reward"]) == ("cancelled", None)


async def test_a_deletion_while_it_is_played_leaves_nothing(house: House) -> None:
    created = await house.play()
    await house.provider.agent()
    assert (await house.stage.control.delete(f"/episodes/{created['episode_id']}")).status_code == 204
    assert house.provider.open == []
    assert (await house.stage.control.get(f"/episodes/{created['episode_id']}")).status_code == 404


async def test_places_are_free_again_after_every_kind_of_end(tiny_model: Path, tmp_path: Path) -> None:
    async with opened(tiny_model, tmp_path, max_running=1) as house:
        for round_ in range(6):
            created = await house.play()
            process = await house.provider.agent(round_)
            if round_ % 3 == 0:
                await house.stage.post(created, "cancel")
            else:
                process.end(result(round_ % 3) if round_ % 2 else SandboxFailed("gone"))
            await house.ended(created)
        assert house.provider.open == []


# Ends


async def test_finish_answers_grading_while_it_takes_long_and_ends_once(tiny_model: Path, tmp_path: Path) -> None:
    async with opened(tiny_model, tmp_path, finish_wait_s=0.05) as house:
        go = anyio.Event()

        async def slow(task: Task, work: Work) -> Grade:
            await go.wait()
            return Grade(0.0, {"tests": 0.0})

        house.grader.grade_it = slow
        created = await house.play(agent="external")
        await house.status(created, "running")
        for _ in range(2):
            assert (await house.stage.post(created, "finish"))["status"] == "grading"
        go.set()
        shown = await house.ended(created)
        assert (shown["status"], shown["reward"]) == ("completed", 0.0)
        assert len(house.grader.graded) == 1


async def test_a_submission_ends_an_episode_whose_agent_says_so(house: House) -> None:
    created = await house.play(agent="eager", task={**TASK, "answer": {"value": "42"}})
    process = await house.provider.agent()
    await house.think(process)
    key = process.command.env["KEY"]
    assert house.stage.doors.tools is not None
    await house.stage.doors.tools.open_tools(created["episode_id"], key).submit("42")
    shown = await house.ended(created)
    assert shown["status"] == "completed"
    assert house.grader.graded[0][1].answer == "42"
    assert process.killed


async def test_an_end_that_the_disk_refused_is_graded_once_and_stored_later(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tiny_model, tmp_path) as house:
        breaking = Breaking(house.stage.journal, monkeypatch)
        created = await house.play()
        process = await house.provider.agent()
        await house.think(process)
        breaking.broken = True
        process.end(result())
        with anyio.fail_after(60):
            while breaking.refused < 3:  # noqa: ASYNC110 - the journal knows no event
                await anyio.sleep(0.01)
        assert (await house.stage.get(created))["status"] == "grading"
        assert house.provider.open == []
        breaking.broken = False
        shown = await house.ended(created)
        assert (shown["status"], shown["reward"]) == ("completed", 1.0)
        assert len(house.grader.graded) == 1


async def test_a_server_that_stops_leaves_no_sandbox_and_the_next_says_what_happened(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def for_ever(task: Task, work: Work) -> Grade:
        await anyio.sleep_forever()
        raise AssertionError

    async with opened(tiny_model, tmp_path, max_running=2) as house:
        house.grader.grade_it = for_ever
        playing, grading, queued = [await house.play() for _ in range(3)]
        agents = [await house.provider.agent(index) for index in range(2)]  # in either order
        (process,) = [one for one in agents if grading["episode_id"] in one.command.argv[2]]
        await house.think(process)
        process.end(result())
        await house.status(grading, "grading")
        provider = house.provider
    assert provider.open == []
    async with opened(tiny_model, tmp_path) as house:
        for episode in (playing, grading, queued):
            shown = await house.stage.get(episode)
            assert (shown["status"], shown["reward"]) == ("failed", None)
            assert shown["error"]["type"] == "server_restarted"
            assert shown["error"]["fault"] == "infrastructure"
        assert len(await house.stage.get(grading, "/turns")) == 1


async def test_a_sandbox_that_cannot_be_destroyed_keeps_no_episode_from_ending(house: House) -> None:
    created = await house.play()
    process = await house.provider.agent()
    await house.think(process)

    async def stuck() -> None:
        house.provider.made[0].destroyed += 1
        raise RuntimeError("the engine says no")

    house.provider.made[0].destroy = stuck  # type: ignore[method-assign]
    process.end(result())
    assert (await house.ended(created))["reward"] == 1.0
    assert (await house.stage.episode())["status"] == "running"


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
    ("fields", "status", "told"),
    [
        ({"agent": "nobody"}, 422, "puppet"),
        ({"task": {"id": "no-such-task"}}, 422, "no-such-task"),
        ({"task": {**TASK, "sandbox": {"memory_mb": 10**6}}}, 422, "sandboxes.memory_mb"),
        ({"agent": "external", "env": {"A": "b"}}, 422, "env"),
    ],
)
async def test_what_cannot_be_played_is_refused_by_name(
    house: House, fields: dict[str, Any], status: int, told: str
) -> None:
    answer = await house.stage.control.post("/episodes", json={**PLAYED, **fields})
    assert answer.status_code == status
    assert told in answer.json()["error"]["message"]
    assert house.provider.specs == []
