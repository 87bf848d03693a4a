"""What a hidden test in Python may do with the work: the table of docs/tasks.md, each row played.

``TURNSTILE_WRITE_DOCS=1`` writes the table."""

# ruff: noqa: E501 - bodies of tests, each a text

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
from grading_support import Watched, grader, the_task, work

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"
BEGIN, END = (
    "<!-- hidden tests: written by tests/grading/test_hidden_test_table.py -->",
    "<!-- end of hidden tests -->",
)


class Row(NamedTuple):
    does: str
    """As the table says it."""
    body: str
    """Of a test, in a module that has imported `mathx`."""
    refused: str = ""
    """Part of the failure's message; empty: it works as in one process."""
    instead: str = ""


LIB = """
import abc, asyncio, collections, contextlib, dataclasses, enum, os, sys, threading, time
class Wrong(ValueError):
    def __init__(self, text, at):
        super().__init__(text)
        self.at = at
class Colour(enum.Enum):
    RED = 1
@dataclasses.dataclass
class Point:
    x: int
    y: int = 0
Pair = collections.namedtuple("Pair", "one two")
class Stack:
    limit = 3
    def __init__(self, items=()):
        self._items = list(items)
    def push(self, item):
        self._items.append(item)
        return self
    @property
    def top(self):
        return self._items[-1]
    def __len__(self):
        return len(self._items)
    def __iter__(self):
        return iter(self._items)
    def __contains__(self, item):
        return item in self._items
    def __getitem__(self, at):
        return self._items[at]
class Base(abc.ABC):
    @abc.abstractmethod
    def size(self): ...
class Money:
    def __init__(self, cents):
        self.cents = cents
    def __eq__(self, other):
        return self.cents == getattr(other, "cents", other)
    __hash__ = None
def double(n: "int") -> int:
    return 2 * n
def fail(at):
    raise Wrong("bad", at)
def put_in_order(xs):
    xs.sort()
def counts(xs):
    for x in xs:
        yield x
async def later(n):
    await asyncio.sleep(0)
    return 2 * n
@contextlib.contextmanager
def opened():
    yield 5
def apply(function, *args):
    return function(*args)
def twice(function):
    return lambda *args: 2 * function(*args)
def clock():
    return time.time()
def now():
    return clock()
def say():
    print("said")
    return os.environ["WORD"], os.getcwd()
def write(path, text):
    with open(path, "w") as file:
        file.write(text)
def configure(config):
    config.debug = True
"""

HEAD = """
import asyncio, copy, doctest, inspect, io, os, pathlib, pickle, runpy, sqlite3, subprocess, sys, tempfile, threading
import typing, unittest
from unittest import mock
import mathx
from mathx import Colour, Money, Pair, Point, Stack, Wrong, double
"""

ROWS = (
    Row(
        "call functions and methods with plain values, and compare what they give",
        "self.assertEqual(double(4), 8)",
    ),
    Row(
        "import names, modules and submodules of the work",
        "import mathx.inner\nself.assertEqual(mathx.inner.VALUE, 7)",
    ),
    Row(
        "compare an attribute, a property, a class's constant",
        "self.assertEqual((Stack([4]).top, Stack.limit), (4, 3))",
    ),
    Row(
        "chain calls of an object, ask for its length, its items, whether it holds one",
        "made = Stack().push(1).push(2)\nself.assertEqual((len(made), list(made), made[0], 2 in made), (2, [1, 2], 1, True))",
    ),
    Row(
        "catch an exception of the work by its class, with its text and attributes",
        "with self.assertRaises(Wrong) as caught:\n    mathx.fail(3)\nself.assertEqual((str(caught.exception), caught.exception.at), ('bad', 3))",
    ),
    Row(
        "compare dataclasses, named tuples and members of an enum",
        "self.assertEqual(Point(1), Point(1, 0))\nself.assertNotEqual(Point(1), Point(2))\nself.assertEqual(Pair(1, 2), (1, 2))\nself.assertIs(Colour(1), Colour.RED)",
    ),
    Row(
        "`isinstance` and `issubclass` with a class of the work",
        "self.assertIsInstance(Stack(), Stack)\nself.assertTrue(issubclass(Wrong, ValueError))",
    ),
    Row(
        "see what a call that gives nothing did to a list",
        "xs = [2, 1]\nmathx.put_in_order(xs)\nself.assertEqual(xs, [1, 2])",
    ),
    Row("iterate over a generator", "self.assertEqual(list(mathx.counts([1, 2])), [1, 2])"),
    Row("await a coroutine", "self.assertEqual(asyncio.run(mathx.later(4)), 8)"),
    Row("enter a context manager", "with mathx.opened() as five:\n    self.assertEqual(five, 5)"),
    Row(
        "hand in functions, fakes and mocks, and look how they were called",
        "fake = mock.Mock(return_value=4)\nself.assertEqual(mathx.apply(fake, 1), 4)\nfake.assert_called_once_with(1)",
    ),
    Row("use a decorator of the work", "@mathx.twice\ndef one(n):\n    return n\nself.assertEqual(one(4), 8)"),
    Row(
        "patch a name of the work",
        "with mock.patch('mathx.clock', return_value=5):\n    self.assertEqual(mathx.now(), 5)",
    ),
    Row(
        "capture what it prints, set its environment and folder",
        "with mock.patch('sys.stdout', io.StringIO()) as out, mock.patch.dict(os.environ, WORD='word'):\n    found = mathx.say()\nself.assertEqual((out.getvalue(), found), ('said\\n', ('word', os.getcwd())))",
    ),
    Row(
        "share temporary files with it",
        "with tempfile.TemporaryDirectory() as folder:\n    path = pathlib.Path(folder, 'a')\n    mathx.write(str(path), 'text')\n    self.assertEqual(path.read_text(), 'text')",
    ),
    Row(
        "call it from several threads",
        "found = []\nthreads = [threading.Thread(target=lambda n=n: found.append(double(n))) for n in range(4)]\n[each.start() for each in threads]\n[each.join() for each in threads]\nself.assertEqual(sorted(found), [0, 2, 4, 6])",
    ),
    Row(
        "run its programs",
        "from turnstile_tests import python, run\nself.assertEqual(run([python, '-c', 'print(4)']).stdout, '4\\n')",
    ),
    Row(
        "inherit from a class of the work",
        "class Mine(mathx.Base):\n    def size(self):\n        return 1\nself.assertEqual(Mine().size(), 1)",
        "inherits from a class",
        "compare what objects of its own classes do",
    ),
    Row(
        "compare an object that says itself what it equals to a plain value",
        "self.assertEqual(Money(5), 5)",
        "plain value",
        "what it holds: `price.cents`",
    ),
    Row(
        "hand in an object for the work to set attributes of",
        "class Config:\n    debug = False\nconfig = Config()\nmathx.configure(config)\nself.assertTrue(config.debug)",
        "cannot be set",
        "a dict to fill, or a method to call",
    ),
    Row(
        "ask for the signature of a function",
        "self.assertEqual(len(inspect.signature(double).parameters), 1)",
        "signature",
        "call it",
    ),
    Row(
        "pickle an object of the work",
        "self.assertEqual(pickle.loads(pickle.dumps(Point(1))), Point(1))",
        "pickle",
        "compare it",
    ),
    Row(
        "start a program by `subprocess`",
        "subprocess.run([sys.executable, '-c', ''], check=True)",
        "start a program",
        "`turnstile_tests.run`",
    ),
    Row(
        "run a file of the work (`runpy`)",
        "runpy.run_path('mathx/inner.py')",
        "run mathx/inner.py",
        "import it, or `turnstile_tests.run`",
    ),
    Row("run a text as code", "exec('self.assertEqual(1, 1)')", "as code", "write it out"),
    Row(
        "read annotations that are text",
        "self.assertEqual(typing.get_type_hints(double)['n'], int)",
        "as code",
        "compare the text",
    ),
    Row(
        "open a link of the work to somewhere else",
        "os.symlink('/proc/self/status', 'link')\nopen('link')",
        "leads out",
        "write regular files",
    ),
)
ALLOWED = [row for row in ROWS if not row.refused]
REFUSED = [row for row in ROWS if row.refused]


def hidden(rows: list[Row]) -> dict[str, object]:
    tests = "".join(
        f"    def test_{number}(self):\n{textwrap.indent(row.body, ' ' * 8)}\n" for number, row in enumerate(rows)
    )
    return {
        "files": {"inline": {"test_hidden.py": f"{HEAD}class Hidden(unittest.TestCase):\n{tests}"}},
        "expected": [f"test_hidden.Hidden.test_{number}" for number in range(len(rows))],
    }


MINE = work({"mathx/__init__.py": LIB, "mathx/inner.py": "VALUE = 7\n"})


@pytest.mark.anyio
async def test_a_hidden_test_may_do_what_the_table_says(provider: Watched) -> None:
    grade = await grader(provider).grade(the_task(tests=hidden(ALLOWED)), MINE)
    assert grade.reward == 1.0, grade.detail["tests"]["failed"]


@pytest.mark.anyio
async def test_what_it_may_not_do_fails_and_says_why(provider: Watched) -> None:
    grade = await grader(provider, max_shown=len(REFUSED)).grade(the_task(tests=hidden(REFUSED)), MINE)
    said = {one["id"]: one["message"] for one in grade.detail["tests"]["failed"]}
    found = {
        row.does: said.get(f"test_hidden.Hidden.test_{number}", "it passed") for number, row in enumerate(REFUSED)
    }
    assert not {row.does: found[row.does] for row in REFUSED if row.refused not in found[row.does]}


@pytest.mark.anyio
async def test_in_one_process_it_may_do_all_of_it(provider: Watched) -> None:
    """So each row of the second half is something that a test could want."""
    tests = {**hidden(REFUSED), "trust": "in_process"}
    grade = await grader(provider, max_shown=len(REFUSED)).grade(the_task(tests=tests), MINE)
    assert grade.reward == 1.0, grade.detail["tests"]["failed"]


def test_the_page_has_the_table() -> None:
    shown = [BEGIN, "", "| a test may | |", "|---|---|"]
    shown += [f"| {row.does} | {f'no: {row.instead}' if row.refused else 'yes'} |" for row in ROWS]
    shown += ["", END]
    lines = PAGE.read_text().splitlines()
    start, end = lines.index(BEGIN), lines.index(END)
    if os.environ.get("TURNSTILE_WRITE_DOCS"):
        PAGE.write_text("\n".join([*lines[:start], *shown, *lines[end + 1 :]]) + "\n")
        return
    assert lines[start : end + 1] == shown
