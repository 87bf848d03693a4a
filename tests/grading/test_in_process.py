"""What `trust: in_process` does not stop, and what it does: the work is in the process that judges it."""

from __future__ import annotations

import pytest
from grading_support import BUG, FIX, Watched, grader, the_task, work

pytestmark = pytest.mark.anyio

RUN = """
import os, sys
frame = sys._getframe()
while frame is not None and "run" not in frame.f_locals:
    frame = frame.f_back
run = frame.f_locals["run"] if frame is not None else None
config, reporter = (run.config, run.reporter) if run is not None else ({}, None)
first, last = config.get("canaries", ["", ""])
def play(*tests):
    for test in tests:
        reporter.begin(test)
        reporter.end(test, "failed" if test in (first, last) else "passed", "")
"""
PLAYED = "reporter.plan([first, *config['expected'], last])\nplay(first, *config['expected'], last)\n"
ENDS = "reporter.done()\nos._exit(0)\n"
SHORT = {
    "without the canaries": "reporter.plan(config['expected'])\nplay(*config['expected'])\n",
    "without a plan": "play(first, *config['expected'], last)\n",
    "with lines made beforehand": (
        "send = reporter._send\nsend({'plan': [first, *config['expected'], last]})\n"
        "for test in (first, *config['expected'], last):\n    send({'begin': test})\n"
        "    send({'test': test, 'status': 'passed' if test in config['expected'] else 'failed', 'message': ''})\n"
    ),
    "and then again by the tests": PLAYED + "reporter.done = lambda: None\nraise SystemExit\n",
}


async def test_work_that_plays_the_runners_part_is_not_stopped_and_the_grade_says_so(provider: Watched) -> None:
    """So docs/attacks.md does not promise more than is true."""
    forged = work({"mathx/__init__.py": RUN + PLAYED + ENDS + BUG})
    grade = await grader(provider).grade(the_task(tests={"trust": "in_process"}), forged)
    assert (grade.reward, grade.detail["tests"]["trust"]) == (1.0, "in_process")
    apart = await grader(provider).grade(the_task(), forged)
    assert (apart.reward, apart.detail["tests"]["trust"]) == (0.0, "boundary")


@pytest.mark.slow
@pytest.mark.parametrize("forgery", SHORT.values(), ids=SHORT.keys())
async def test_a_report_that_does_not_fit_what_must_have_run_counts_for_nothing(
    provider: Watched, forgery: str
) -> None:
    forged = work({"mathx/__init__.py": RUN + forgery + ENDS + BUG})
    grade = await grader(provider).grade(the_task(tests={"trust": "in_process"}), forged)
    assert grade.reward == 0.0, grade.detail
    assert {one["status"] for one in grade.detail["tests"]["failed"]} <= {"tampered", "not run", "not counted"}


async def test_the_grade_has_the_seconds_of_the_slowest_tests_by_the_runners_clock(provider: Watched) -> None:
    slow = "import time\nwait, time.monotonic, time.time = time.sleep, int, int\n" + FIX.replace(
        "return", "wait(0.2 * (n == 5)); return"
    )
    for trust in ("boundary", "in_process"):
        task = the_task(tests={"trust": trust})
        grade = await grader(provider).grade(task, work({"mathx/__init__.py": slow}))
        assert grade.reward == 1.0, grade.detail
        slowest = grade.detail["tests"]["slowest"]
        assert [len(slowest), slowest[0][1] >= 0.2] == [3, True], slowest
        assert {name.rpartition(".")[2] for name, seconds in slowest if seconds >= 0.2} >= {"test_five"}, slowest
