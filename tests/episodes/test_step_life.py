"""Episodes of several steps with fake sandboxes, agents and grader: each way through them and out of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from conversation import END
from fake_backends import FAKE_AGENT, FakeProcess, fake_backends, result
from gate_support import Prompted, Said, says, staged
from harbor_support import loaded, steps_folder
from test_played_life import EpisodeServer

from turnstile.models import ForkOrigin, Limits
from turnstile_server.episodes.fork_point import ForkPoint
from turnstile_server.episodes.plan import Plan, forked
from turnstile_server.errors import FileProblem, SandboxUnavailable, Unprocessable
from turnstile_server.grading.protocol import Grade, Work
from turnstile_server.tasks.model import Task
from waiting import wait_until

pytestmark = pytest.mark.anyio

TASK = {"id": "three-steps"}


@asynccontextmanager
async def opened(model: Path, folder: Path, **changes: str) -> AsyncIterator[EpisodeServer]:
    source = steps_folder(folder / "tasks" / TASK["id"], changes)
    fakes = fake_backends(folder / "installs", tasks={"sources": [str(source)]})
    settings = {"watch_interval_s": 0.02}
    async with staged(model, folder / "data", work=fakes.backends, episodes=settings) as stage:
        stage.engine.answers = [says([*stage.encode("hm"), *stage.encode(END)])]
        yield EpisodeServer(stage, fakes)
    assert fakes.provider.open == []


@pytest.fixture
async def server(tiny_model: Path, tmp_path: Path) -> AsyncIterator[EpisodeServer]:
    async with opened(tiny_model, tmp_path) as found:
        yield found


async def begin(server: EpisodeServer, **fields: Any) -> dict[str, Any]:
    return await server.play(task=TASK, **fields)


async def agent(server: EpisodeServer, step: int) -> FakeProcess:
    """That of a step, once it runs, after a model call."""
    await server.provider.agent()
    await wait_until(lambda: len(server.provider.made[0].processes) > step)
    process = server.provider.made[0].processes[step]
    assert (await server.think(process)).status_code == 200
    return process


def graded_as(server: EpisodeServer, **rewards: float) -> list[str]:
    """Makes the grader give these; the instructions that it is asked for, in order."""
    asked: list[str] = []

    async def grade(task: Task, work: Work) -> Grade:
        asked.append(task.instruction.strip())
        reward = rewards[task.instruction.split()[-1].strip(".")]
        return Grade(reward, {"script": reward}, {"script": {"rewards": {"reward": reward}}})

    server.grader.grade_it = grade
    return asked


async def test_each_step_has_its_instruction_its_agent_and_its_grade(server: EpisodeServer) -> None:
    asked = graded_as(server, one=1.0, two=0.5, three=0.0)
    created = await begin(server)
    for index, name in enumerate(("one", "two", "three")):
        process = await agent(server, index)
        assert process.command.argv[1] == f"Do step {name}.\n"
        if name == "two":
            assert b"two-has-begun" in server.provider.made[0].files["/workspace"], "its files, before its agent"
        process.end(result(0, name.encode()))
    shown = await server.ended(created)
    assert (shown["status"], shown["reward"], shown["agent_output"]) == ("completed", 0.5, "three")
    assert shown["reward_components"] == {"one": 1.0, "two": 0.5, "three": 0.0}
    assert asked == ["Do step one.", "Do step two.", "Do step three."]
    assert server.provider.made[0].stopped == 3
    assert len(server.provider.made) == 1


async def test_a_submission_ends_the_step_of_an_agent_whose_spec_says_so(server: EpisodeServer) -> None:
    graded_as(server, one=1.0, two=1.0, three=1.0)
    created = await begin(server, agent="eager")
    for index in range(3):
        process = await agent(server, index)
        assert server.stage.apps.tools is not None
        tools = server.stage.apps.tools.open_tools(created["episode_id"], process.command.env["KEY"])
        await tools.submit(str(index))
    shown = await server.ended(created)
    assert (shown["status"], shown["reward"]) == ("completed", 1.0)
    assert [work.answer for _, work in server.grader.graded] == ["0", "1", "2"]


@pytest.mark.slow
async def test_below_min_reward_no_further_step_begins(server: EpisodeServer) -> None:
    graded_as(server, one=0.25)
    created = await begin(server)
    (await agent(server, 0)).end(result())
    shown = await server.ended(created)
    assert (shown["status"], shown["reward"], shown["grading"]["not_played"]) == (
        "completed",
        0.25,
        ["two", "three"],
    )
    assert "reward is 0.25, below min_reward 0.5" in shown["grading"]["summary"][0]


@pytest.mark.slow
async def test_a_step_whose_time_is_over_is_judged_and_its_agent_killed(tiny_model: Path, tmp_path: Path) -> None:
    async with opened(tiny_model, tmp_path, one="agent = {timeout_sec = 0.5}") as server:
        graded_as(server, one=1.0, two=1.0, three=1.0)
        created = await begin(server)
        first = await agent(server, 0)
        for index in (1, 2):
            (await agent(server, index)).end(result())
        shown = await server.ended(created)
        assert first.killed
        assert (shown["status"], shown["reward"]) == ("completed", 1.0)
        assert shown["grading"]["steps"]["one"]["status"] == "timed_out"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "status", "reward", "components"),
    [
        ("the agent fails", "failed", 0.0, {"one": 1.0}),
        ("a budget is spent", "truncated", 0.5, {"one": 1.0, "two": 0.5}),
        ("it is cancelled", "cancelled", None, {}),
        ("it is cancelled while judged", "cancelled", None, {}),
        ("it cannot be judged", "failed", None, {"one": 1.0}),
    ],
)
async def test_a_way_to_end_in_the_second_step(
    server: EpisodeServer, how: str, status: str, reward: float | None, components: dict[str, float]
) -> None:
    judging = anyio.Event()
    graded_as(server, one=1.0, two=0.5)
    created = await begin(server, limits={"max_turns": 2})
    (await agent(server, 0)).end(result())
    second = await agent(server, 1)

    async def cannot(task: Task, work: Work) -> Grade:
        judging.set()
        if "cannot" in how:
            raise SandboxUnavailable("no room")
        await anyio.sleep_forever()
        raise AssertionError

    if "judged" in how:
        server.grader.grade_it = cannot
    match how:
        case "a budget is spent":
            assert (await server.think(second, "more")).status_code != 200
        case "it is cancelled":
            await server.stage.post(created, "cancel")
        case "it is cancelled while judged":
            second.end(result())
            await judging.wait()
            await server.stage.post(created, "cancel")
        case _:
            second.end(result(1 if "fails" in how else 0))
    shown = await server.ended(created)
    assert (shown["status"], shown["reward"], shown["reward_components"]) == (status, reward, components), shown
    assert len(server.provider.made[0].processes) == 2


@pytest.mark.slow
async def test_a_call_in_flight_at_the_end_of_a_step_is_a_turn_of_it(server: EpisodeServer) -> None:
    began, go = anyio.Event(), anyio.Event()
    graded_as(server, one=1.0, two=0.0, three=0.0)
    created = await begin(server)
    first = await agent(server, 0)
    usual = server.stage.engine.answers[0]

    async def slow(_: Prompted) -> AsyncIterator[Said | Exception]:
        began.set()
        await go.wait()
        yield Said([*server.stage.encode("late"), *server.stage.encode(END)], "stop")

    server.stage.engine.answers = [slow, usual]
    async with anyio.create_task_group() as thinking:
        thinking.start_soon(server.think, first, "the last one")
        await began.wait()
        first.end(result())
        go.set()
    for index in (1, 2):
        (await agent(server, index)).end(result())
    steps = (await server.ended(created))["grading"]["steps"]
    assert [(steps[name]["first_turn"], steps[name]["turns"]) for name in steps] == [(0, 2), (2, 1), (3, 1)]


@pytest.mark.slow
async def test_a_shutdown_while_a_step_is_judged_leaves_the_episode_unfinished(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with opened(tiny_model, tmp_path) as server:
        judging = anyio.Event()

        async def stays(task: Task, work: Work) -> Grade:
            judging.set()
            await anyio.sleep_forever()
            raise AssertionError

        server.grader.grade_it = stays
        created = await begin(server)
        (await agent(server, 0)).end(result())
        await judging.wait()
    async with opened(tiny_model, tmp_path) as server:
        shown = await server.stage.get(created)
        assert (shown["status"], shown["error"]["type"], shown["reward"]) == ("failed", "server_restarted", None)


async def test_a_step_that_has_not_begun_is_not_judged(server: EpisodeServer) -> None:
    asked = graded_as(server, one=1.0)
    created = await begin(server)
    first = await agent(server, 0)
    setting_up, go = anyio.Event(), anyio.Event()
    sandbox = server.provider.made[0]
    usual = sandbox.upload

    async def slow(archive: bytes, target: str, **more: Any) -> None:
        setting_up.set()
        await go.wait()
        await usual(archive, target, **more)

    sandbox.upload = slow  # type: ignore[method-assign]
    first.end(result())
    await setting_up.wait()
    async with anyio.create_task_group() as finishing:
        finishing.start_soon(server.stage.post, created, "finish")
        await server.stop_requested(created)
        go.set()
    shown = await server.ended(created)
    assert asked == ["Do step one."]
    assert (shown["status"], shown["reward"], shown["reward_components"]) == ("completed", 1.0, {"one": 1.0})
    assert shown["grading"]["not_played"] == ["two", "three"]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "fault", "reward"), [(0, "task", None), (1, "agent", 0.0)])
async def test_agent_files_that_cannot_be_written_are_the_agents_failure_once_it_has_worked_there(
    server: EpisodeServer, step: int, fault: str, reward: float | None
) -> None:
    graded_as(server, one=1.0)
    error = FileProblem("it is a folder")
    if step == 0:
        server.provider.write_error = error
    created = await begin(server)
    if step == 1:
        first = await agent(server, 0)
        server.provider.made[0].write_error = error
        first.end(result())
    shown = await server.ended(created)
    assert (shown["status"], shown["error"]["fault"], shown["reward"]) == ("failed", fault, reward), shown


@pytest.mark.slow
@pytest.mark.parametrize(("step", "fault", "reward"), [("one", "task", None), ("two", "agent", 0.0)])
async def test_a_set_up_that_fails_is_the_tasks_failure_only_where_no_agent_was(
    tiny_model: Path, tmp_path: Path, step: str, fault: str, reward: float | None
) -> None:
    async with opened(tiny_model, tmp_path) as server:
        folder = tmp_path / "tasks" / TASK["id"] / "steps"
        (folder / "one" / "workdir").mkdir()
    (folder / "one" / "workdir" / "setup.sh").write_text("true\n")
    async with opened(tiny_model, tmp_path) as server:
        graded_as(server, one=1.0)
        if step == "one":
            server.provider.execs["bash setup.sh"] = result(3, b"it broke")
        created = await begin(server)
        if step == "two":
            first = await agent(server, 0)
            server.provider.execs["bash setup.sh"] = result(3, b"it broke")
            first.end(result())
        shown = await server.ended(created)
        assert (shown["status"], shown["error"]["fault"], shown["reward"]) == ("failed", fault, reward), shown
        assert f"set-up of step '{step}'" in shown["error"]["message"]


@pytest.mark.slow
async def test_an_external_agent_is_refused_before_anything_is_created(server: EpisodeServer) -> None:
    refused = await server.stage.control.post("/episodes", json={"task": TASK, "agent": "external"})
    assert refused.status_code == 422
    assert "agent: task three-steps has 3 steps" in refused.text
    assert (await server.stage.control.get("/episodes")).json()["episodes"] == []


async def test_no_snapshots_are_taken_where_no_fork_could_begin(server: EpisodeServer) -> None:
    wanted = {"task": TASK, "agent": "resumer", "snapshots": "every_turn"}
    refused = await server.stage.control.post("/episodes", json=wanted)
    assert refused.status_code == 422
    assert "snapshots: task three-steps has several steps" in refused.text


def test_an_episode_of_several_steps_cannot_be_forked(tmp_path: Path) -> None:
    (task,), _ = loaded(steps_folder(tmp_path / "task"))
    plan = Plan(task, FAKE_AGENT, None, Limits(), "image")
    point = ForkPoint(ForkOrigin(episode_id="e", turn_id=None, snapshot_id=None), (), None)
    with pytest.raises(Unprocessable, match="task task has several steps"):
        forked(plan, point)
