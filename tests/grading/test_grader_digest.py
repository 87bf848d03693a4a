"""The digest of what judges a task: another one where any file that judges is another."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnstile_server.grading.digest import GraderDigests
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.tarball import pack


@pytest.mark.parametrize("judge", ["tests", "script"])
def test_an_edited_file_of_what_judges_is_another_judge(judge: str, tmp_path: Path) -> None:
    shown = {"expected": ["test_a.A.test_a"]} if judge == "tests" else {}
    fields = {"id": "t", "instruction": "x", judge: {"files": {"folder": str(tmp_path)}, **shown}}
    task = Task.model_validate(fields)
    digests = GraderDigests(lambda files: pack(files, TaskSettings()))
    (tmp_path / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
    before = digests.of(task)
    assert digests.of(task) == before
    (tmp_path / "test.sh").write_text("echo 0 > /logs/verifier/reward.txt")
    assert digests.of(task) != before
