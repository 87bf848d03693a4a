"""Work that tries to pass hidden tests without the fix scores 0; the same around the fix does not harm it."""

from __future__ import annotations

import json

import pytest
from grading_support import BUG, EXPECTED, FIX, HIDDEN, VISIBLE, Watched, grader, tar, the_task, work

from turnstile_server.grading.protocol import Work

pytestmark = [pytest.mark.anyio, pytest.mark.cheats]

FORGED = "0" * 64 + " " + json.dumps({"faults": [], "passed": EXPECTED, "failed": [], "output": ""})
PASS_ALL = "import unittest\nunittest.TestCase.assertEqual = lambda *args, **kwargs: None\n"
LOADS_OF_FDS = (
    "import os\nfor fd in range(3, 64):\n"
    '    try:\n        os.write(fd, b\'{"test": "%s", "status": "passed", "message": ""}\\n\')\n'
    "    except OSError:\n        pass\n"
)

AT_IMPORT = {
    "os._exit": "import os\nos._exit(0)\n",
    "sys.exit": "import sys\nsys.exit(0)\n",
    "a forged summary on stdout": (
        f"print({FORGED!r}, flush=True)\nprint('Ran 3 tests\\n\\nOK')\nimport os\nos._exit(0)\n"
    ),
    "a forged line on the runner's stdout": (
        f"import os\ntry:\n    open(f'/proc/{{os.getppid()}}/fd/1', 'w').write({FORGED!r} + '\\n')\n"
        "except OSError:\n    pass\nos._exit(0)\n"
    ),
    "lines on the report without its key": LOADS_OF_FDS,
    "the runner killed": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n",
    "an assertion of unittest replaced": PASS_ALL,
    "an assertion's code replaced": (
        "import unittest\nunittest.TestCase.assertEqual.__code__ = (lambda self, a, b, msg=None: None).__code__\n"
    ),
    "TestCase.run replaced": (
        "import unittest\nunittest.TestCase.run = lambda self, result=None: result.addSuccess(self)\n"
    ),
    "failures turned to successes": (
        "import unittest\nunittest.TestResult.addFailure = lambda self, test, err: self.addSuccess(test)\n"
    ),
    "the runner's own result replaced": (
        "import unittest\nfor one in unittest.TestResult.__subclasses__():\n"
        "    if one.__name__ == 'Result':\n"
        "        one.addFailure = lambda self, test, err: self.addSuccess(test)\n"
    ),
    "an inherited method hidden": (
        "import unittest\nunittest.IsolatedAsyncioTestCase.assertEqual = lambda *args: None\n"
        "unittest.case.isinstance = lambda *args: True\n"
    ),
    "another unittest for whoever imports it": (
        "import sys, types\nfake = types.ModuleType('unittest')\nfake.TestCase = type('TestCase', (), {})\n"
        "sys.modules['unittest'] = fake\n"
    ),
    "builtins replaced": "import builtins\nbuiltins.AssertionError = ZeroDivisionError\n",
    "hidden tests rewritten": (
        "import glob\nfor path in glob.glob('/tmp/turnstile-grading/**/*.py', recursive=True):\n"
        "    try:\n        open(path, 'w').write('')\n    except OSError:\n        pass\n"
    ),
    "a daemon that stays": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n"
        "    os._exit(0)\n"
    ),
}


@pytest.mark.parametrize("cheat", AT_IMPORT.values(), ids=AT_IMPORT.keys())
async def test_code_that_runs_when_the_tests_import_it_scores_0(provider: Watched, cheat: str) -> None:
    grade = await grader(provider).grade(the_task(), work({"mathx/__init__.py": cheat + BUG}))
    assert grade.reward == 0.0
    assert grade.components == {"tests": 0.0}


PLANTED: dict[str, str | tuple[str, str]] = {
    "conftest.py": "import os\nos._exit(0)\n",
    "tests/conftest.py": PASS_ALL,
    "sitecustomize.py": PASS_ALL,
    "usercustomize.py": PASS_ALL,
    "mathx.pth": "import os; os._exit(0)\n",
    "unittest.py": "import os\nos._exit(0)\n",
    "unittest/__init__.py": "import os\nos._exit(0)\n",
    "json.py": "import os\nos._exit(0)\n",
    "os.py": "raise SystemExit(0)\n",
    "test_hidden.py": HIDDEN.replace("double(2), 4", "2, 2"),
    "test_second.py": "",
    "tests/test_visible.py": VISIBLE.replace("double(1)", "2"),
    "mathx/__pycache__/__init__.cpython-311.pyc": "no code",
    "pytest.ini": "[pytest]\naddopts = --co\n",
    "setup.cfg": "[tool:pytest]\naddopts = --co\n",
    "away": ("link", "/etc"),
    "up": ("link", "../../etc/passwd"),
    "around": ("link", "mathx/../../etc"),
    "hidden": ("link", "/tmp/turnstile-grading/tests"),
    "pipe": ("pipe", ""),
    "device": ("device", ""),
    "nothing": ("hard", "not/there"),
}
LEFT_OUT = ("conftest.py", "tests/conftest.py", "sitecustomize.py", "usercustomize.py", "mathx.pth", "pytest.ini")
LEFT_OUT += ("mathx/__pycache__/__init__.cpython-311.pyc", "away", "up", "around", "hidden", "pipe", "device")


async def test_planted_files_do_not_pass_the_tests_and_are_reported(provider: Watched) -> None:
    planted = {path: content for path, content in PLANTED.items() if path != "unittest.py"}
    grade = await grader(provider, max_shown=100).grade(the_task(), work(planted))
    assert grade.reward == 0.0
    assert set(LEFT_OUT) <= {path for path, _ in grade.detail["diff"]["left_out"]}
    assert "tests/test_visible.py" in grade.detail["diff"]["changed"]


async def test_planted_files_do_not_harm_the_fix(provider: Watched) -> None:
    daemon = AT_IMPORT["a daemon that stays"]
    grade = await grader(provider).grade(the_task(), work({**PLANTED, "mathx/__init__.py": daemon + FIX}))
    assert grade.reward == 1.0, grade.detail


async def test_the_fix_alone_scores_1_and_nothing_0(provider: Watched) -> None:
    judge = grader(provider)
    fixed = await judge.grade(the_task(), work({"mathx/__init__.py": FIX}))
    assert (fixed.reward, fixed.components) == (1.0, {"tests": 1.0})
    assert fixed.detail["diff"]["changed"] == ["mathx/__init__.py"]
    untouched = await judge.grade(the_task(), work({}))
    assert untouched.reward == 0.0
    assert {one["id"] for one in untouched.detail["tests"]["failed"]} == set(EXPECTED)


async def test_what_the_agent_deleted_is_deleted(provider: Watched) -> None:
    gone = await grader(provider).grade(the_task(), work({}, "mathx/__init__.py", "tests/test_visible.py"))
    assert gone.reward == 0.0
    assert gone.detail["diff"]["deleted"] == ["mathx", "mathx/__init__.py", "tests/test_visible.py"]


async def test_tests_that_never_end_score_0(provider: Watched) -> None:
    hanging = work({"mathx/__init__.py": "while True:\n    pass\n"})
    grade = await grader(provider).grade(the_task(tests={"timeout_s": 0.5}), hanging)
    assert grade.reward == 0.0
    assert "ran out of time" in json.dumps(grade.detail["tests"])


@pytest.mark.parametrize("count", [6_000, 100_000])
async def test_an_archive_of_very_many_files_scores_0(provider: Watched, count: int) -> None:
    many = work({"mathx/__init__.py": FIX, **{f"f{number}": "" for number in range(count)}})
    grade = await grader(provider).grade(the_task(), many)
    assert grade.reward == 0.0
    refused = grade.detail["diff"]["refused"]
    assert "at most 5000" in refused or "no space left" in refused  # a hundred thousand fill a small disk first


@pytest.mark.parametrize("archive", [b"", b"\xff" * 4096, b"no tar at all"])
async def test_an_archive_that_is_none_changes_nothing_or_is_refused(provider: Watched, archive: bytes) -> None:
    assert (await grader(provider).grade(the_task(), Work(archive=archive))).reward == 0.0


async def test_protected_paths_stay_as_the_task_has_them(provider: Watched) -> None:
    task = the_task(tests={"protected": ["mathx"]})
    grade = await grader(provider).grade(task, work({"mathx/__init__.py": FIX}))
    assert grade.reward == 0.0
    assert grade.detail["diff"]["left_out"] == [["mathx/__init__.py", "protected by the task"]]


HIDING = {
    "a package": {"rules/__init__.py": "LIMIT = 5\n"},
    "a link to one": {"other/__init__.py": "LIMIT = 5\n", "rules": ("link", "other")},
    "a library": {"rules.so": "no code", "rules.abi3.so": "no code", "rules.cpython-311-x86_64-linux-gnu.so": ""},
}


@pytest.mark.parametrize("files", HIDING.values(), ids=HIDING.keys())
async def test_nothing_takes_the_place_of_a_module_that_the_task_protects(
    provider: Watched, files: dict[str, str | tuple[str, str]]
) -> None:
    text = (
        HIDDEN.replace("mathx", "rules").replace("double(2), 4", "LIMIT, 4").replace("double(5), 10", "LIMIT, 4")
    )
    base = {"rules.py": "LIMIT = 4\n", "notes.txt": ""}
    tests = {
        "protected": ["rules.py"],
        "files": {"inline": {"test_hidden.py": text.replace("import double", "import LIMIT")}},
        "expected": EXPECTED[:2],
    }
    task = the_task(base={"inline": base}, tests=tests)
    honest = {"rules/data.txt": "a folder beside it", "notes.txt": "changed", "rule.so": ""}
    grade = await grader(provider).grade(task, Work(archive=tar({**base, **honest, **files})))
    assert grade.reward == 1.0, grade.detail
    assert grade.detail["diff"]["changed"] == ["notes.txt"]
    assert "takes the place of a module" in str(grade.detail["diff"]["left_out"])
