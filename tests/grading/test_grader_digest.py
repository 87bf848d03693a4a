"""The digest of what judges a task: another one where any file that judges is another."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from installed_plugins import declare
from turnstile_server.grading.digest import GraderDigests
from turnstile_server.settings import GradingSettings, TaskSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.tarball import pack


def digests_by(**settings: Any) -> GraderDigests:
    return GraderDigests(lambda files: pack(files, TaskSettings()), GradingSettings.model_validate(settings))


def the_task(**entry: Any) -> Task:
    return Task.model_validate({"id": "t", "instruction": "x", "grading": {"code": entry}})


def test_the_edited_module_of_a_packages_grader_is_another_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "acme_grader.py"
    source = (
        "from turnstile_server.tasks.part import GraderOptions\n"
        "class Grader:\n    Options = GraderOptions\n    def __init__(self, tools, name, options): pass\n"
    )
    module.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    declare(monkeypatch, tmp_path / "site", "turnstile.graders", acme="acme_grader:Grader")
    task, digests = the_task(grader="acme"), digests_by()
    before = digests.of(task)
    assert digests.of(task) == before
    module.write_text(source + "    strict = True\n")
    assert digests.of(task) != before


@pytest.mark.parametrize("judge", ["tests", "script"])
def test_an_edited_file_of_what_judges_is_another_judge(judge: str, tmp_path: Path) -> None:
    shown = {"expected": ["test_a.A.test_a"]} if judge == "tests" else {}
    fields = {"id": "t", "instruction": "x", judge: {"files": {"folder": str(tmp_path)}, **shown}}
    task = Task.model_validate(fields)
    digests = digests_by()
    (tmp_path / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
    before = digests.of(task)
    assert digests.of(task) == before
    (tmp_path / "test.sh").write_text("echo 0 > /logs/verifier/reward.txt")
    assert digests.of(task) != before


def test_edited_code_of_the_machine_is_another_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file and in a module, named by the task or by the settings; a module is not imported for it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "graded_by").mkdir()
    (tmp_path / "graded_by" / "__init__.py").write_text("raise SystemExit('imported')")
    file = tmp_path / "graded_by" / "style.py"
    digests = digests_by(functions={"in_a_file": f"{file}:score", "in_a_module": "graded_by.style:score"})
    tasks = [
        the_task(grader="function", target=target)
        for target in (f"{file}:score", "graded_by.style:score", "in_a_file", "in_a_module")
    ]
    tasks += [
        the_task(grader="verifiers", name=str(file), index=0),
        the_task(grader="inspect", name=f"{file}:mine", index=0),
    ]
    file.write_text("def score(**given): return 1")
    before = [digests.of(task) for task in tasks]
    assert [digests.of(task) for task in tasks] == before
    file.write_text("def score(**given): return 0")
    importlib.invalidate_caches()
    assert not {digests.of(task) for task in tasks} & set(before)
    file.unlink()
    tasks += [the_task(grader="function", target=target) for target in ("a\0b.py:f", "a\0b:f", "a..b:f")]
    assert all(digests.of(task) for task in tasks)


def test_another_judge_of_the_settings_is_another_judge() -> None:
    task = the_task(grader="judge", judge="j", question="Is it?")
    settings = {"url": "http://judge/v1", "model": "m"}
    before = digests_by(judges={"j": settings}).of(task)
    assert digests_by(judges={"j": {**settings, "timeout_s": 5, "key_env": "KEY"}}).of(task) == before
    for other in ({"model": "n"}, {"temperature": 0.5}, {"extra_body": {"reasoning_effort": "low"}}):
        assert digests_by(judges={"j": {**settings, **other}}).of(task) != before
    named = the_task(grader="function", target="f")
    assert digests_by(functions={"f": "a:f"}).of(named) != digests_by(functions={"f": "b:f"}).of(named)
