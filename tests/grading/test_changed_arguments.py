"""What a call does to an argument although it gives a value: shown to tests that are about it, and to no other."""

from __future__ import annotations

import pytest
from grading_support import Watched, grader, the_task, work

from turnstile_server.grading.protocol import Grade

pytestmark = [pytest.mark.anyio, pytest.mark.cheats]

UNITTEST = """
import unittest
from mathx import ranked, drain, put_in_order, in_rows
class Hidden(unittest.TestCase):
    def test_ranked(self):
        xs = [2, 1]
        self.assertEqual(ranked(xs), sorted(xs))
    def test_drain(self):
        xs = [2, 1]
        self.assertEqual(drain(xs), [2, 1])
        self.assertEqual(xs, [])
    def test_in_order(self):
        xs = [2, 1]
        put_in_order(xs)
        self.assertEqual(xs, [1, 2])
    def test_rows(self):
        rows = [[2, 1], [4, 3]]
        self.assertEqual(in_rows(rows), ([[1, 2], [3, 4]], 2))
    def test_unharmed(self):
        xs = [2, 1]
        ranked(xs)
        self.assertEqual(xs, [2, 1])
"""
PYTEST = """
from mathx import ranked
def test_ranked():
    xs = [2, 1]
    assert ranked(xs) == sorted(xs)
"""
WORK = """
def ranked(xs):
    return sorted(xs)
def drain(xs):
    taken = list(xs)
    xs.clear()
    return taken
def put_in_order(xs):
    xs.sort()
def in_rows(rows):
    for row in rows:
        row.sort()
    return rows, len(rows)
"""
RANKED = {
    "sorted": ("return sorted(xs)", 1.0),
    "sorted, by way of its argument": ("xs.sort()\n    return list(xs)", 1.0),
    "sorted, from what it takes out": ("return [xs.pop(xs.index(min(xs))) for _ in range(len(xs))]", 0.0),
    "emptied": ("xs.clear()\n    return []", 0.0),
    "made what it answers": ("xs[:] = [5]\n    return [5]", 0.0),
    "emptied, and given back": ("xs.clear()\n    return xs", 0.0),
    "put in order, and given back": ("xs.sort()\n    return xs", 1.0),
}


async def graded(provider: Watched, code: str, *tests: str, **options: object) -> Grade:
    asked = {
        "files": {"inline": {"test_hidden.py": UNITTEST}},
        "expected": [f"test_hidden.Hidden.test_{name}" for name in tests],
        **options,
    }
    return await grader(provider).grade(the_task(tests=asked), work({"mathx/__init__.py": code}))


@pytest.mark.parametrize("how", RANKED)
@pytest.mark.parametrize("runner", ["unittest", "pytest"])
async def test_an_answer_is_right_by_the_argument_as_it_was(provider: Watched, runner: str, how: str) -> None:
    code, reward = RANKED[how]
    code = WORK.replace("return sorted(xs)", code)
    options: dict[str, object] = {}
    if runner == "pytest":
        options = {"files": {"inline": {"test_hidden.py": PYTEST}}, "expected": ["test_hidden.py::test_ranked"]}
    assert (await graded(provider, code, "ranked", runner=runner, **options)).reward == reward


async def test_what_gives_nothing_shows_what_it_did_and_a_value_has_it(provider: Watched) -> None:
    assert (await graded(provider, WORK, "in_order", "rows")).reward == 1.0


async def test_a_test_about_both_says_so_and_is_told_to(provider: Watched) -> None:
    assert (await graded(provider, WORK, "drain", in_place=True)).reward == 1.0
    grade = await graded(provider, WORK, "drain")
    assert grade.reward == 0.0
    assert "`in_place: true`" in grade.detail["tests"]["failed"][0]["message"]


async def test_harm_to_an_argument_is_seen(provider: Watched) -> None:
    harms = WORK.replace("return sorted(xs)", "xs.sort()\n    return list(xs)")
    assert (await graded(provider, WORK, "unharmed")).reward == 1.0
    assert (await graded(provider, harms, "unharmed")).reward == 0.0
