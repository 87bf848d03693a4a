"""The script of a row that brings none: which command it runs, on which files, and where it leaves them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from rows_support import classic, written
from swe_repository import Repository, make_repository

from turnstile_server.errors import StartupError
from turnstile_server.kinds.swe.options import SweTests
from turnstile_server.kinds.swe.patch_files import patched_files
from turnstile_server.kinds.swe.scripts import files_to_run, script_of
from turnstile_server.tasks.registry import load_tasks

COLUMNS = {"log_parser": "parse_log_pytest", "image": "ink:1"}
OWN = "tox -e py && pytest -rA"


def command_of(tmp_path: Path, columns: dict[str, Any], options: str = "") -> str:
    """What the script of the row runs between the markers."""
    (task,) = load_tasks([written(tmp_path / "rows.jsonl", [classic(**columns)]) + options])
    swe = task.grading["swe"]
    assert isinstance(swe, SweTests)
    return swe.eval_script.partition(": '>>>>> Start Test Output'\n")[2].partition("\n: '>>>>> End")[0]


@pytest.mark.parametrize(
    ("columns", "options", "command"),
    [
        ({"test_cmd": OWN}, "", OWN),
        ({"TEST_CMD": OWN}, "", OWN),
        ({"test_command": OWN}, "", OWN),
        ({"test_cmds": ["make", OWN]}, "", f"make\n{OWN}"),
        ({"test_cmds": f'["make", "{OWN}"]'}, "", f"make\n{OWN}"),
        ({"test_cmd": "[ -f tox.ini ] && tox"}, "", "[ -f tox.ini ] && tox"),
        ({"install_config": {"test_cmd": OWN}}, "", OWN),
        ({"install_config": {"test_cmd": ["make", OWN]}}, "", f"make\n{OWN}"),
        ({"install_config": {"test_cmd": "never"}, "test_cmd": OWN}, "", OWN),
        ({"test_cmd": "", "install_config": {"test_cmd": OWN}}, "", OWN),
        ({"test_cmd": "pytest -rA {files} -q"}, "", "pytest -rA tests/test_a.py -q"),
        ({"test_cmd": "never"}, "?test_cmd=mine", "mine"),
        ({"test_cmd": OWN}, "?test_cmd={test_cmd} {files}", f"{OWN} tests/test_a.py"),
    ],
)
def test_the_rows_own_command_runs_as_it_is_written(
    columns: dict[str, Any], options: str, command: str, tmp_path: Path
) -> None:
    assert command_of(tmp_path, {**COLUMNS, **columns}, options) == command


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ({"test_cmd": ["pytest", "-rA"]}, "", "test_cmd: a list has a whole command in each item"),
        ({"test_cmds": {"a": 1}}, "", "test_cmds: it is neither a command nor a list of commands"),
        ({"install_config": {"test_cmd": [1]}}, "", "install_config.test_cmd: it is neither"),
        ({}, "?test_cmd={test_cmd} -q", "{test_cmd} is the row's own command, and the row has none"),
    ],
)
def test_a_command_that_is_none_is_told_with_its_column(
    columns: dict[str, Any], options: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError) as failed:
        command_of(tmp_path, {**COLUMNS, **columns}, options)
    assert said in failed.value.message


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    folder = tmp_path / "repository"
    folder.mkdir()
    return make_repository(folder)


def test_the_files_of_a_command_are_those_in_which_a_runner_finds_the_tests(repository: Repository) -> None:
    patch = repository.row["test_patch"]
    judged = ["tests/test_ink.py::test_lower", "tests/test_other.py::test_it"]
    assert files_to_run(patch, judged) == ["tests/test_ink.py", "tests/test_other.py"]
    # Ids that name no file of the patch: what it has of code, and neither data nor a file that it deletes.
    assert files_to_run(patch, ["test_lower (tests.test_ink.Ink)"]) == [
        "tests/cases/broken.py",
        "tests/test_ink.py",
    ]


def test_a_script_puts_the_tests_in_place_and_the_old_ones_back(repository: Repository, tmp_path: Path) -> None:
    patch = repository.row["test_patch"]
    script = script_of("ls -R {files} tests", str(repository.folder), repository.base, patch, ["t"])
    work = repository.folder / "tests"
    (work / "data").mkdir()
    (work / "data" / "dump.sql").write_text("the agent's own file\n")
    done = subprocess.run(
        ["bash", "-c", script],
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "blob.zip" in done.stdout
    assert "test_gone.py" not in done.stdout
    assert (work / "data" / "blob.zip").read_bytes() == b"PK\x03\x04\x00\xff"
    assert (work / "test_gone.py").exists(), "put back"
    assert "test_hyphen" not in (work / "test_ink.py").read_text()


PATCHES = {
    "a rename without a change": (
        "diff --git a/a.py b/b.py\nsimilarity index 100%\nrename from a.py\nrename to b.py\n",
        [("a.py", "b.py")],
    ),
    "a rename and a change": (
        "diff --git a/a.py b/b.py\nrename from a.py\nrename to b.py\n--- a/a.py\n+++ b/b.py\n"
        "@@ -1 +1 @@\n-1\n+2\n",
        [("a.py", "b.py")],
    ),
    "blanks and letters": (
        'diff --git "a/t\\303\\251 x.py" "b/t\\303\\251 x.py"\nnew file mode 100644\n--- /dev/null\n'
        '+++ "b/t\\303\\251 x.py"\n@@ -0,0 +1 @@\n+1\n'
        "diff --git a/b c.py b/b c.py\n--- a/b c.py\t\n+++ b/b c.py\t\n@@ -1 +1 @@\n-1\n+2\n",
        [(None, "té x.py"), ("b c.py", "b c.py")],
    ),
    "lines of a hunk that look like a header": (
        "--- a/q.sql\n+++ b/q.sql\n@@ -1,2 +1,2 @@\n--- a/no.py\n+++ b/no.py\n 1\n--- a/z.py\n+++ /dev/null\n"
        "@@ -1 +0,0 @@\n-1\n\\ No newline at end of file\n",
        [("q.sql", "q.sql"), ("z.py", None)],
    ),
    "a mode, an empty file, and a deleted one": (
        "diff --git a/x.sh b/x.sh\nold mode 100644\nnew mode 100755\n"
        "diff --git a/e.py b/e.py\nnew file mode 100644\nindex 0000000..e69de29\n"
        "diff --git a/d.py b/d.py\ndeleted file mode 100644\nindex e69de29..0000000\n",
        [("x.sh", "x.sh"), (None, "e.py"), ("d.py", None)],
    ),
    "a copy": ("diff --git a/a.py b/c.py\ncopy from a.py\ncopy to c.py\n", [(None, "c.py")]),
    "no patch": ("not a patch\n", []),
}


@pytest.mark.parametrize("name", PATCHES)
def test_the_files_of_a_patch_are_those_that_git_would_change(name: str) -> None:
    patch, files = PATCHES[name]
    assert [(file.old, file.new) for file in patched_files(patch)] == files
