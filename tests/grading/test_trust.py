"""Tasks that trust the work say so; tests that would run the work as its judge are refused or stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from grading_support import EXPECTED, FIX, Watched, grader, the_task, work
from pydantic import ValidationError
from typer.testing import CliRunner

from turnstile.cli.app import app
from turnstile_server.control.catalog import task_info
from turnstile_server.errors import TaskFailed
from turnstile_server.grading.own_programs import runs_the_work
from turnstile_server.sandboxes.helper_sandbox import HelperSandbox
from turnstile_server.tasks.hidden_tests import HiddenTests


@pytest.mark.parametrize(
    "command",
    [
        ["./solve"],
        ["python3", "main.py"],
        ["python3", "-I", "-m", "unittest"],
        ["sh", "rotate.sh", "{tests}/x"],
        ["make", "test"],
        ["/usr/bin/node", "index.js"],
    ],
)
def test_a_command_that_runs_the_work_itself_needs_the_word(command: list[str]) -> None:
    fields = {"files": {}, "runner": "command", "command": command}
    with pytest.raises(ValidationError, match="of the work itself"):
        HiddenTests.model_validate(fields)
    assert HiddenTests.model_validate({**fields, "trust": "in_process"}).trust == "in_process"


@pytest.mark.parametrize(
    "command",
    [
        ["sh", "{tests}/check.sh"],
        ["python3", "-I", "{tests}/a.py", "x.py"],
        ["grep", "x", "a.txt"],
        ["sh", "-c", "test -f a"],
    ],
)
def test_a_command_of_the_tests_does_not(command: list[str]) -> None:
    assert HiddenTests.model_validate({"files": {}, "runner": "command", "command": command}).trust == "boundary"


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("check.py", "import os\nimport subprocess\n", 2),
        ("check.py", "import os\nos.system('x')\n", 2),
        ("check.py", "from runpy import run_path\n", 1),
        ("check.py", "exec(open('solve.py').read())\n", 1),
        ("check.py", "import os, sys\nsys.path.insert(0, os.getcwd())\nimport solve\n", 2),
        ("check.py", "import importlib\nsolve = importlib.import_module('solve')\n", 2),
        ("check.py", "import os, sys\nsys.path.append(os.path.dirname(__file__))\n", 0),
        ("check.py", "import sys\nHERE = Path(__file__).parent\nsys.path.insert(0, str(HERE))\n", 0),
        ("check.py", "import sys\nsys.path[:0] = ['.']\nimport solve\n", 2),
        ("check.py", "import sys\nsys.path += ['.']\nsys.path.remove('x')\n", 2),
        ("check.py", "import importlib\nimportlib.import_module('json')\n", 0),
        ("check.sh", "cd x\nsh rotate.sh a 2 || exit 1\n", 2),
        ("check.sh", "out=$(python3 main.py)\n", 1),
        ("check.sh", "git diff --quiet || exit 1\n", 1),
        ("check.sh", '"$AS_WORK" git diff --quiet\n', 0),
        ("check.sh", "if ./solve; then exit 0; fi\n", 1),
        ("check.py", "from turnstile_tests import run\nrun(['./solve'])\n", 0),
        ("check.sh", '"$AS_WORK" sh rotate.sh a 2 || exit 1\n', 0),
        ("check.sh", 'python3 "$(dirname "$0")/own.py"\n# sh rotate.sh\n', 0),
    ],
)
def test_validation_sees_where_a_command_starts_the_work(name: str, text: str, line: int) -> None:
    tests = HiddenTests.model_validate({"files": {}, "runner": "command", "command": ["sh", "{tests}/check.sh"]})
    found = runs_the_work(tests, {name: text.encode()})
    assert [each.split(": ")[0] for each in found] == ([f"{name}:{line}"] if line else [])
    assert runs_the_work(tests.model_copy(update={"trust": "in_process"}), {name: text.encode()}) == []


@pytest.mark.slow
@pytest.mark.anyio
async def test_hidden_tests_that_start_a_program_themselves_fail_and_say_why(provider: Watched) -> None:
    hidden = (
        "import subprocess, sys, unittest\nclass Hidden(unittest.TestCase):\n    def test_two(self):\n"
        "        subprocess.run([sys.executable, '-c', 'import mathx'], check=True)\n"
    )
    tests = {"files": {"inline": {"test_hidden.py": hidden}}, "expected": EXPECTED[:1]}
    fixed = work({"mathx/__init__.py": FIX})
    apart = await grader(provider).grade(the_task(tests=tests), fixed)
    assert apart.reward == 0.0
    assert "turnstile_tests.run" in apart.detail["tests"]["failed"][0]["message"]
    trusted = await grader(provider).grade(the_task(tests={**tests, "trust": "in_process"}), fixed)
    assert (trusted.reward, trusted.detail["tests"]["trust"]) == (1.0, "in_process")


@pytest.mark.slow
@pytest.mark.anyio
async def test_an_image_without_the_helper_says_that_such_tests_need_the_word(
    provider: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HelperSandbox, "can_launch", False)
    fixed = work({"mathx/__init__.py": FIX})
    with pytest.raises(TaskFailed, match="trust: in_process"):
        await grader(provider).grade(the_task(), fixed)
    assert (await grader(provider).grade(the_task(tests={"trust": "in_process"}), fixed)).reward == 1.0


def test_the_commands_and_the_catalog_say_which_tasks_trust_the_work(tmp_path: Path) -> None:
    task = the_task(tests={"trust": "in_process"})
    assert (task_info(task).trust, task_info(the_task()).trust) == ("in_process", "boundary")
    (tmp_path / "task.yaml").write_text(yaml.safe_dump(task.model_dump(mode="json", exclude_defaults=True)))
    shown = CliRunner().invoke(app, ["tasks", "list", str(tmp_path)], env={"COLUMNS": "200"})
    assert "tests (in process)" in shown.output, shown.output
