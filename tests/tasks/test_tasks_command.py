"""``turnstile tasks``: lists, shows, and proves tasks; the shipped ones are proven here."""

from __future__ import annotations

import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from harbor_support import steps_folder
from typer.testing import CliRunner, Result

from turnstile.cli.app import app
from turnstile_server.sandboxes.run_folder import RunFolder
from turnstile_server.tasks.registry import load_tasks

pytestmark = pytest.mark.slow

LOCAL = ["--sandbox", "local"]
SANDBOXES = [
    pytest.param(LOCAL, id="local"),
    pytest.param(["--sandbox", "docker"], marks=[pytest.mark.docker, pytest.mark.thorough], id="docker"),
]

TESTS = """\
import unittest
from lib import two

class T(unittest.TestCase):
    def test_two(self): self.assertEqual(two(), 2)
    def test_sum(self): self.assertEqual(two() + two(), 4)
"""
SOUND = {
    "id": "sound",
    "instruction": "x",
    "base": {"inline": {"lib.py": "def two(): return 3\n", "old.py": ""}},
    "tests": {
        "files": {"inline": {"test_it.py": TESTS}},
        "expected": ["test_it.T.test_two", "test_it.T.test_sum"],
    },
    "gold": {"files": {"inline": {"lib.py": "def two(): return 2\n"}}, "delete": ["old.py"]},
}


def run(*arguments: str) -> Result:
    """In a thread of its own: fixtures of other suites may keep a loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        command = thread.submit(CliRunner().invoke, app, ["tasks", *arguments], env={"COLUMNS": "200"})
        return command.result()


def image(sandbox: list[str]) -> list[str]:
    return [*sandbox, "--image", os.environ["TURNSTILE_TEST_IMAGE"]] if "docker" in sandbox else sandbox


def written(folder: Path, **changes: object) -> str:
    path = folder / "t.yaml"
    path.write_text(yaml.safe_dump({**SOUND, **changes}))
    return str(path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_the_shipped_tasks_are_sound(sandbox: list[str]) -> None:
    shipped = list(load_tasks([]))
    assert len(shipped) >= 10
    assert all(task.difficulty and task.gold and task.graded for task in shipped)
    done = run("validate", *image(sandbox))
    assert done.exit_code == 0, done.output
    assert f"{len(shipped)} of {len(shipped)} tasks are sound." in done.stdout


def test_a_sound_task_passes(tmp_path: Path) -> None:
    done = run("validate", written(tmp_path), *LOCAL)
    assert (done.exit_code, "1 of 1 tasks are sound." in done.stdout) == (0, True), done.output


def test_a_gold_solution_that_fails_is_told_with_the_tests_that_do(tmp_path: Path) -> None:
    wrong = {"files": {"inline": {"lib.py": "def two(): return 4\n"}}}
    done = run("validate", written(tmp_path, gold=wrong), *LOCAL)
    assert done.exit_code == 1
    assert "sound: the gold solution scores 0" in done.stderr
    assert "test_it.T.test_two failed: AssertionError: 4 != 2" in done.stderr
    assert "test_it.T.test_sum failed" in done.stderr


def test_a_task_that_is_solved_by_doing_nothing_is_told(tmp_path: Path) -> None:
    solved = {"inline": {"lib.py": "def two(): return 2\n"}}
    done = run("validate", written(tmp_path, base=solved), *LOCAL)
    assert done.exit_code == 1
    assert "sound: the empty work scores 1, too" in done.stderr


def test_hidden_tests_that_cannot_run_are_told(tmp_path: Path) -> None:
    tests = {"files": {"inline": {"test_it.py": "def ("}}, "expected": ["test_it.T.test_two"]}
    done = run("validate", written(tmp_path, tests=tests), *LOCAL)
    assert done.exit_code == 1
    assert "cannot run: test_it.py: not Python" in done.stderr


def test_a_set_up_that_fails_and_a_task_without_gold_are_told(tmp_path: Path) -> None:
    assert "set-up of task sound" in run("validate", written(tmp_path, setup=["false"]), *LOCAL).stderr
    assert "no gold solution" in run("validate", written(tmp_path, gold=None), *LOCAL).stderr


def test_a_task_above_the_ceiling_is_wrong_and_one_without_a_grader_is_not(tmp_path: Path) -> None:
    done = run("validate", written(tmp_path, sandbox={"cpus": 10_000}), *LOCAL)
    assert (done.exit_code, "above this server's ceiling" in done.stderr) == (1, True)
    done = run("validate", written(tmp_path, tests=None), *LOCAL)
    assert (done.exit_code, "not graded" in done.stdout) == (0, True)


def test_a_wrong_answer_of_the_gold_solution_is_told(tmp_path: Path) -> None:
    done = run("validate", written(tmp_path, tests=None, answer={"value": "a"}, gold={"answer": "b"}), *LOCAL)
    assert (done.exit_code, "its answer is wrong: another text" in done.stderr) == (1, True)


def test_broken_files_end_it_with_every_problem(tmp_path: Path) -> None:
    path = written(tmp_path, difficulty="very")
    done = run("validate", path, *LOCAL)
    assert done.exit_code == 2
    assert "t.yaml" in done.stderr
    assert ": difficulty: " in done.stderr


def test_it_works_beside_a_server_with_the_same_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        monkeypatch.setenv("TURNSTILE_SANDBOXES__RUN_DIR", folder)
        servers = RunFolder(Path(folder))
        servers.take()
        Path(folder, "sb-of-the-server").mkdir()
        done = run("validate", written(tmp_path), *LOCAL)
        servers.give_back()
        assert done.exit_code == 0, done.stderr
        assert os.listdir(folder) == ["sb-of-the-server"]


def test_only_some_can_be_chosen(tmp_path: Path) -> None:
    done = run("validate", "--only", "count-errors", *LOCAL)
    assert (done.exit_code, "1 of 1 tasks are sound." in done.stdout) == (0, True)
    assert run("validate", "--only", "nothing", *LOCAL).exit_code == 1


def test_a_large_set_is_listed_in_parts_that_say_how_to_go_on(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    made = ({"id": f"t{number}", "instruction": "1 + 1?", "answer": "2"} for number in range(2500))
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in made))

    def listed(*options: str) -> tuple[list[str], str, int]:
        done = run("list", f"rows:{rows}", *options)
        assert done.exit_code == 0, done.output
        ids = [line.split()[0] for line in done.stdout.splitlines() if line.strip().startswith("t")]
        return ids, done.stderr.strip(), done.stdout.count("instruction")

    ids = [f"t{number}" for number in range(2500)]
    assert listed() == (ids[:1000], "1000 of 2500 tasks; --start 1000 goes on.", 1)
    assert listed("--start", "2499") == (ids[2499:], "1 of 2500 tasks.", 1)
    assert listed("--limit", "9999") == (ids, "", 1)
    assert listed("--start", "3000") == ([], "0 of 2500 tasks.", 1)


def test_tasks_are_listed_and_proven_beside_one_that_is_wrong(tmp_path: Path) -> None:
    good = {"id": "good", "instruction": "1?", "answer": {"value": "1"}, "gold": {"answer": "1"}}
    (tmp_path / "tasks.jsonl").write_text(f'{json.dumps(good)}\n{{"id": "bad"}}\n')
    for command in (["list"], ["validate", *LOCAL]):
        done = run(command[0], str(tmp_path), *command[1:])
        assert done.exit_code == 1, done.output
        assert "good" in done.stdout
        assert "left out, because it cannot be used:" in done.stderr
        assert "tasks.jsonl:2: instruction: it is missing" in done.stderr
    assert run("show", "good", str(tmp_path)).exit_code == 0


def test_list_names_every_task() -> None:
    done = run("list")
    assert done.exit_code == 0
    for task in load_tasks([]):
        assert task.id in done.stdout


def test_show_hides_what_an_agent_must_not_see() -> None:
    done = run("show", "count-errors")
    shown = yaml.safe_load(done.stdout)
    assert shown["id"] == "count-errors"
    assert not {"tests", "answer", "grading", "gold"} & shown.keys()
    told = yaml.safe_load(run("show", "count-errors", "--solution").stdout)
    assert "gold" in told
    assert told["grading"].keys() == {"answer"}
    assert "Close to it: count-errors" in run("show", "count-error").stderr


def test_show_hides_the_steps_of_a_task(tmp_path: Path) -> None:
    folder = steps_folder(tmp_path / "three")
    hidden = run("show", "three", str(folder))
    assert hidden.exit_code == 0, hidden.stderr
    assert "steps" not in yaml.safe_load(hidden.stdout)
    told = yaml.safe_load(run("show", "three", str(folder), "--solution").stdout)
    assert [step["name"] for step in told["steps"]] == ["one", "two", "three"]


def test_a_tool_of_a_task_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    done = run("validate", written(tmp_path, tools={"functions": [{"function": "absent.py:look"}]}), *LOCAL)
    assert done.exit_code == 2
    assert "sound: function" in done.stderr
    assert "there is no file" in done.stderr


def test_a_leak_of_the_solution_is_told_with_its_place(tmp_path: Path) -> None:
    body = (
        "    first_half = 1 + 0  # one\n    second_half = 0 + 1  # one more\n    return first_half + second_half\n"
    )
    fix = f"def two():\n{body}"
    base = {"inline": {"lib.py": "def two(): return 3\n", "old.py": "", "build/lib.py.orig": fix}}
    done = run("validate", written(tmp_path, base=base, gold={"files": {"inline": {"lib.py": fix}}}), *LOCAL)
    assert done.exit_code == 1
    assert (
        "the gold solution can be read in the agent's sandbox: /workspace/build/lib.py.orig has 3 of its 3"
        in done.output
    )


def test_a_work_that_is_known_to_be_wrong_is_proven_wrong(tmp_path: Path) -> None:
    half = {"name": "half", "reward": 0, "files": {"inline": {"lib.py": "def two(): return 2.5\n"}}}
    right = {"name": "right", "reward": 0, "files": {"inline": {"lib.py": "def two(): return 2\n"}}}
    assert run("validate", written(tmp_path, wrong=[half]), *LOCAL).exit_code == 0
    done = run("validate", written(tmp_path, wrong=[half, right]), *LOCAL)
    assert (done.exit_code, "sound: the wrong work 'right' scores 1, not 0" in done.output) == (1, True), (
        done.output
    )


def test_a_report_is_gone_on_with(tmp_path: Path) -> None:
    report = str(tmp_path / "report.jsonl")
    source = written(tmp_path)
    assert run("validate", source, *LOCAL, "--report", report).exit_code == 0
    first = Path(report).read_text()
    assert run("validate", source, *LOCAL, "--report", report).exit_code == 2
    assert run("validate", source, *LOCAL, "--resume").exit_code == 2
    assert run("validate", source, *LOCAL, "--report", report, "--resume").exit_code == 0
    assert Path(report).read_text() == first
    written(tmp_path, instruction="y")
    assert run("validate", source, *LOCAL, "--report", report, "--resume", "--runs", "3").exit_code == 0
    assert len(Path(report).read_text().splitlines()) == 2
