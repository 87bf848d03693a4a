"""The options behind a path of task files or of Harbor's folders: what is chosen, and how it is judged."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harbor_support import harbor_folder, steps_folder
from typer.testing import CliRunner

from turnstile.cli.app import app
from turnstile_server.errors import StartupError, Unprocessable
from turnstile_server.settings import SandboxSettings
from turnstile_server.settings.machine import machine_resources
from turnstile_server.tasks.model import SandboxWish, Task
from turnstile_server.tasks.registry import host_paths, load_tasks
from turnstile_server.tasks.workspace import sandbox_spec

GOLD = {"files": {"inline": {"done.txt": "yes\n"}}}


def scored(number: int, **changes: object) -> dict[str, object]:
    """A task that a script judges."""
    script = {"files": {"inline": {"test.sh": "#!/bin/bash\n"}}, "timeout_s": 30}
    difficulty = ["easy", "hard"][number % 2]
    task = {"id": f"t{number}", "instruction": "Make done.txt.", "script": script, "gold": GOLD}
    return {**task, "base": {"inline": {"a": ""}}, "difficulty": difficulty, **changes}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(scored(number)) + "\n" for number in range(4)))
    return path


def test_tasks_are_chosen_by_their_labels_and_counted(file: Path) -> None:
    def ids(options: str) -> list[str]:
        return list(load_tasks([f"{file}?{options}"]).ids)

    assert ids("where=difficulty=hard") == ["t1", "t3"]
    assert ids("where=difficulty=hard&limit=1") == ["t1"]
    assert ids("where=difficulty=hard&where=id!=t1") == ["t3"]
    assert ids("limit=3") == ["t0", "t1", "t2"]


def test_the_rewards_key_and_bounds_are_those_of_the_source(file: Path, tmp_path: Path) -> None:
    options = "reward_key=points&bounds=-1,3&gold_reward=2.5"
    steps = steps_folder(tmp_path / "harbor" / "steps")
    plain = harbor_folder(tmp_path / "harbor" / "plain")
    found = load_tasks([f"{file}?{options}", f"{tmp_path / 'harbor'}?{options}"])
    for name in ("t0", "t3", steps.name, plain.name):
        task = found.get(name)
        assert task.script is not None
        assert (task.script.reward_key, task.reward.bounds) == ("points", (-1.0, 3.0))
        assert task.gold is None or task.gold.reward == 2.5
        assert {step.script.reward_key for step in task.steps} <= {"points"}
    assert len(found.get(steps.name).steps) > 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("colour=red", "colour: there is no such option; there are where, limit, reward_key, bounds, gold_reward"),
        ("limit=0", "limit: '0' is not a number from 1"),
        ("limit=1&limit=2", "limit: given twice"),
        ("bounds=3", "bounds: '3' is not two numbers, like 0,1"),
        ("bounds=1,0", "bounds: '1,0' is not the least and the greatest reward"),
        ("gold_reward=nan", "gold_reward: 'nan' is not a number"),
        ("reward_key=", "reward_key: it is the name of a key of reward.json"),
        ("where=easy", "where: 'easy' is not `name=pattern`"),
        ("where=difficulty=none", "no task meets `where`"),
        ("limit", "limit: '' is not a number from 1"),
        ("&", "'&' is no option, like limit=20"),
    ],
)
def test_options_that_are_wrong_are_told(options: str, said: str, file: Path, tmp_path: Path) -> None:
    harbor_folder(tmp_path / "harbor" / "plain")
    for path in (file, tmp_path / "harbor"):
        with pytest.raises(StartupError) as failed:
            load_tasks([f"{path}?{options}"])
        assert said in failed.value.message


def test_a_key_for_tasks_without_a_script_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("{id: t, instruction: x, answer: {value: a}}")
    with pytest.raises(StartupError, match=r"t.yaml:1: reward_key: no script judges this task"):
        load_tasks([f"{tmp_path / 't.yaml'}?reward_key=points"])


def test_a_path_with_a_question_mark_of_its_own_has_no_options(tmp_path: Path) -> None:
    path = tmp_path / "limit?limit=1.jsonl"
    path.write_text("".join(json.dumps(scored(number)) + "\n" for number in range(2)))
    assert len(load_tasks([str(path)]).ids) == 2
    assert host_paths([str(path), f"{tmp_path}?limit=1"]) == (path, tmp_path)


def validated(source: str, **environment: str) -> tuple[int, str]:
    """``turnstile tasks validate``, in a thread of its own: fixtures may keep a loop in this one."""
    arguments = ["tasks", "validate", source, "--sandbox", "local"]
    with ThreadPoolExecutor(1) as thread:
        done = thread.submit(CliRunner().invoke, app, arguments, env={"COLUMNS": "200", **environment}).result()
    return done.exit_code, done.output


@pytest.mark.slow
def test_works_on_another_scale_are_sound_with_the_options(tmp_path: Path) -> None:
    (tmp_path / "points.py").write_text("def of(answer, **_):\n    return 2.5 if answer == 'right' else -1.0\n")
    grading = {"points": {"grader": "function", "target": "points.py:of"}}
    task = {"id": "t", "instruction": "x", "grading": grading, "gold": {"answer": "right"}}
    (tmp_path / "t.jsonl").write_text(json.dumps(task) + "\n")
    code, output = validated(f"{tmp_path}?bounds=-1,3&gold_reward=2.5")
    assert (code, "1 of 1 tasks are sound" in output) == (0, True), output
    code, output = validated(f"{tmp_path}?bounds=-1,3")
    assert (code, "the gold solution scores 2.5, not 1" in output) == (1, True), output
    code, output = validated(str(tmp_path))
    assert (code, "`?bounds=LEAST,GREATEST` behind its path" in output) == (1, True), output


WISH = Task(id="t", instruction="x", sandbox=SandboxWish(memory_mb=2048, cpus=1.5, pids=512))


def test_a_task_may_ask_for_more_than_the_default_up_to_what_the_machine_has() -> None:
    machine = machine_resources()
    assert machine["memory_mb"] <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    limits = sandbox_spec(WISH, SandboxSettings()).limits
    assert (limits.memory_bytes >> 20, limits.cpus, limits.pids) == (2048, 1.5, 512)
    for field, most in machine.items():
        wish = SandboxWish(**{field: type(getattr(WISH.sandbox, field))(most * 2)})
        with pytest.raises(
            Unprocessable, match=rf"above this server's ceiling of .*, which its machine has .*{field}"
        ):
            sandbox_spec(WISH.model_copy(update={"sandbox": wish}), SandboxSettings())


@pytest.mark.parametrize("name", ["memory_mb", "cpus", "pids"])
def test_what_the_operator_sets_is_the_ceiling(name: str) -> None:
    low = {"memory_mb": 1024, "cpus": 1.0, "pids": 256}[name]
    with pytest.raises(Unprocessable, match=rf"above this server's ceiling of {low:g} \(sandboxes\.{name}\)"):
        sandbox_spec(WISH, SandboxSettings(**{name: low}))


def test_a_large_ceiling_is_told_in_full() -> None:
    wish = WISH.model_copy(update={"sandbox": SandboxWish(memory_mb=3_000_000)})
    with pytest.raises(Unprocessable, match=r"is 3000000, above this server's ceiling of 2097152 "):
        sandbox_spec(wish, SandboxSettings(memory_mb=1 << 21))


def test_a_ceiling_of_the_environment_reaches_the_command(file: Path) -> None:
    file.write_text(json.dumps(scored(0, sandbox={"memory_mb": 2048})) + "\n")
    code, output = validated(str(file), TURNSTILE_SANDBOXES__MEMORY_MB="1024")
    assert (code, "above this server's ceiling of 1024 (sandboxes.memory_mb)" in output) == (1, True), output
