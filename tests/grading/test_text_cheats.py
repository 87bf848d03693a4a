"""Text of the work that a library of the hidden tests would run as code in their process: it runs nothing there."""
# ruff: noqa: E501 - cheats, each a line

from __future__ import annotations

import pytest
from grading_support import Watched, grader, the_task, work

pytestmark = pytest.mark.anyio

PASS = "setattr(__import__('sys').modules['test_hidden'].Hidden, 'assertEqual', lambda *a, **k: None)"
ANNOTATED = f"""
class Function:
    def __call__(self, n): return 3
double = Function()
double.__annotations__ = {{"n": "int", "return": "({PASS}, int)[1]"}}
"""
EXAMPLE = f"""'''A module.

>>> {PASS}
'''
def double(n): return 3
"""
LOGGED = f"""
CONFIG = {{"loggers": {{"keys": "root"}}, "handlers": {{"keys": "h"}}, "formatters": {{"keys": ""}},
    "logger_root": {{"handlers": "h"}}, "handler_h": {{"class": "StreamHandler", "args": "({PASS},)[1:]"}}}}
def double(n): return 3
"""
WRITTEN = f"""
with open("/dev/shm/later.py", "w") as file: file.write({PASS!r})
def double(n): return 3
"""
TIMED = f"TEXT = {PASS!r}\ndef double(n): return 3\n"
LATER = WRITTEN.replace("/dev/shm", "mathx")
COMPILED = f"""
import marshal, importlib.util
code = compile({PASS!r}, "<string>", "exec")
with open("mathx/later.py", "wb") as file: file.write(importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code))
def double(n): return 3
"""
HEAD = "import configparser, doctest, functools, inspect, logging.config, typing, unittest\nimport mathx\nfrom mathx import double\n"
RUN = {
    "annotations": ("self.assertIn('n', typing.get_type_hints(double))", ANNOTATED),
    "annotations, by inspect": ("self.assertIn('n', inspect.get_annotations(double, eval_str=True))", ANNOTATED),
    "annotations of a function that wraps it": (
        "f = functools.wraps(double)(lambda n: n); f.__annotations__ = double.__annotations__\n        self.assertIn('n', typing.get_type_hints(f))",
        ANNOTATED,
    ),
    "examples": ("self.assertIsNotNone(doctest.testmod(mathx))", EXAMPLE),
    "examples, of a text": (
        "test = doctest.DocTestParser().get_doctest(mathx.__doc__, {}, 'x', None, 0)\n        self.assertIsNotNone(doctest.DocTestRunner().run(test))",
        EXAMPLE,
    ),
    "a file in a folder of all": ("import runpy; runpy.run_path('/dev/shm/later.py')", WRITTEN),
    "a script, by a relative name": ("import runpy; runpy.run_path('mathx/later.py')", LATER),
    "a script, by a way round": ("import runpy; runpy.run_path('/proc/self/cwd/mathx/later.py')", LATER),
    "a script that is compiled, and names another file": (
        "import runpy; runpy.run_path('mathx/later.py')",
        COMPILED,
    ),
    "a loader of it": (
        "import importlib.machinery as m; m.SourcelessFileLoader('x', 'mathx/later.py').load_module()",
        COMPILED,
    ),
    "a loader": (
        "import importlib.machinery as m; m.SourceFileLoader('x', 'mathx/later.py').load_module()",
        LATER,
    ),
    "a text that is timed": ("import timeit; timeit.timeit(mathx.TEXT, number=1)", TIMED),
    "a configuration": (
        "parser = configparser.RawConfigParser(); parser.read_dict(mathx.CONFIG)\n        logging.config.fileConfig(parser)",
        LOGGED,
    ),
}


def judged(text: str) -> str:
    return f"{HEAD}class Hidden(unittest.TestCase):\n    def test_a(self):\n        {text}\n    def test_two(self):\n        self.assertEqual(double(2), 4)\n"


@pytest.mark.cheats
@pytest.mark.parametrize(("text", "cheat"), RUN.values(), ids=RUN.keys())
async def test_no_text_of_the_work_runs_in_the_process_that_judges(
    provider: Watched, text: str, cheat: str
) -> None:
    tests = {
        "files": {"inline": {"test_hidden.py": judged(text)}},
        "expected": ["test_hidden.Hidden.test_a", "test_hidden.Hidden.test_two"],
    }
    grade = await grader(provider).grade(the_task(tests=tests), work({"mathx/__init__.py": cheat}))
    assert grade.reward == 0.0, grade.detail
    failed = [one["id"] for one in grade.detail["tests"]["failed"] if "3 != 4" in one["message"]]
    assert failed == ["test_hidden.Hidden.test_two"], grade.detail


HONEST = """
from __future__ import annotations
import collections, dataclasses, functools, inspect, timeit, typing, unittest
from unittest import mock
import mathx
from mathx import double

NAMES = [name for name in mathx.__all__]

@dataclasses.dataclass
class Own:
    size: typing.Annotated[int, len("abc")]

class Hidden(unittest.TestCase):
    def test_it(self):
        self.assertIn("double", NAMES)
        self.assertLess(timeit.timeit(functools.partial(double, 2), number=1), 60)
        self.assertEqual(typing.get_type_hints(Own), {"size": int})
        self.assertEqual(list(inspect.get_annotations(Own, eval_str=True)), ["size"])
        Pair = collections.namedtuple("Pair", "one other")
        self.assertEqual(Pair(double(1), double(2)), (2, 4))
        self.assertEqual(double.__annotations__, {"n": "int"})
        with mock.patch("mathx.double", autospec=True) as fake:
            fake.return_value = 7
            import mathx
            self.assertEqual(mathx.double(3), 7)
"""


async def test_libraries_run_the_hidden_tests_own_text(provider: Watched) -> None:
    right = "from __future__ import annotations\ndef double(n: int): return 2 * n\n"
    tests = {"files": {"inline": {"test_hidden.py": HONEST}}, "expected": ["test_hidden.Hidden.test_it"]}
    grade = await grader(provider).grade(the_task(tests=tests), work({"mathx/__init__.py": right}))
    assert grade.reward == 1.0, grade.detail
