"""The Harbor folders: Turnstile's rewards are those of `harbor run`, and agents earn them in episodes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import docker
import pytest
from anyio import to_thread

from harbor.compare import RECORDED, rewards_of_turnstile, table
from harbor.variants import write_variants
from local import ROOT
from scripted.gold import gold_script
from scripted.script import Play, Script, Step
from scripted_policy import scripted_policy
from turnstile import AsyncClient
from turnstile.models import Episode
from turnstile_server.demo.local_server import serve
from turnstile_server.settings import Settings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.registry import load_tasks

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.timeout(900)]

TASKS = ROOT / "examples" / "harbor" / "tasks"
BASE = "turnstile-example:base"
AT_ONCE = 2
ALL = tuple(sorted(folder.name for folder in TASKS.iterdir()))
SOLVED = ("greet-by-environment", "monthly-sales", "summarise-orders")
"""With variables; with several steps; with a reward of several numbers."""
LEFT = ("clean-contacts", "notes-of-a-user")
"""With a reward that is a part of 1; with an image's user."""


@pytest.fixture(scope="module")
def base_image(docker_image: str) -> str:
    engine = docker.from_env()
    try:
        engine.images.get(docker_image).tag(BASE)
    finally:
        engine.close()
    return BASE


@pytest.mark.thorough  # grading and tasks hold single folders to Harbor's rules
@pytest.mark.slow
async def test_its_rewards_are_those_that_harbor_gave(base_image: str, tmp_path: Path) -> None:
    """`make harbor RECORD=1` writes what Harbor gave."""
    recorded = json.loads(RECORDED.read_text())
    write_variants(tmp_path)
    settings = Settings(sandboxes={"kind": "docker"})
    turnstile = {**await rewards_of_turnstile(TASKS, settings), **await rewards_of_turnstile(tmp_path, settings)}
    made, equal = table(recorded, turnstile)
    assert equal, made
    assert len(recorded) >= 40
    assert {1 / 3, 1 / 2, 2 / 3, None} <= {reward for works in recorded.values() for reward in works.values()}


def script_of(solved: Sequence[Task], left: Sequence[Task]) -> Script:
    """Solves some, and hands in the others at once."""
    done = Step(text="That is it.", tool="submit", arguments={"answer": "done"})
    lazy = (Play(instruction=task.instruction.strip(), steps=(done,)) for task in left)
    return Script((*gold_script(solved).plays, *lazy))


@asynccontextmanager
async def served(
    model: Path, folder: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[AsyncClient]:
    monkeypatch.setenv("TURNSTILE_SANDBOXES__KIND", "docker")
    monkeypatch.setenv("TURNSTILE_TASKS__SOURCES", json.dumps([str(TASKS)]))
    async with (
        scripted_policy(model, script) as url,
        serve(model, folder / "data", engine_url=url) as server,
        AsyncClient(server.control_url, key=server.control_key) as client,
    ):
        yield client


async def play_tasks(client: AsyncClient, tasks: Sequence[str]) -> dict[str, Episode]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def play(task_id: str) -> Episode:
        async with slots, await client.create_episode({"id": task_id}, agent="tool-loop") as episode:
            return await episode.wait(600)

    async with asyncio.TaskGroup() as group:
        playing = {task: group.create_task(play(task)) for task in tasks}
    return {task: one.result() for task, one in playing.items()}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(
    ("solved", "left"),
    [
        pytest.param(SOLVED, LEFT, id="some"),
        pytest.param(ALL, (), marks=pytest.mark.thorough, id="all solved"),
        pytest.param((), ALL, marks=pytest.mark.thorough, id="all left"),
    ],
)
async def test_an_agent_that_solves_them_earns_1_and_a_lazy_one_0(
    solved: Sequence[str],
    left: Sequence[str],
    tiny_model: Path,
    tmp_path: Path,
    base_image: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = {task.id: task for task in await to_thread.run_sync(load_tasks, [str(TASKS)])}
    script = script_of([tasks[name] for name in solved], [tasks[name] for name in left])
    async with served(tiny_model, tmp_path, script, monkeypatch) as client:
        ended = await play_tasks(client, [*solved, *left])
    assert {name: (one.reward, one.error) for name, one in ended.items()} == {
        **dict.fromkeys(solved, (1.0, None)),
        **dict.fromkeys(left, (0.0, None)),
    }
    for one in ended.values():
        judged = one.grading.get("steps", {"": one.grading})
        assert {each["script"]["trust"] for each in judged.values()} == {"in_process"}
