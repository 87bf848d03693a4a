"""Outcomes of R2E-Gym logs, by R2E-Gym's rules, and how a log contradicts itself."""

from __future__ import annotations

import pytest

from turnstile_server.kinds.r2e.test_log import differences, doubts, outcomes, plain

HEAD = "r2e_tests/test_1.py ..F  [100%]\n=========== short test summary info ===========\n"
LINES = (
    "PASSED r2e_tests/test_1.py::TestA::test_one\n"
    "PASSED r2e_tests/test_1.py::test_two[a - b::c]\n"
    "SKIPPED [1] r2e_tests/test_1.py:7: no display\n"
    "FAILED r2e_tests/test_1.py::TestA::test_three - AssertionError: 1 != 2\n"
    "ERROR r2e_tests/test_2.py - ImportError: no module\n"
)
LOG = f"{HEAD}{LINES}==== 1 failed, 2 passed, 1 skipped, 1 error in 0.30s ====\n"
FOUND = {"TestA.test_one": "PASSED", "test_two[a - b.c]": "PASSED", "TestA.test_three": "FAILED", "": "ERROR"}


def test_the_summary_says_the_outcomes_by_class_and_test() -> None:
    assert outcomes(LOG) == FOUND


def test_colours_and_carriage_returns_do_not_matter() -> None:
    coloured = LOG.replace("PASSED", "\x1b[32mPASSED\x1b[0m").replace("\n", "\r\n")
    assert outcomes(plain(coloured)) == FOUND


@pytest.mark.parametrize("log", ["", "Traceback …\n", "PASSED r2e_tests/test_1.py::test_two\n"])
def test_a_log_without_a_summary_has_no_outcomes(log: str) -> None:
    assert outcomes(log) == {}


def test_names_are_compared_without_the_reason_and_only_whole_results_are_right() -> None:
    expected = {"TestA.test_one": "PASSED", "\x1b[1mTestA.test_three\x1b[0m - AssertionError: other": "FAILED"}
    got = {"TestA.test_one": "PASSED", "TestA.test_three": "FAILED"}
    assert differences(got, expected) == {}
    assert differences({**got, "TestA.test_three": "PASSED"}, expected) == {
        "TestA.test_three": ("PASSED", "FAILED")
    }
    assert differences({**got, "test_more": "PASSED"}, expected) == {"test_more": ("PASSED", None)}
    assert differences({"TestA.test_one": "PASSED"}, expected) == {"TestA.test_three": (None, "FAILED")}


def test_an_error_of_a_whole_file_stands_for_no_test_that_is_missing() -> None:
    assert differences({"": "ERROR", "a": "PASSED"}, {"": "FAILED", "a": "PASSED"}) == {}
    assert differences({"": "ERROR", "a": "PASSED"}, {"a": "PASSED", "b": "PASSED"})["b"] == (None, "PASSED")


def test_a_true_log_raises_no_doubt() -> None:
    assert doubts(LOG) == {}


@pytest.mark.parametrize(
    ("log", "kinds"),
    [
        (HEAD + LINES, {"end"}),
        (f"{HEAD}PASSED x::test_two\n{LOG}", {"summaries", "end"}),
        (LOG.replace("2 passed", "1 passed"), {"PASSED"}),
        (LOG.replace("1 failed, ", ""), {"FAILED"}),
    ],
)
def test_a_log_that_contradicts_itself_raises_doubts(log: str, kinds: set[str]) -> None:
    assert doubts(log).keys() == kinds
