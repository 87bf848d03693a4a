"""Whole episodes in real sandboxes: prepared, run, graded in another sandbox, and removed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from conversation import END
from gate_support import Stage, says, staged
from light import SOLVE, TASK, light_work

from turnstile.models import WorkDiff
from turnstile_server.demo.local_server import descendants

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def server(model: Path, folder: Path, **settings: Any) -> AsyncIterator[Stage]:
    work, wanted = light_work(model, folder / "data", folder / "installs", **settings)
    async with staged(model, folder / "data", work=work, **wanted) as stage:
        stage.engine.answers = [says([*stage.encode("hm"), *stage.encode(END)])]
        yield stage


async def played(stage: Stage, **fields: Any) -> dict[str, Any]:
    """An episode of the light agent, from its creation to its end."""
    return await ended(stage, await stage.episode(**{"task": TASK, "agent": "light", **fields}))


async def ended(stage: Stage, created: dict[str, Any]) -> dict[str, Any]:
    with anyio.fail_after(300):
        while True:
            shown: dict[str, Any] = await stage.get(created, "?wait=5")
            if shown["timings"]["ended_s"] is not None:
                return shown


@pytest.mark.slow
async def test_work_is_rewarded_by_hidden_tests(tiny_model: Path, tmp_path: Path) -> None:
    async with server(tiny_model, tmp_path) as stage:
        solved = await played(stage, env={"WORK": SOLVE, "TURNS": "3"})
        assert (solved["status"], solved["reward"], solved["error"]) == ("completed", 1.0, None), solved
        assert solved["stats"]["turns"] == 3
        response = await stage.control.get(f"/episodes/{solved['episode_id']}/work")
        [change] = WorkDiff.model_validate_json(response.content).files
        assert (change.path, change.change, change.left_out) == ("answer.py", "modified", None)
        assert change.diff is not None
        assert change.diff.endswith("-ANSWER = 41\n+ANSWER = 42\n\\ No newline at end of file\n")
        idle = await played(stage)
        assert (idle["status"], idle["reward"]) == ("completed", 0.0)
        assert (await stage.control.get(f"/episodes/{idle['episode_id']}/work")).json()["files"] == []
        assert "thought 2 times" in idle["agent_output"]


@pytest.mark.slow
async def test_the_environment_and_the_key_of_an_episode_are_in_no_record(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with server(tiny_model, tmp_path) as stage:
        created = await stage.episode(
            task=TASK, agent="light", env={"WORK": SOLVE, "PRIVATE": "s3cr3t-of-a-trainer"}, idempotency_key="once"
        )
        shown = await ended(stage, created)
        assert shown["reward"] == 1.0, shown
    files = [path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert any(created["episode_id"].encode() in text for text in files)
    assert not any(b"s3cr3t-of-a-trainer" in text for text in files)
    assert not any(b"tsk-" in text for text in files)  # how every key begins


@pytest.mark.slow
async def test_an_agent_that_crashes_scores_0_and_says_why(tiny_model: Path, tmp_path: Path) -> None:
    async with server(tiny_model, tmp_path) as stage:
        shown = await played(stage, env={"WORK": "raise SystemExit('it broke')"})
        assert (shown["status"], shown["reward"], shown["error"]["fault"]) == ("failed", 0.0, "agent")
        assert "it broke" in shown["error"]["message"]


@pytest.mark.slow
async def test_an_agent_that_never_calls_the_model_has_failed(tiny_model: Path, tmp_path: Path) -> None:
    async with server(tiny_model, tmp_path) as stage:
        shown = await played(stage, env={"TURNS": "0"})
        assert (shown["status"], shown["error"]["type"]) == ("failed", "agent_failed")
        assert "without a model call" in shown["error"]["message"]


@pytest.mark.slow
async def test_an_agent_that_never_ends_is_stopped_and_its_work_judged(tiny_model: Path, tmp_path: Path) -> None:
    async with server(tiny_model, tmp_path) as stage:
        shown = await played(stage, env={"WORK": SOLVE, "STAY": "1000"}, limits={"wall_s": 4})
        assert (shown["status"], shown["reward"]) == ("timed_out", 1.0), shown


@pytest.mark.slow
async def test_daemons_left_behind_touch_neither_the_work_nor_the_grading(
    tiny_model: Path, tmp_path: Path
) -> None:
    daemon = (
        "import subprocess; subprocess.Popen(['sh', '-c', "
        "'while true; do echo ANSWER = 42 > answer.py; done'], start_new_session=True)"
    )
    undo = "import time; time.sleep(0.3); open('answer.py', 'w').write('ANSWER = 41')"
    async with server(tiny_model, tmp_path) as stage:
        shown = await played(stage, env={"WORK": f"{daemon}; {undo}; {SOLVE.replace('42', '0')}"})
        assert shown["status"] == "completed"
        assert shown["reward"] in (0.0, 1.0)  # what stood there when it was stopped, and no later change of it
        assert _sandboxes() == []


@pytest.mark.slow
async def test_two_episodes_share_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """From inside one episode the other's address is 404 on its own socket, whatever key is shown."""
    async with server(tiny_model, tmp_path) as stage:
        first = await stage.episode(task=TASK, agent="light", env={"STAY": "30"})
        probe = (
            "import urllib.error\n"
            "request = urllib.request.Request('http://127.0.0.1:8001/e/%s/v1/models', "
            "headers={'authorization': 'Bearer ' + os.environ['KEY']})\n"
            "try:\n    print(urllib.request.urlopen(request, timeout=5).status)\n"
            "except urllib.error.HTTPError as error:\n    print('refused with', error.code)\n"
        )
        shown = await played(stage, env={"WORK": probe % first["episode_id"]})
        assert "refused with 404" in shown["agent_output"], shown
        await stage.post(first, "cancel")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("local", 16),
        pytest.param("local", 64, marks=[pytest.mark.slow, pytest.mark.thorough, pytest.mark.timeout(400)]),
        pytest.param("docker", 16, marks=[pytest.mark.docker, pytest.mark.thorough, pytest.mark.timeout(400)]),
    ],
)
async def test_many_at_once_are_each_accounted_for(
    tiny_model: Path, tmp_path: Path, kind: str, count: int, request: pytest.FixtureRequest
) -> None:
    image = request.getfixturevalue("docker_image") if kind == "docker" else "unused"
    settings = {
        "sandboxes": {"kind": kind, "docker_image": image},
        "episodes": {"max_running": count},
        "grading": {"parallel": 4},
    }
    async with server(tiny_model, tmp_path, **settings) as stage:
        shown: list[dict[str, Any]] = []

        async def one(index: int) -> None:
            work = {"WORK": SOLVE} if index % 2 else {}
            env = {"TURNS": "2", **work, "STAY": "1"}
            shown.append(await played(stage, env=env, metadata={"odd": index % 2}))

        async with anyio.create_task_group() as tasks:
            for index in range(count):
                tasks.start_soon(one, index)
        assert [one["reward"] for one in shown] == [float(one["metadata"]["odd"]) for one in shown]
        assert {(one["status"], one["stats"]["turns"]) for one in shown} == {("completed", 2)}
        begun = sorted(one["timings"]["created_at"] + one["timings"]["running_s"] for one in shown)
        over = [one["timings"]["created_at"] + one["timings"]["grading_s"] for one in shown]
        assert begun[-1] < max(over), "they were there together"
        assert _sandboxes() == []


@pytest.mark.docker
async def test_an_image_that_is_not_there_is_the_tasks_failure_and_named(
    tiny_model: Path, tmp_path: Path, docker_image: str
) -> None:
    async with server(tiny_model, tmp_path, sandboxes={"kind": "docker", "docker_image": docker_image}) as stage:
        shown = await played(stage, task={**TASK, "image": "turnstile-no-such-image:1"})
        assert (shown["status"], shown["error"]["fault"], shown["reward"]) == ("failed", "task", None)
        assert "turnstile-no-such-image:1" in shown["error"]["message"]


@pytest.mark.docker
async def test_work_in_docker_is_rewarded_by_hidden_tests(
    tiny_model: Path, tmp_path: Path, docker_image: str
) -> None:
    async with server(tiny_model, tmp_path, sandboxes={"kind": "docker", "docker_image": docker_image}) as stage:
        solved = await played(stage, env={"WORK": SOLVE})
        assert (solved["status"], solved["reward"]) == ("completed", 1.0), solved
        idle = await played(stage)
        assert (idle["status"], idle["reward"]) == ("completed", 0.0)


def _sandboxes() -> list[str]:
    """Sandboxes that still run below this process."""
    found = []
    for pid, _ in descendants(os.getpid()):
        with suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            found += [line] if "helper" in line else []
    return found
