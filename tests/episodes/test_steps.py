"""Episodes of a task of several steps, in real sandboxes: one for the agents of all steps, one to judge each.

test_step_life.py beside this file has the ways in which such an episode ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import docker
import pytest
from conversation import END
from gate_support import says, staged
from harbor_support import steps_folder
from light import light_work
from test_whole_episodes import played
from typer.testing import CliRunner

from turnstile.cli.app import app

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.timeout(300)]

TASK = {"id": "three-steps"}
STEPS = ("one", "two", "three")
NEXT = "name = next(n for n in ('one', 'two', 'three') if not os.path.exists(n)); open(name, 'w')\n"
"""Which step it is: only the files of the work folder, which the steps share, say so."""
SOLVE = NEXT + "open(name + '.txt', 'w').write('done')\n"
FIRST = NEXT + "name == 'one' and open('one.txt', 'w').write('done')\n"


@pytest.fixture(scope="module")
def base_image(docker_image: str) -> None:
    engine = docker.from_env()
    try:
        engine.images.get(docker_image).tag("turnstile-example:base")
    finally:
        engine.close()


async def test_steps_share_a_sandbox_and_each_has_a_conversation_and_a_grade_of_its_own(
    tiny_model: Path, tmp_path: Path, base_image: None
) -> None:
    source = steps_folder(tmp_path / "tasks" / TASK["id"])
    settings = {"sandboxes": {"kind": "docker"}, "tasks": {"sources": [str(source)]}}
    work, wanted = light_work(tiny_model, tmp_path / "data", tmp_path / "installs", **settings)
    found: dict[str, dict[str, Any]] = {}
    async with staged(tiny_model, tmp_path / "data", work=work, **wanted) as stage:
        stage.engine.answers = [says([*stage.encode("hm"), *stage.encode(END)])]

        async def play(name: str, does: str) -> None:
            found[name] = await played(stage, task=TASK, env={"WORK": does})

        async with anyio.create_task_group() as playing:
            for name, does in {"solver": SOLVE, "lazy": "", "first": FIRST}.items():
                playing.start_soon(play, name, does)
        solver = found["solver"]
        samples = (await stage.get(solver, "/samples"))["samples"]
        again = await stage.control.post(f"/episodes/{solver['episode_id']}/regrade", json={"regrade_id": "r"})
    told = {name: (one["status"], one["reward"], one["reward_components"]) for name, one in found.items()}
    assert told == {
        "solver": ("completed", 1.0, dict.fromkeys(STEPS, 1.0)),
        "lazy": ("completed", 0.0, {"one": 0.0}),
        "first": ("completed", 1 / 3, {"one": 1.0, "two": 0.0, "three": 0.0}),
    }
    assert found["lazy"]["grading"]["not_played"] == ["two", "three"]
    steps = solver["grading"]["steps"]
    assert [(steps[name]["first_turn"], steps[name]["turns"]) for name in STEPS] == [(0, 2), (2, 2), (4, 2)]
    assert all(steps[name]["script"]["trust"] == "in_process" for name in STEPS)
    assert [(len(one["turn_spans"]), one["reward"]) for one in samples] == [(1, 1.0)] * 6, (
        "this agent has no history"
    )
    assert (solver["turn_rewards"], solver["work"]) == ({}, None)
    assert again.status_code == 422
    assert "task three-steps has several steps" in again.text


@pytest.mark.thorough
@pytest.mark.slow
async def test_validate_plays_the_solutions_of_all_steps_in_order(tmp_path: Path, base_image: None) -> None:
    steps_folder(tmp_path / "sound")
    wrong = steps_folder(tmp_path / "wrong")
    (wrong / "steps/two/solution/solve.sh").write_text("echo I cannot; exit 3\n")
    broken = steps_folder(tmp_path / "broken", {"one": ""})
    (broken / "steps/two/workdir/setup.sh").write_text("cat one.txt && rm -r one.txt\n")
    arguments = ["tasks", "validate", str(tmp_path), "--sandbox", "docker"]
    done = await anyio.to_thread.run_sync(CliRunner().invoke, app, arguments)
    assert done.exit_code == 1, done.output
    assert "2 of 3 tasks are sound" in done.output, done.output
    told = [line for line in done.output.splitlines() if line.startswith("wrong: ")]
    assert told == ["wrong: the gold solution scores 0.666667, not 1"]
    assert "two: its solve.sh ended with 3: I cannot" in done.output
