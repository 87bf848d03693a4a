"""The tasks of the recorded run, and how the scripted policy works on them: right, or wrong in a way that only the
hidden tests find."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agents_matrix.faults import Job

PARCEL_BASE = {
    "parcel.py": '''"""What a parcel costs."""


def price(weight_kg, express=False):
    """Euros: 4.00 up to 2 kg, and 1.50 for each further kilogram that has begun. Express costs 5.00 more."""
    extra = weight_kg - 2
    total = 4.0 + 1.5 * extra
    return total + 5.0 if express else total
''',
    "test_parcel.py": """import unittest

from parcel import price


class Price(unittest.TestCase):
    def test_light(self):
        self.assertEqual(price(1), 4.0)

    def test_heavy(self):
        self.assertEqual(price(4), 7.0)

    def test_express(self):
        self.assertEqual(price(2, express=True), 9.0)
""",
}
PARCEL_HIDDEN = """import unittest

from parcel import price


class Hidden(unittest.TestCase):
    def test_light(self):
        self.assertEqual([price(0.2), price(1), price(2)], [4.0, 4.0, 4.0])

    def test_whole_kilograms(self):
        self.assertEqual([price(3), price(10)], [5.5, 16.0])

    def test_begun_kilogram(self):
        self.assertEqual(price(2.1), 5.5, "a kilogram that has begun is paid")

    def test_begun_kilogram_express(self):
        self.assertEqual(price(7.4, express=True), 18.0)

    def test_express(self):
        self.assertEqual(price(1, express=True), 9.0)
"""
PARCEL = Job(
    "Mend the price of parcels in parcel.py, and keep its tests passing.",
    (
        "ls; cat parcel.py test_parcel.py; printf 'MARK-%s\\n' 1",
        "python3 -m unittest; printf 'MARK-%s\\n' 2",
        "sed -i -e 's/extra = weight_kg - 2/extra = max(0, math.ceil(weight_kg - 2))/' "
        "-e '2a import math\\n' parcel.py; "
        "printf 'MARK-%s\\n' 3",
        "python3 -m unittest && head -n 12 parcel.py; printf 'MARK-%s\\n' 4",
    ),
    (
        "I look at the code and its tests first.",
        "A light parcel gets cheaper than 4 euros. I run the tests to see it.",
        "That is it. I mend the line.",
        "Now the tests should pass.",
    ),
)
LOG_LINES = [
    "12:00:01 INFO  started",
    "12:00:07 ERROR disk 2 does not answer",
    "12:00:09 INFO  error counters were reset",
    "12:01:40 ERROR disk 2 does not answer",
    "12:02:11 WARN  retry after an error",
    "12:02:12 ERROR disk 2 was given up",
]
LOG_HIDDEN = """import pathlib
import unittest


class Hidden(unittest.TestCase):
    def test_there(self):
        self.assertTrue(pathlib.Path("errors.txt").is_file())

    def test_number(self):
        self.assertEqual(pathlib.Path("errors.txt").read_text().strip(), "3")
"""
LOG = Job(
    "Count the lines of log.txt whose level is ERROR, and write the number into errors.txt.",
    (
        "head -n 3 log.txt; printf 'MARK-%s\\n' 1",
        "grep -c ERROR log.txt > errors.txt; printf 'MARK-%s\\n' 2",
        "cat errors.txt; printf 'MARK-%s\\n' 3",
    ),
    ("I look at a few lines.", "I count.", "Let me check what I wrote."),
)

JOBS = {"parcel-price": PARCEL, "log-errors": LOG}
WRONG = {
    "parcel-price": ("max(0, math.ceil(weight_kg - 2))", "max(0, weight_kg - 2)"),
    "log-errors": ("grep -c ERROR", "grep -ci error"),
}
"""By task: what the right work has, and what is in its place in a wrong one."""


def job(task: str, *, wrong: bool) -> Job:
    """The work on a task. A wrong one passes every test that the agent can see."""
    found = JOBS[task]
    if not wrong:
        return found
    return replace(found, commands=tuple(command.replace(*WRONG[task]) for command in found.commands))


def tasks() -> list[dict[str, Any]]:
    """The rows of their source."""
    parcel = {
        "id": "parcel-price",
        "instruction": f"{PARCEL.task}\nThe docstring says what a parcel costs. Finish with one sentence.",
        "tags": ["python", "bug"],
        "difficulty": "easy",
        "base": {"inline": PARCEL_BASE},
        "tests": _tests("test_hidden_parcel", PARCEL_HIDDEN),
    }
    log = {
        "id": "log-errors",
        "instruction": f"{LOG.task}\nFinish with one sentence.",
        "tags": ["shell"],
        "difficulty": "easy",
        "base": {"inline": {"log.txt": "\n".join(LOG_LINES) + "\n"}},
        "tests": _tests("test_hidden_log", LOG_HIDDEN),
    }
    return [parcel, log]


def _tests(module: str, source: str) -> dict[str, Any]:
    names = [line.split("(")[0].removeprefix("    def ") for line in source.splitlines() if "def test_" in line]
    expected = [f"{module}.Hidden.{name}" for name in names]
    return {"files": {"inline": {f"{module}.py": source}}, "runner": "unittest", "expected": expected}
