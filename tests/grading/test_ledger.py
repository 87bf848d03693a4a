"""What a process of tests reports is compared with what must have run: ids, order, count, turns, time."""

from __future__ import annotations

from typing import Any

import pytest

from turnstile_server.grading.inside.ledger import TestReports as Reports

PLAN = ["canary", "a", "b", "last"]
BEGIN, END = "begin", "end"


def reported(*lines: Any, exit_status: int = 0) -> Reports:
    """What is made of lines, one each second. ``(END, test, status)`` carries the word of the latest beginning."""
    reports = Reports(["canary", "last"])
    word = None
    for now, line in enumerate(lines):
        if isinstance(line, dict):
            reports.take(line, float(now))
        elif line[0] == BEGIN:
            word = reports.take({"begin": line[1]}, float(now)) or word
        else:
            reports.take({"test": line[1], "status": line[2], "message": "", "word": word}, float(now))
    reports.ended(exit_status)
    return reports


def ran(test: str, status: str = "passed") -> tuple[Any, Any]:
    return (BEGIN, test), (END, test, status)


FIRST, LAST = ran("canary", "failed"), ran("last", "error")
PLANNED, DONE = {"plan": PLAN}, {"done": 4}
WHOLE = (PLANNED, *FIRST, *ran("a"), *ran("b"), *LAST, DONE)


def test_tests_count_that_ran_one_after_the_other_as_planned() -> None:
    reports = reported(*WHOLE)
    assert [reports.outcome(test) for test in ("a", "b", "c")] == [["passed", ""], ["passed", ""], ["not run", ""]]
    assert reports.seconds == dict.fromkeys(PLAN, 1.0)


def test_a_test_that_did_not_begin_has_not_run_and_spoils_no_other() -> None:
    reports = reported(PLANNED, *FIRST, *ran("b"), *LAST, {"done": 3})
    assert (reports.outcome("a")[0], reports.outcome("b")[0]) == ("not run", "passed")


BROKEN: dict[str, tuple[Any, ...]] = {
    "a result twice": (PLANNED, *FIRST, *ran("a"), (END, "a", "passed"), *LAST, DONE),
    "a test twice": (PLANNED, *FIRST, *ran("a"), *ran("a"), *ran("b"), *LAST, {"done": 5}),
    "a result without its beginning": (PLANNED, *FIRST, *ran("b"), (END, "a", "passed"), *LAST, DONE),
    "a result of another test than the one that began": (PLANNED, *FIRST, (BEGIN, "b"), (END, "a", "passed")),
    "a result before the answer": (PLANNED, *FIRST, {"test": "a", "status": "passed", "message": ""}),
    "two that run at once": (PLANNED, *FIRST, (BEGIN, "a"), *ran("b"), (END, "a", "passed"), *LAST, DONE),
    "another order": (PLANNED, *FIRST, *ran("b"), *ran("a"), *LAST, DONE),
    "a test that was not planned": (PLANNED, *FIRST, *ran("c"), *ran("a"), *LAST, DONE),
    "no plan": (*FIRST, *ran("a"), *LAST, {"done": 3}),
    "a second plan": (*WHOLE[:-1], PLANNED, DONE),
    "a plan afterwards": (*WHOLE, PLANNED),
    "another count": (*WHOLE[:-1], {"done": 5}),
    "something after the end": (*WHOLE, {"note": "and more"}),
}


@pytest.mark.parametrize("lines", BROKEN.values(), ids=BROKEN.keys())
def test_a_report_that_breaks_a_rule_is_tampered_for_every_test_of_the_file(lines: tuple[Any, ...]) -> None:
    reports = reported(*lines)
    assert reports.broken
    assert {reports.outcome(test)[0] for test in ("a", "b")} == {"tampered"}


@pytest.mark.parametrize(
    ("first", "last", "status"),
    [
        ("failed", "error", "passed"),
        ("failed", "passed", "tampered"),
        ("skipped", "failed", "tampered"),
        ("failed", None, "tampered"),
    ],
)
def test_a_canary_that_passes_or_is_missing_makes_every_test_of_its_file_tampered(
    first: str, last: str | None, status: str
) -> None:
    ends = ran("last", last) if last is not None else ()
    lines = (PLANNED, *ran("canary", first), *ran("a"), *ends, {"done": 2 + bool(ends)})
    assert reported(*lines).outcome("a")[0] == status


@pytest.mark.parametrize(("exit_status", "lines"), [(1, WHOLE), (-9, WHOLE), (0, WHOLE[:-1])])
def test_tests_count_only_when_their_process_said_that_it_was_done_and_exited_0(
    exit_status: int, lines: tuple[Any, ...]
) -> None:
    assert reported(*lines, exit_status=exit_status).outcome("a")[0] == "not counted"
