"""The seam for graders: a grader of another package, found by its entry point, which a task asks for by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from grading_support import grader
from harbor_support import loaded, steps_folder

from installed_plugins import declare
from turnstile.models import TaskRef
from turnstile_server.backends import build_backends
from turnstile_server.errors import StartupError, TaskFailed, Unprocessable
from turnstile_server.grading.errors import GraderFailed
from turnstile_server.grading.protocol import Component, ComponentGrader, GradingTools, Work
from turnstile_server.grading.settings_check import grading_problem
from turnstile_server.kinds.swe.options import END_MARKER, START_MARKER
from turnstile_server.settings import GradingSettings, Settings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.part import GraderOptions

pytestmark = pytest.mark.anyio


class BriefOptions(GraderOptions):
    max_words: int = 10


class BriefAnswer(ComponentGrader):
    """1 for an answer of at most ``max_words`` words."""

    Options = BriefOptions

    def __init__(self, tools: GradingTools, name: str, options: BriefOptions) -> None:
        self._most = options.max_words

    async def grade(self, task: Task, work: Work) -> Component:
        most = self._most
        words = len((work.answer or "").split())
        if words <= most:
            return Component(1.0, {"words": words})
        return Component(0.0, {"words": words}, (f"brief: {words} words, at most {most}",))


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    declare(monkeypatch, tmp_path / "site", "turnstile.graders", brief=f"{__name__}:BriefAnswer")


FIELDS = {"id": "t", "instruction": "x", "answer": {"value": "yes"}, "grading": {"brief": {"max_words": 2}}}


async def test_a_registered_grader_gives_one_factor_of_the_reward(brief: None) -> None:
    task = Task.model_validate(FIELDS)
    assert task.graded
    grade = await grader(None).grade(task, Work(answer="yes"))
    assert (grade.reward, grade.components) == (1.0, {"answer": 1.0, "brief": 1.0})
    assert grade.detail == {"answer": {"right": True, "note": ""}, "words": 1}
    grade = await grader(None).grade(task, Work(answer="oh yes, indeed"))
    assert (grade.reward, grade.components) == (0.0, {"answer": 0.0, "brief": 0.0})
    assert grade.detail["summary"] == ["answer: another text", "brief: 3 words, at most 2"]


async def test_a_grader_that_is_not_registered_fails_the_task() -> None:
    with pytest.raises(TaskFailed, match=r"no grader 'brief'; there are answer, exact"):
        await grader(None).grade(Task.model_validate(FIELDS), Work(answer="yes"))


def test_a_server_refuses_tasks_whose_grader_is_not_registered(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps(FIELDS) + "\n")
    settings = Settings.model_validate({"data_dir": tmp_path / "data", "tasks": {"sources": [file]}})
    with pytest.raises(StartupError, match=r"task t cannot be used: grading: there is no grader 'brief'"):
        build_backends(settings)
    backends = build_backends(Settings(data_dir=tmp_path / "data"))
    inline = TaskRef.model_validate({"instruction": "x", "grading": {"brief": {}}})
    with pytest.raises(Unprocessable, match=r"task\.grading: there is no grader 'brief'"):
        backends.task_of(inline)


class Unruly(BriefAnswer):
    async def grade(self, task: Task, work: Work) -> Component:
        if work.answer == "yes":
            return Component(7.0)
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("answer", "said"), [("yes", r"gives 7\.0 for 'brief', which is not in \[0, 1\]"), ("no", "SystemExit: 3")]
)
async def test_what_a_grader_of_a_package_must_not_do_is_no_reward(
    answer: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(monkeypatch, tmp_path / "site", "turnstile.graders", brief=f"{__name__}:Unruly")
    with pytest.raises(GraderFailed, match=said) as failed:
        await grader(None).grade(Task.model_validate(FIELDS), Work(answer=answer))
    assert failed.value.detail["components"] == {"answer": float(answer == "yes")}
    assert failed.value.detail["grader"] == "brief"


NO_OPTIONS = object()


@pytest.mark.parametrize(
    ("grader", "said"),
    [
        (f"{__name__}:NO_OPTIONS", "its `Options` are no class derived from GraderOptions"),
        ("absent_module:Grader", "No module named 'absent_module'"),
        (f"{__name__}:BriefAnswer", "max_words: Input should be a valid integer"),
    ],
)
def test_a_task_file_whose_grader_cannot_be_used_is_told_with_its_line(
    tmp_path: Path, grader: str, said: str
) -> None:
    file = tmp_path / "t.jsonl"
    entry = {"grader": grader, "max_words": "few"}
    file.write_text("\n" + json.dumps({**FIELDS, "grading": {"short": entry}}) + "\n")
    settings = Settings.model_validate({"data_dir": tmp_path / "data", "tasks": {"sources": [file]}})
    with pytest.raises(StartupError) as failed:
        build_backends(settings)
    assert f"{file}:2: grading.short" in failed.value.message
    assert said in failed.value.message


def test_a_grader_of_a_package_that_is_no_grader_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(monkeypatch, tmp_path / "site", "turnstile.graders", brief=f"{__name__}:NO_OPTIONS")
    said = grading_problem(Task.model_validate(FIELDS), GradingSettings())
    assert said is not None
    assert "(acme-parts 1.2, " in said
    assert "its `Options` are no class" in said


LONG = {
    "tests": {"files": {"inline": {}}, "runner": "command", "command": ["sh"], "timeout_s": 601},
    "script": {"files": {"inline": {"test.sh": ""}}, "timeout_s": 601},
    "r2e": {"expected": {"a": "PASSED"}, "timeout_s": 601},
    "swe": {
        "instance_id": "i",
        "eval_script": f"{START_MARKER}\n{END_MARKER}\n",
        "log_parser": "parse_log_pytest",
        "fail_to_pass": ["a"],
        "timeout_s": 601,
    },
}


@pytest.mark.parametrize("field", LONG)
def test_a_server_refuses_tasks_whose_tests_may_take_as_long_as_a_grading(tmp_path: Path, field: str) -> None:
    file = tmp_path / "t.jsonl"
    task = Task.model_validate({"id": "t", "instruction": "x", field: LONG[field]})
    file.write_text(task.model_dump_json(exclude_defaults=True) + "\n")
    given = {"data_dir": tmp_path / "data", "tasks": {"sources": [file]}, "grading": {"timeout_s": 601}}
    said = rf"{field}\.timeout_s: 601 s, and a whole grading has 601 s \(grading\.timeout_s"
    with pytest.raises(StartupError, match=rf"task t cannot be used: {said}"):
        build_backends(Settings.model_validate(given))
    backends = build_backends(Settings.model_validate({**given, "grading": {"timeout_s": 602}}))
    assert backends.task_of(TaskRef(id="t")).id == "t"
    backends = build_backends(Settings.model_validate({**given, "tasks": {}}))
    with pytest.raises(Unprocessable, match=said):
        backends.task_of(TaskRef.model_validate({"instruction": "x", field: LONG[field]}))


def test_each_step_must_fit_into_a_grading(tmp_path: Path) -> None:
    (task,), _ = loaded(steps_folder(tmp_path / "task"))
    longest = max(step.script.timeout_s for step in task.steps)
    assert grading_problem(task, GradingSettings(timeout_s=longest + 1)) is None
    last = task.steps[-1].model_copy(
        update={"script": task.steps[-1].script.model_copy(update={"timeout_s": longest + 1})}
    )
    longer = task.model_copy(update={"steps": (*task.steps[:-1], last)})
    said = grading_problem(longer, GradingSettings(timeout_s=longest + 1))
    assert said is not None
    assert said.startswith("steps.three.script.timeout_s")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"answer": {"value": "a"}, "grading": {"answer": {"value": "b"}}}, "`answer` is written twice"),
        ({"grading": {"other": {"grader": "answer", "value": "b"}}}, "a task has one grader `answer`"),
        ({"grading": {"world": {}}}, "a class is a task source of its own"),
    ],
)
def test_a_grader_of_a_field_is_asked_for_once_under_its_own_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Task.model_validate({"id": "t", "instruction": "x", **fields})


def test_a_grader_of_a_field_may_be_written_among_the_others() -> None:
    written = Task.model_validate({"id": "t", "instruction": "x", "grading": {"answer": {"value": "b"}}})
    assert written == Task.model_validate({"id": "t", "instruction": "x", "answer": {"value": "b"}})
