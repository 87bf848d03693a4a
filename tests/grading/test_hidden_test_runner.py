"""The program that runs hidden tests, started as the grader starts it, on folders of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from turnstile_server.grading.inside.run_tests import FAULTY, opened
from turnstile_server.grading.programs import IMAGE_TESTS, INSIDE

NONCE = b"n" * 32
UNIT = """
import unittest
from unittest import mock
import lib

class One(unittest.TestCase):
    def test_pass(self): self.assertEqual(lib.two(), 2)
    def test_fail(self): self.assertEqual(lib.two(), 3)
    def test_error(self): lib.nothing()
    @unittest.skip("why")
    def test_skip(self): pass
    @unittest.expectedFailure
    def test_expected(self): self.assertEqual(lib.two(), 3)
    @unittest.expectedFailure
    def test_unexpected(self): pass
    def test_subtests(self):
        for n in (2, 3):
            with self.subTest(n): self.assertEqual(lib.two(), n)
    @mock.patch("builtins.open")
    def test_mocked(self, opened): self.assertEqual(lib.two(), 2)
    async def test_not_async(self): pass
class Never(unittest.TestCase):
    @classmethod
    def setUpClass(cls): raise OSError("no set-up")
    def test_pass(self): pass
class Async(unittest.IsolatedAsyncioTestCase):
    async def test_pass(self): self.assertEqual(lib.two(), 2)
"""
PYTEST = """
import pytest
from lib import two

class TestOne:
    @pytest.mark.parametrize("n", [2, 3])
    def test_is(self, n, monkeypatch, tmp_path):
        monkeypatch.setattr("builtins.open", None)
        assert two() == n
def test_skip(): pytest.skip("why")
@pytest.mark.xfail
def test_xfail(): assert two() == 3
@pytest.mark.xfail
def test_xpass(): assert two() == 2
@pytest.fixture
def broken():
    yield
    raise OSError("no tear-down")
def test_teardown(broken): pass
def test_pass(): assert two() == 2
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for folder in ("tests", "work"):
        (tmp_path / folder).mkdir()
    (tmp_path / "work/lib.py").write_text("def two(): return 2\n")
    return tmp_path


def run_tests(
    place: Path, runner: str, *expected: str, python: str = sys.executable
) -> tuple[dict[str, str], Any, int]:
    """Status by test id, the whole of what was said, the exit status."""
    config = {
        "nonce": NONCE.hex(),
        "runner": runner,
        "tests": str(place / "tests"),
        "work": str(place / "work"),
        "import_paths": ["."],
        "expected": expected,
        "trust": "in_process",
        "shared": str(place / "shared"),
        "timeout_s": 60,
        "max_shown": 50,
    }
    argv = [python, *IMAGE_TESTS[1:], str(INSIDE / "start.py"), "run_tests"]
    done = subprocess.run(argv, input=json.dumps(config).encode(), capture_output=True, check=False, timeout=100)
    assert not done.stderr, done.stderr.decode()
    said = opened(NONCE, done.stdout.rstrip(b"\n"))
    statuses = dict.fromkeys(said["passed"], "passed") | {test: status for test, status, _ in said["failed"]}
    return statuses, said, done.returncode


def test_only_tests_that_ran_and_passed_are_passed(place: Path) -> None:
    (place / "tests/test_it.py").write_text(UNIT)
    wanted = {
        "One.test_pass": "passed",
        "One.test_fail": "failed",
        "One.test_error": "error",
        "One.test_skip": "skipped",
        "One.test_expected": "failed as expected",
        "One.test_unexpected": "passed unexpectedly",
        "One.test_subtests": "failed",
        "One.test_mocked": "passed",
        "Never.test_pass": "not run",
        "Async.test_pass": "passed",
    }
    statuses, said, exit_status = run_tests(place, "unittest", *(f"test_it.{name}" for name in wanted))
    assert statuses == {f"test_it.{name}": status for name, status in wanted.items()}
    assert exit_status == 1
    assert "no set-up" in json.dumps(said["failed"])


def test_all_passed_is_exit_status_0(place: Path) -> None:
    (place / "tests/test_it.py").write_text(UNIT)
    assert run_tests(place, "unittest", "test_it.One.test_pass", "test_it.Async.test_pass")[2] == 0


def test_hidden_tests_may_be_a_package_with_helpers(place: Path) -> None:
    package = place / "tests/hidden"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("WANT = 2\n")
    (package / "test_it.py").write_text(
        "import unittest\nfrom lib import two\nfrom hidden.helper import WANT\n"
        "class T(unittest.TestCase):\n    def test_a(self): self.assertEqual(two(), WANT)\n"
    )
    assert run_tests(place, "unittest", "hidden.test_it.T.test_a")[2] == 0


@pytest.mark.slow
def test_pytest_tells_by_id(place: Path) -> None:
    (place / "tests/test_it.py").write_text(PYTEST)
    wanted = {
        "TestOne::test_is[2]": "passed",
        "TestOne::test_is[3]": "failed",
        "test_skip": "skipped",
        "test_xfail": "skipped",
        "test_xpass": "passed unexpectedly",
        "test_teardown": "failed",
        "test_pass": "passed",
        "test_not_there": "not run",
    }
    statuses, _, exit_status = run_tests(place, "pytest", *(f"test_it.py::{name}" for name in wanted))
    assert statuses == {f"test_it.py::{name}": status for name, status in wanted.items()}
    assert exit_status == 1


@pytest.mark.parametrize(
    "planted",
    [
        {"conftest.py": "import os\nos._exit(0)\n"},
        {"pytest.ini": "[pytest]\naddopts = --collect-only\n"},
        {"pytest.py": "import os\nos._exit(0)\n"},
        {
            "cheat-1.dist-info/entry_points.txt": "[pytest11]\ncheat = cheat\n",
            "cheat-1.dist-info/METADATA": "Name: cheat\nVersion: 1\n",
            "cheat.py": "def pytest_runtest_makereport(item, call):\n    call.excinfo = None\n",
        },
    ],
    ids=["conftest", "ini", "pytest.py", "plug-in"],
)
@pytest.mark.parametrize(("returned", "exit_status"), [(2, 0), (3, 1)])
def test_what_is_planted_for_pytest_does_nothing(
    place: Path, planted: dict[str, str], returned: int, exit_status: int
) -> None:
    (place / "tests/test_it.py").write_text("from lib import two\ndef test_a(): assert two() == 2\n")
    (place / "work/lib.py").write_text(f"def two(): return {returned}\n")
    for path, text in planted.items():
        (place / "work" / path).parent.mkdir(exist_ok=True)
        (place / "work" / path).write_text(text)
    assert run_tests(place, "pytest", "test_it.py::test_a")[2] == exit_status


PYTEST_CHEATS = {
    "exit": "import os\nos._exit(0)\n",
    "reports": "import _pytest.reports as r\nr.TestReport.failed = property(lambda self: False)\n",
    "calls": "import _pytest.runner as r\nr.pytest_runtest_call = lambda item: None\n",
    "functions": "import _pytest.python as p\np.Function.runtest = lambda self: None\n",
}


@pytest.mark.parametrize("cheat", PYTEST_CHEATS.values(), ids=PYTEST_CHEATS.keys())
def test_work_that_changes_pytest_does_not_pass(place: Path, cheat: str) -> None:
    (place / "tests/test_it.py").write_text("from lib import two\ndef test_a(): assert two() == 2\n")
    (place / "work/lib.py").write_text(cheat + "def two(): return 3\n")
    statuses, _, exit_status = run_tests(place, "pytest", "test_it.py::test_a")
    assert statuses["test_it.py::test_a"] != "passed"
    assert exit_status == 1


def test_an_image_without_pytest_is_a_fault(place: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    (place / "tests/test_it.py").write_text("def test_a(): pass\n")
    _, said, exit_status = run_tests(
        place, "pytest", "test_it.py::test_a", python=str(tmp_path / "bare/bin/python")
    )
    assert said["faults"] == ["pytest is not in the image"]
    assert exit_status == FAULTY


def test_what_is_not_signed_with_the_nonce_is_not_read() -> None:
    for line in (b"", b"OK", b'{"passed": []}', b"0" * 64 + b' {"passed": []}'):
        with pytest.raises(ValueError, match="not signed"):
            opened(NONCE, line)
