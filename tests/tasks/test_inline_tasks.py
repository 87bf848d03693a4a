"""Tasks that an episode's request brings along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turnstile.models import TaskRef
from turnstile_server.errors import NotFound, Unprocessable
from turnstile_server.tasks.catalog import TaskCatalog
from turnstile_server.tasks.grader_options import kind_of
from turnstile_server.tasks.inline import find_task, task_from_ref
from turnstile_server.tasks.model import Task

TASKS = TaskCatalog([Task(id="known", instruction="Do it.")])


def test_an_instruction_is_enough_and_is_not_graded() -> None:
    task = task_from_ref(TaskRef(instruction="Say hello."), allow_inline=True)
    assert task.id.startswith("task_")
    assert (task.instruction, task.graded, task.needs_sandbox) == ("Say hello.", False, False)


def test_an_inline_task_has_all_of_a_task_files_fields() -> None:
    ref = TaskRef.model_validate(
        {"id": "mine", "instruction": "x", "answer": {"value": "y"}, "base": {"inline": {"a": "b"}}}
    )
    task = find_task(ref, TASKS, allow_inline=True)
    assert (task.id, task.graded, task.needs_sandbox) == ("mine", True, True)


def test_an_id_alone_is_one_of_the_sources_tasks() -> None:
    assert find_task(TaskRef(id="known"), TASKS, allow_inline=False).instruction == "Do it."
    with pytest.raises(NotFound, match="known"):
        find_task(TaskRef(id="knwon"), TASKS, allow_inline=False)


@pytest.mark.parametrize(
    ("ref", "said"),
    [
        ({}, "name one by `id`"),
        ({"instruction": ""}, "task.instruction"),
        ({"id": "a b", "instruction": "x"}, "task.id"),
        ({"instruction": "x", "answr": {}}, "task.answr: there is no such field"),
        ({"id": "known", "answer": {"value": "x"}}, "task.instruction"),
        ({"instruction": "x", "base": {"folder": "/etc"}}, "task.base.folder"),
        ({"instruction": "x", "gold": {"files": {"folder": "a"}}}, "task.gold.files.folder"),
        (
            {"instruction": "x", "tests": {"files": {"folder": "a"}, "expected": ["a.B.c"]}},
            "task.tests.files.folder",
        ),
        ({"instruction": "x", "limits": {"max_turns": 0}}, "task.limits.max_turns"),
    ],
)
def test_a_bad_inline_task_is_refused_by_field(ref: dict[str, Any], said: str) -> None:
    with pytest.raises(Unprocessable, match=said.replace(".", r"\.")):
        find_task(TaskRef.model_validate(ref), TASKS, allow_inline=True)


def test_a_server_may_take_none() -> None:
    with pytest.raises(Unprocessable, match=r"tasks\.inline"):
        find_task(TaskRef(instruction="x"), TASKS, allow_inline=False)


@pytest.mark.parametrize("grader", [["exact"], {"a": 1}, 3])
def test_a_grader_that_is_no_name_is_left_to_the_check_of_names(grader: object) -> None:
    ref = TaskRef.model_validate({"instruction": "x", "grading": {"a": {"grader": grader}}})
    assert kind_of("a", task_from_ref(ref, allow_inline=True).grading["a"]) == str(grader)


def test_an_inline_task_names_no_grader_by_its_place_and_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil_grader.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    ref = TaskRef.model_validate({"instruction": "x", "grading": {"a": {"grader": "evil_grader:Grader"}}})
    with pytest.raises(Unprocessable, match=r"task\.grading\.a\.grader: an inline task names no code"):
        task_from_ref(ref, allow_inline=True)


def test_a_schema_that_is_nested_too_deep_is_refused_by_field() -> None:
    schema: dict[str, Any] = {}
    for _ in range(400):
        schema = {"allOf": [schema]}
    ref = TaskRef.model_validate({"instruction": "x", "grading": {"json_schema": {"schema": schema}}})
    with pytest.raises(Unprocessable, match=r"task\.grading\.json_schema\.schema: .*nested too deep"):
        task_from_ref(ref, allow_inline=True)
