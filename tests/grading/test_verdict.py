"""What counts as passed: the runner's own word and its exit status together, never one of them alone."""

from __future__ import annotations

from typing import Any

import pytest

from turnstile_server.grading.inside.run_tests import signed
from turnstile_server.grading.verdict import MAX_LINE, DiffVerdict, HiddenTestsVerdict, read_tests
from turnstile_server.sandboxes.protocol import ExecResult

NONCE = b"n" * 32
EXPECTED = ("a", "b")


def result_of_program(
    nonce: bytes = NONCE, code: int = 0, *, timed_out: bool = False, **answer: Any
) -> ExecResult:
    whole = {"faults": [], "passed": list(EXPECTED), "failed": [], "slowest": [], "output": "", **answer}
    return ExecResult(code, signed(nonce, whole) + b"\n", b"", 0, timed_out, 1.0)


def test_all_that_was_expected_and_exit_status_0_is_passed() -> None:
    assert read_tests(result_of_program(), EXPECTED, NONCE).passed


@pytest.mark.parametrize(
    "result",
    [
        result_of_program(code=1),
        result_of_program(code=137),
        result_of_program(passed=["a"]),
        result_of_program(passed=["a", "b", "b"]),
        result_of_program(passed=["a", "b", "c"]),
        result_of_program(passed=[]),
        result_of_program(failed=[["b", "failed", "why"]]),
        result_of_program(passed=["a"], failed=[["b", "failed", "why"]]),
        result_of_program(timed_out=True),
        result_of_program(nonce=b"m" * 32),
        result_of_program(faults=["nothing can run"]),
        ExecResult(0, b"2 passed", b"", 0, False, 1.0),
        ExecResult(0, b"", b"", 0, False, 1.0),
    ],
)
def test_anything_less_is_not(result: ExecResult) -> None:
    verdict = read_tests(result, EXPECTED, NONCE)
    assert (verdict.passed, verdict.fault) == (False, None)


def test_a_fault_is_believed_with_its_exit_status_only() -> None:
    assert read_tests(result_of_program(code=3, faults=["no pytest"]), EXPECTED, NONCE).fault == "no pytest"


def test_failed_tests_are_one_line_each_whatever_their_messages_hold() -> None:
    failed = [
        {"id": "a.B.c", "status": "failed", "message": "AssertionError: 3 != 4\n\nDiff is long"},
        {"id": "a.B.d", "status": "error", "message": "\n\x1b[31mboom\r\n" + "x" * 1000},
        {"id": "a.B.e", "status": "not run", "message": ""},
    ]
    lines = HiddenTestsVerdict(False, detail={"failed": failed}).summary
    assert lines[0] == "a.B.c failed: AssertionError: 3 != 4"
    assert lines[2] == "a.B.e not run:"
    assert all(line.isprintable() and len(line) <= MAX_LINE for line in lines)


def test_a_verdict_without_failed_tests_still_says_why() -> None:
    assert HiddenTestsVerdict(False, detail={"note": "the tests ran out of time"}).summary == (
        "tests: the tests ran out of time",
    )
    assert HiddenTestsVerdict(False, detail={"exit_code": 3}).summary == ("tests: exit status 3",)
    assert HiddenTestsVerdict(True, detail={"exit_code": 0}).summary == ()
    diff = DiffVerdict(True, detail={"left_out": [["a\nb", "a link that leads out"]]})
    assert diff.summary == ("a b is left out: a link that leads out",)
