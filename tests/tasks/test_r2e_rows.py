"""Rows of R2E-Gym become tasks, and nothing of the commit or of the tests is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rows_support import without, written

from turnstile_server.control.catalog import task_info
from turnstile_server.errors import StartupError
from turnstile_server.kinds.r2e.options import R2eTests
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.registry import load_tasks

COMMIT = "a" * 40


def r2e_of(task: Task) -> R2eTests:
    found = task.grading["r2e"]
    assert isinstance(found, R2eTests)
    return found


def line(kind: str, content: str) -> dict[str, str]:
    return {"type": kind, "content": content}


def file_diff(path: str, *lines: dict[str, str], **changes: Any) -> dict[str, Any]:
    ranges = {"old_range": {"start": 1, "length": None}, "new_range": {"start": 1, "length": 2}}
    hunk = {"descriptor": {**ranges, "section": "def f"}, "line_group": {"all_lines": list(lines)}}
    return {
        "header": {"file": {"path": path}, "misc_line": changes.pop("misc_line", None)},
        "minus_file": {"path": f"a/{path}"},
        "plus_file": {"path": f"b/{path}"},
        "is_binary_file": False,
        "hunks": [hunk] if lines else [],
        **changes,
    }


CHANGED = file_diff("ink/pen.py", line("context", "x = 1"), line("added", "the_golden_line = 2"))
LAST = file_diff(
    "ink/nib.py", line("deleted", "y = 1"), line("added", "y = 2"), line("note", "No newline at end of file")
)
NEW = file_diff("ink/cap.py", misc_line="new file mode 100644", minus_file=None, plus_file=None)
TEST = file_diff("ink/tests/test_pen.py", line("added", "the_secret_test = 3"))
PATCH = """\
diff --git a/ink/pen.py b/ink/pen.py
--- a/ink/pen.py
+++ b/ink/pen.py
@@ -1 +1,2 @@
 x = 1
+the_golden_line = 2
diff --git a/ink/nib.py b/ink/nib.py
--- a/ink/nib.py
+++ b/ink/nib.py
@@ -1 +1,2 @@
-y = 1
+y = 2
\\ No newline at end of file
diff --git a/ink/cap.py b/ink/cap.py
new file mode 100644
"""


def commit_of(*diffs: dict[str, Any]) -> str:
    return json.dumps({"file_diffs": diffs, "commit_message": "Add the_golden_line"})


def r2e(**changes: Any) -> dict[str, Any]:
    return {
        "repo_name": "ink",
        "docker_image": f"quill/ink_final:{COMMIT}",
        "commit_hash": COMMIT,
        "parsed_commit_content": commit_of(CHANGED, LAST, NEW, TEST),
        "execution_result_content": json.dumps({"test_file_codes": ["the_secret_test = 3"]}),
        "modified_files": ["ink/pen.py"],
        "relevant_files": ["ink/pen.py", "ink/hint.py"],
        "problem_statement": "Noise\n[ISSUE]\nThe {pen} leaks.\n[/ISSUE]\n",
        "prompt": "Write an issue of the_golden_line",
        "expected_output_json": json.dumps({"TestPen.test_dry": "PASSED", "test_wet - no": "FAILED"}),
        **changes,
    }


def one(tmp_path: Path, row: dict[str, Any], options: str = "") -> Task:
    (task,) = load_tasks([written(tmp_path / "rows.jsonl", [row]) + options])
    return task


def refused(tmp_path: Path, *rows: dict[str, Any], options: str = "") -> list[str]:
    with pytest.raises(StartupError) as failed:
        load_tasks([written(tmp_path / "rows.jsonl", rows) + options])
    return failed.value.message.replace(f"{tmp_path}/", "").splitlines()[1:]


def test_a_row_has_its_image_its_issue_its_outcomes_and_the_commit_without_tests_as_its_patch(
    tmp_path: Path,
) -> None:
    task = one(tmp_path, r2e())
    assert (task.id, task.image, task.workdir) == ("ink-aaaaaaaaaaaa", f"quill/ink_final:{COMMIT}", "/testbed")
    assert task.instruction.endswith("\n\nThe {pen} leaks.")
    assert r2e_of(task).expected == {"TestPen.test_dry": "PASSED", "test_wet - no": "FAILED"}
    assert task.gold is not None
    assert task.gold.patch == PATCH
    assert (task.graders, task.trust, task.git_history) == (("r2e",), "in_process", "one_commit")
    assert task.env["PATH"].startswith("/testbed/.venv/bin:")


def test_nothing_of_the_commit_or_of_the_tests_is_shown(tmp_path: Path) -> None:
    row = r2e()
    for task in (one(tmp_path, row), one(tmp_path, row, "?where=repo_name=ink")):
        shown = f"{task.instruction}{task_info(task).model_dump_json()}"
        for secret in ("golden", "secret", "test_dry", "hint.py", "pen.py", COMMIT):
            assert secret not in shown.replace(str(task.image), ""), secret


@pytest.mark.parametrize("column", ["prompt", "relevant_files", "commit_hash", "parsed_commit_content"])
def test_a_mapping_shows_nobody_the_answer(column: str, tmp_path: Path) -> None:
    mapping = tmp_path / "map.yaml"
    for text in (f"instruction: '{{{column}}}'\n", f"metadata: [{column}]\n"):
        mapping.write_text(text)
        said = refused(tmp_path, r2e(), options=f"?map={mapping}")
        assert column in said[0]


def test_a_mapping_changes_image_folder_and_time(tmp_path: Path) -> None:
    task = one(tmp_path, r2e(), "?image=mine/{repo_name}:1&workdir=/code&timeout_s=9")
    assert (task.image, task.workdir, r2e_of(task).timeout_s) == ("mine/ink:1", "/code", 9)
    assert task.env["PATH"].startswith("/code/.venv/bin:")
    said = refused(tmp_path, r2e(), options="?test_cmd=pytest&log_parser=parse_log_pytest")
    assert [part.split(": ")[1] for part in said] == ["test_cmd", "log_parser"]


@pytest.mark.parametrize(
    "commit",
    [
        None,
        "",
        commit_of(TEST),
        commit_of(CHANGED, file_diff("ink/logo.png", is_binary_file=True)),
        commit_of(CHANGED, file_diff("ink/new.py", misc_line="similarity index 90%")),
    ],
)
def test_a_row_of_whose_commit_no_whole_patch_can_be_made_has_no_solution(commit: Any, tmp_path: Path) -> None:
    assert one(tmp_path, r2e(parsed_commit_content=commit)).gold is None


def test_everything_that_is_wrong_is_told_at_once_with_line_and_column(tmp_path: Path) -> None:
    deep = "[" * 100_000
    said = refused(
        tmp_path,
        r2e(problem_statement="", expected_output_json="{not JSON"),
        r2e(commit_hash="b" * 40),
        r2e(expected_output_json="[]", parsed_commit_content="{}"),
        r2e(expected_output_json='{"a": "SKIPPED"}'),
        r2e(expected_output_json=deep, parsed_commit_content=deep),
        without(r2e(expected_output_json="{}"), "commit_hash"),
        r2e(parsed_commit_content=commit_of({**CHANGED, "header": {"file": {"path": ""}}})),
        r2e(parsed_commit_content=commit_of(file_diff("a.py", line("odd", "x")))),
        r2e(problem_statement="[ISSUE] [/ISSUE]", docker_image=None),
        r2e(parsed_commit_content=commit_of({**CHANGED, "hunks": 7})),
    )
    assert [line.partition(": ")[0] + ": " + line.split(": ")[1] for line in said] == [
        "rows.jsonl:1: expected_output_json",
        "rows.jsonl:1: problem_statement",
        "rows.jsonl:3: expected_output_json",
        "rows.jsonl:3: parsed_commit_content",
        "rows.jsonl:4: expected_output_json",
        "rows.jsonl:5: expected_output_json",
        "rows.jsonl:5: parsed_commit_content",
        "rows.jsonl:6: commit_hash",
        "rows.jsonl:6: expected_output_json",
        "rows.jsonl:7: parsed_commit_content",
        "rows.jsonl:8: parsed_commit_content",
        "rows.jsonl:9: problem_statement",
        "rows.jsonl:9: image",
        "rows.jsonl:10: parsed_commit_content",
    ]
