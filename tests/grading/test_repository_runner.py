"""The runner of a repository's suite, started as the judge starts it, on folders of this machine."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from repository_support import (
    CHEATS,
    LEDGER,
    LEDGER_BREAKS,
    LEDGER_FIX,
    LEDGER_KEEP,
    LEDGER_MUST_PASS,
    WORDS,
    WORDS_FIX,
    WORDS_HIDDEN,
    WORDS_KEEP,
    WORDS_MUST_PASS,
    Cheat,
    make_testbed,
    naive,
    put,
)

from turnstile_server.grading.inside.suite_rules import outcomes
from turnstile_server.grading.programs import IMAGE_TESTS, INSIDE
from turnstile_server.grading.repository_tests import read_suite
from turnstile_server.grading.verdict import HiddenTestsVerdict
from turnstile_server.sandboxes.protocol import ExecResult
from turnstile_server.tasks.hidden_tests import HiddenTests
from turnstile_server.tasks.repository_run import file_of, owned_by_tests, protected_globs

NONCE = b"n" * 32


def started(program: str, config: Mapping[str, Any], *words: str) -> ExecResult:
    argv = [sys.executable, *IMAGE_TESTS[1:], str(INSIDE / program), *words]
    done = subprocess.run(argv, input=json.dumps(config).encode(), capture_output=True, check=False, timeout=90)
    return ExecResult(done.returncode, done.stdout, done.stderr, 0, False, 0.0)


class Suite:
    """A repository and the ids of its suite."""

    def __init__(
        self,
        base: Mapping[str, str],
        must_pass: tuple[str, ...],
        keep: tuple[str, ...],
        hidden: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        self.base = base
        self.must_pass = must_pass
        self.keep = keep
        self.hidden = hidden or {}
        self.more = more
        self.owned = owned_by_tests([*map(file_of, (*must_pass, *keep)), *self.hidden])

    def judge(
        self, python: Path, tmp_path: Path, work: Mapping[str, str]
    ) -> tuple[HiddenTestsVerdict, dict[str, Any]]:
        """As the judge does: the diff, the suite's own files, the run."""
        root, tar = tmp_path / "judged", tmp_path / "work.tar"
        put(root, self.base)
        with tarfile.open(tar, "w") as archive:
            for path, text in {**self.base, **work}.items():
                info = tarfile.TarInfo(path)
                info.size = len(text.encode())
                archive.addfile(info, io.BytesIO(text.encode()))
        diff = started(
            "workdiff.py",
            {
                "work": str(tar),
                "root": str(root),
                "shared": str(tmp_path / "shared"),
                "protected": protected_globs(self.owned),
                "git": True,
                "not_work": [],
                "max_changed": 100,
                "max_shown": 100,
            },
        )
        assert diff.exit_code == 0, diff
        put(root, self.hidden)
        config = {
            "nonce": NONCE.hex(),
            "python": str(python),
            "work": str(root),
            "owned": self.owned,
            "import_paths": ["."],
            "expected": self.must_pass,
            "keep": self.keep,
            "cut_ids": True,
            "processes": "one",
            "options": [],
            "env": {},
            "timeout_s": 60,
            "max_shown": 500,
            **self.more,
        }
        result = started("start.py", config, "repository")
        assert not result.stderr, result.stderr.decode()
        return read_suite(result, (*self.must_pass, *self.keep), NONCE), json.loads(diff.stdout)


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_testbed(tmp_path_factory.mktemp("testbed"))


LEDGER_SUITE = Suite(LEDGER, LEDGER_MUST_PASS, LEDGER_KEEP)
WORDS_SUITE = Suite(WORDS, WORDS_MUST_PASS, WORDS_KEEP, WORDS_HIDDEN)


@pytest.mark.parametrize("processes", ["one", "file"])
def test_a_suite_with_its_own_plug_in_fixtures_and_data_is_judged(
    python: Path, tmp_path: Path, processes: str
) -> None:
    suite = Suite(LEDGER, LEDGER_MUST_PASS, LEDGER_KEEP, processes=processes)
    verdict, _ = suite.judge(python, tmp_path, LEDGER_FIX)
    assert verdict.passed, verdict
    assert verdict.detail["passed"] == verdict.detail["ran"] == len(LEDGER_MUST_PASS + LEDGER_KEEP) == 123
    assert 0 < verdict.detail["seconds"] < 60


def test_work_that_does_nothing_fails_the_tests_that_must_pass_and_no_other(python: Path, tmp_path: Path) -> None:
    verdict, _ = LEDGER_SUITE.judge(python, tmp_path, {})
    assert {one["id"] for one in verdict.detail["failed"]} == set(LEDGER_MUST_PASS)
    assert "AssertionError" in verdict.detail["failed"][0]["message"]


def test_work_that_breaks_a_test_which_passed_before_does_not_pass(python: Path, tmp_path: Path) -> None:
    verdict, _ = LEDGER_SUITE.judge(python, tmp_path, LEDGER_BREAKS)
    assert [one["id"] for one in verdict.detail["failed"]] == ["tests/test_total.py::test_total"]


@pytest.mark.slow
def test_hidden_files_are_laid_over_the_tree_and_cut_ids_stand_for_all_that_begin_so(
    python: Path, tmp_path: Path
) -> None:
    assert WORDS_SUITE.judge(python, tmp_path / "fixed", WORDS_FIX)[0].passed
    verdict, _ = WORDS_SUITE.judge(python, tmp_path / "empty", {})
    assert {one["id"] for one in verdict.detail["failed"]} == set(WORDS_MUST_PASS)
    exact = Suite(WORDS, WORDS_MUST_PASS, WORDS_KEEP, WORDS_HIDDEN, cut_ids=False)
    verdict, _ = exact.judge(python, tmp_path / "exact", WORDS_FIX)
    assert [(one["id"], one["status"]) for one in verdict.detail["failed"]] == [(WORDS_MUST_PASS[1], "not run")]


@pytest.mark.cheats
@pytest.mark.parametrize("cheat", CHEATS.values(), ids=CHEATS.keys())
def test_a_cheat_fools_plain_pytest_and_not_this_runner(python: Path, tmp_path: Path, cheat: Cheat) -> None:
    put(tmp_path / "naive", {**LEDGER, **cheat.files})
    assert naive(python, tmp_path / "naive", cheat.env), "it does not even fool plain pytest"
    verdict, diff = LEDGER_SUITE.judge(python, tmp_path, cheat.files)
    assert not verdict.passed
    failed = {one["id"]: one["status"] for one in verdict.detail["failed"]}
    assert failed.keys() >= set(LEDGER_MUST_PASS), diff


def test_plain_pytest_tells_right_from_wrong(python: Path, tmp_path: Path) -> None:
    for name, work, right in (("empty", {}, False), ("fixed", LEDGER_FIX, True)):
        put(tmp_path / name, {**LEDGER, **work})
        assert naive(python, tmp_path / name, {}) is right


def test_changes_to_what_acts_on_the_run_are_told_and_those_of_the_product_are_taken_over(
    python: Path, tmp_path: Path
) -> None:
    work = {
        **LEDGER_FIX,
        "pyproject.toml": LEDGER["pyproject.toml"] + "# mine\n",
        "tests/test_mine.py": "def test_mine(): pass\n",
        "src/ledger.egg-info/entry_points.txt": "",
        "docs/setup.cfg": "",
    }
    verdict, diff = LEDGER_SUITE.judge(python, tmp_path, work)
    assert verdict.passed
    assert {path for path, _ in diff["left_out"]} >= work.keys() - LEDGER_FIX.keys()
    assert diff["changed"] == ["src/ledger/money.py"]


def test_what_the_suite_itself_replaces_is_its_own_affair(python: Path, tmp_path: Path) -> None:
    patches = "import _pytest.runner, builtins\n\n\ndef print_item(item): pass\n\n\n"
    patches += "builtins.exit = lambda: None\n_pytest.runner.show_test_item = print_item\n"
    conftest = patches + LEDGER["tests/conftest.py"]
    suite = Suite({**LEDGER, "tests/conftest.py": conftest}, LEDGER_MUST_PASS, LEDGER_KEEP)
    verdict, _ = suite.judge(python, tmp_path, LEDGER_FIX)
    assert verdict.passed, verdict


def test_a_file_that_nobody_has_is_a_fault_of_the_task(python: Path, tmp_path: Path) -> None:
    verdict, _ = Suite(LEDGER, ("tests/test_none.py::test_a",), ()).judge(python, tmp_path, {})
    assert verdict.fault == "tests/test_none.py: neither the repository nor the hidden tests have this file"


@pytest.mark.slow
def test_a_suite_that_hangs_fails(python: Path, tmp_path: Path) -> None:
    suite = Suite(LEDGER, LEDGER_MUST_PASS, (), timeout_s=3)
    hangs = {"src/ledger/money.py": "import time\n\ndef shown(cents):\n    time.sleep(60)\n"}
    verdict, _ = suite.judge(python, tmp_path, hangs)
    assert {(one["status"], one["message"]) for one in verdict.detail["failed"]} == {
        ("not run", "the tests ran out of time")
    }


@pytest.mark.parametrize(
    ("status", "must_pass", "must_not_fail"),
    [
        ("passed", True, True),
        ("failed as expected", True, True),
        ("skipped", False, True),
        ("failed", False, False),
        ("passed unexpectedly", False, False),
        ("tampered", False, False),
        (None, False, False),
    ],
)
def test_which_outcomes_count(status: str | None, must_pass: bool, must_not_fail: bool) -> None:
    statuses = {} if status is None else {"t": status}
    assert outcomes(["t"], [], statuses)["t"] == (must_pass, status or "not run")
    assert outcomes([], ["t"], statuses)["t"][0] is must_not_fail


def test_a_cut_id_counts_when_all_that_begin_so_do() -> None:
    statuses = {"f::t[a b]": "passed", "f::t[a c]": "failed", "f::t[b]": "passed"}
    assert outcomes(["f::t[a"], [], statuses, cut_ids=True)["f::t[a"] == (False, "failed")
    assert outcomes(["f::t[b"], [], statuses, cut_ids=True)["f::t[b"] == (True, "passed")
    assert outcomes(["f::t[b"], [], statuses)["f::t[b"] == (False, "not run")
    assert outcomes(["f::t"], [], statuses, cut_ids=True)["f::t"] == (False, "not run")


@pytest.mark.parametrize(
    ("path", "owned"),
    [
        ("tests/unit/test_a.py", "tests"),
        ("pkg/testing/tests/test_a.py", "pkg/testing/tests"),
        ("testing/python/test_a.py", "testing"),
        ("pkg/test_a.py", "pkg/test_a.py"),
        ("test_a.py", "test_a.py"),
    ],
)
def test_the_nearest_folder_of_tests_belongs_to_the_suite(path: str, owned: str) -> None:
    assert owned_by_tests([path]) == (owned,)


GOOD = {"files": {}, "runner": "repository", "expected": ["tests/test_a.py::test_b"]}


def test_it_is_always_in_process() -> None:
    assert HiddenTests.model_validate(GOOD).trust == "in_process"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trust": "boundary"}, "trust: in_process"),
        ({"expected": ["tests.test_a.Test.test_b"]}, "does not look like"),
        ({"expected": ["../x/test_a.py::test_b"]}, "leads out"),
        ({"repository": {"keep": ["tests/test_a.py::test_b"]}}, "in `expected` and in"),
        ({"repository": {"keep": ["a.py::b", "a.py::b"]}}, "twice"),
        ({"repository": {"options": ["-p", "no:x"]}}, "the runner's own"),
        ({"repository": {"options": ["tests"]}}, "the runner's own"),
        ({"repository": {"options": ["--rootdir=x"]}}, "the runner's own"),
        (
            {"runner": "pytest", "expected": ["a.py::b"], "repository": {"cut_ids": True}},
            "is for runner: repository",
        ),
        ({"command": ["x"]}, "has no `command`"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        HiddenTests.model_validate({**GOOD, **changes})
