"""Work that knows how the boundary is made, and lies, reaches or reads through it, scores 0 without the answer.

Each hidden test is of a usual kind; none of these cheats computes what it asks for.
"""
# ruff: noqa: E501 - cheats, each a line

from __future__ import annotations

import pytest
from grading_support import Watched, grader, the_task, work

from turnstile_server.errors import TaskFailed

pytestmark = pytest.mark.anyio

PEER = """
import gc, io, sys, functools
from boundary.peer import Peer
def peer():
    return next(one for one in gc.get_objects() if isinstance(one, Peer))
def reaches():
    vars(sys.modules["boundary.guard"])["WorkRules"].names_functions = lambda self: True
    return peer()
"""
CALLED_BACK = """
import unittest
from mathx import double

class Own:
    def __init__(self):
        self.calls = 0
    def __call__(self):
        self.calls += 1
        return "s3cr3t"[:0]

class Hidden(unittest.TestCase):
    def test_it(self):
        self.assertEqual(double(Own()), "4711")
"""
REACHES = {
    "a partial of a class of the standard library, called here": """
def double(own):
    from functools import partial
    at = reaches()
    for path in PLACES:
        try:
            file = at.ask("call", partial(io.FileIO, path), (), {})
            return found(file.read())
        except (OSError, AttributeError, RuntimeError, TypeError):
            pass
""",
    "format of a text, with the test's object": """
def double(own):
    at = peer()
    for text in ("{0.__class__.__call__.__globals__[Hidden].test_it.__code__.co_consts}",
                 "{0.__class__.__init__.__globals__}"):
        try:
            bound = at.ask("get", text, "format")
            return found(at.ask("call", bound, (own,), {}))
        except (AttributeError, RuntimeError, TypeError):
            pass
""",
    "format_map of a text": """
def double(own):
    at = peer()
    try:
        bound = at.ask("get", "{own.__class__.__call__.__globals__[Hidden].test_it.__code__.co_consts}", "format_map")
        return found(at.ask("call", bound, ({"own": own},), {}))
    except (AttributeError, RuntimeError, TypeError):
        pass
""",
    "format as an operation": """
def double(own):
    at = peer()
    for name in ("__format__", "__mod__"):
        try:
            return found(at.ask("op", name, "%(x)s", ({"x": own},), {}))
        except (AttributeError, RuntimeError, TypeError):
            pass
""",
    "the class of an object, called": """
def double(own):
    try:
        return found(type(own.__call__).__call__(own.__class__))
    except (AttributeError, RuntimeError, TypeError):
        pass
""",
}
FOUND = """
PLACES = ["/tmp/turnstile-hidden/test_hidden.py", "/tmp/turnstile-grading/tests/test_hidden.py", "/proc/self/maps"]
def found(what):
    text = str(what)
    return "4711" if "4711" in text else text[:100]
"""


@pytest.mark.parametrize("cheat", REACHES.values(), ids=REACHES.keys())
async def test_the_work_reaches_nothing_through_what_a_test_handed_to_it(provider: Watched, cheat: str) -> None:
    tests = {"files": {"inline": {"test_hidden.py": CALLED_BACK}}, "expected": ["test_hidden.Hidden.test_it"]}
    grade = await grader(provider).grade(the_task(tests=tests), work({"mathx/__init__.py": PEER + FOUND + cheat}))
    assert grade.reward == 0.0, grade.detail
    assert "s3cr3t" not in str(grade.detail), grade.detail


LYING = """
class Liar:
    told = None
    def __call__(self, *a, **k): return self
    def __bool__(self): return True
    def __iter__(self): return iter(self.told or ())
    def __contains__(self, one): return True
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __sub__(self, other): return self
    __rsub__ = __add__ = __radd__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __sub__
    def __isub__(self, other): return self
    def __abs__(self): return 0.0
    def __float__(self): return 0.0
    def __round__(self, *a): return 0
    def __neg__(self): return 0.0
    def __pow__(self, *a): return self
    def __int__(self): return 0
    __index__ = __int__
    def __format__(self, spec): return ""
    def difference(self, other):
        self.told = set(other)
        return set()
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self
def double(*a, **k): return Liar()
"""
JUDGED = {
    "abs of a difference": "self.assertLess(abs(double(2) - 4), 1e-9)",
    "abs of a difference, the other way": "self.assertLess(abs(4.0 - double(2)), 1e-9)",
    "abs of a difference, plainly": "assert abs(double(2) - 4) < 1e-9",
    "a quotient": "self.assertLess(abs(double(2) / 4 - 1), 1e-9)",
    "a difference that is small": "assert -1e-9 < double(2) - 4 < 1e-9",
    "a difference, made a number": "assert abs(float(double(2) - 4)) < 1e-9",
    "a difference, rounded": "self.assertEqual(round(double(2) - 4), 0)",
    "a square": "assert (double(2) - 4) ** 2 < 1e-9",
    "a difference in place": "x = double(2)\n        x -= 4\n        assert abs(x) < 1e-9",
    "a bound on each side": "self.assertGreater(double(2), 3); self.assertLess(double(2), 5)",
    "a bound, from the left": "assert 3 < double(2) < 5",
    "a bound of texts": "assert 'abc' <= double(2)\n        assert double(2) <= 'abc'",
    "in": "self.assertIn('four', double(2)); self.assertIn('five', double(2))",
    "in, of numbers": "self.assertIn(4, double(2))",
    "sets": "self.assertSetEqual(double(2), {4, 5})",
    "sets, the other way": "self.assertSetEqual({4, 5}, double(2))",
    "items": "self.assertCountEqual(double(2), [4, 5])",
    "one of some": "self.assertIn(double(2), (4, 5))",
    "sum": "self.assertEqual(sum([double(2), 1]), 5)",
    "sorted": "self.assertEqual(sorted([double(2), 1]), [1, 4])",
    "the most": "self.assertEqual(max(4, double(2)), 4)\n        self.assertEqual(max(double(2), 4), 4)",
    "almost equal": "self.assertAlmostEqual(double(2), 4.0, delta=0.1)",
}


@pytest.mark.cheats
@pytest.mark.parametrize("judged", JUDGED.values(), ids=JUDGED.keys())
async def test_an_object_that_agrees_to_everything_passes_no_test(provider: Watched, judged: str) -> None:
    text = f"import unittest\nfrom mathx import double\nclass Hidden(unittest.TestCase):\n    def test_it(self):\n        {judged}\n"
    tests = {"files": {"inline": {"test_hidden.py": text}}, "expected": ["test_hidden.Hidden.test_it"]}
    grade = await grader(provider).grade(the_task(tests=tests), work({"mathx/__init__.py": LYING}))
    assert grade.reward == 0.0, grade.detail


OTHER_WAYS = {
    "text run as code": (
        "exec('double = 1')\n        self.assertTrue(True)",
        "",
    ),
    "a path that the work returns": (
        "self.assertEqual(open(double(2)).read(), (__import__('pathlib').Path(__file__).parent / 'golden').read_text())",
        "def double(n): return '/tmp/turnstile-hidden/golden'\n",
    ),
    "a link where the work writes": (
        "import pathlib, tempfile\n        out = pathlib.Path(tempfile.mkdtemp(), 'out')\n        double(str(out))\n"
        "        self.assertEqual(out.read_text(), (pathlib.Path(__file__).parent / 'golden').read_text())",
        "import os\ndef double(out):\n    os.symlink('/tmp/turnstile-hidden/golden', out)\n",
    ),
    "a link that the tests' folder is opened through": (
        "import os, stat, tempfile\n        double(2)\n        made = tempfile.mkdtemp()\n"
        "        self.assertEqual(stat.S_IMODE(os.stat('/tmp/turnstile-hidden').st_mode), 0o777)",
        "import os, threading\n"
        "def double(n):\n    def swap():\n        import time\n        end = time.time() + 3\n        while time.time() < end:\n"
        "            for name in os.listdir('/tmp/turnstile-shared'):\n                try:\n"
        "                    os.rename('/tmp/turnstile-shared/' + name, '/tmp/turnstile-shared/.gone' + name)\n"
        "                    os.symlink('/tmp/turnstile-hidden', '/tmp/turnstile-shared/' + name)\n"
        "                except OSError: pass\n"
        "    threading.Thread(target=swap, daemon=True).start()\n    time_out = 0\n",
    ),
    "a library that a test's database loads": (
        "import sqlite3\n        self.assertEqual(double(sqlite3.connect(':memory:')), 'loaded')",
        "def double(base):\n    base.enable_load_extension(True)\n    return 'loaded'\n",
    ),
    "numbers in the memory of what judges": (
        "self.assertEqual(hasattr(double(2), '__array_interface__'), True)",
        "class A:\n    __array_interface__ = {'data': (4096, False), 'shape': (8,), 'typestr': '|u1', 'version': 3}\n"
        "def double(n): return A()\n",
    ),
    "a skip": ("double(2)", "import unittest\ndef double(n): raise unittest.SkipTest('no need')\n"),
    "an exception of pytest's": (
        "double(2)",
        "class Skipped(Exception): pass\nSkipped.__module__ = 'builtins'\ndef double(n): raise Skipped('no need')\n",
    ),
    "an exit": ("double(2)", "def double(n): raise SystemExit(0)\n"),
    "the end of a generator": ("double(2)", "def double(n): raise GeneratorExit\n"),
    "the end of an iteration": (
        "self.assertEqual([double(n) for n in (1, 2)], [2, 4])",
        "def double(n): raise StopIteration(4)\n",
    ),
    "an interrupt": ("double(2)", "def double(n): raise KeyboardInterrupt\n"),
    "a failure that a test expects": (
        "with self.assertRaises(AssertionError):\n            self.assertEqual(double(2), 4)\n        self.assertEqual(double(3), 6)",
        "def double(n): raise AssertionError\n",
    ),
    "a class for its answer": (
        "self.assertEqual(double(2), 4)",
        "class double(int):\n    def __eq__(s, o): return True\n",
    ),
    "a metaclass that takes everything for its own": (
        "self.assertIsInstance(2, double)\n        self.assertTrue(issubclass(int, double))",
        "class M(type):\n    def __instancecheck__(c, o): return True\n    def __subclasscheck__(c, o): return True\n"
        "class double(metaclass=M): pass\n",
    ),
    "a class that says it is another": (
        "self.assertIsInstance(double(2), int)",
        "class D:\n    @property\n    def __class__(self): return int\n    def __eq__(s, o): return True\ndef double(n): return D()\n",
    ),
    "an exception that is every exception": (
        "with self.assertRaisesRegex(TypeError, '^a number$'):\n            double('2')",
        "class Text(str):\n    def __eq__(s, o): return True\n    __hash__ = None\n    def __str__(s): return s\n"
        "class E(TypeError, ValueError, KeyError):\n    def __str__(self): return Text('anything')\n"
        "def double(n): raise E()\n",
    ),
    "an answer that changes when it is looked at again": (
        "x = double(2)\n        self.assertEqual(len(x), 2)\n        self.assertEqual(list(x), [2, 4])",
        "class L(list):\n    n = 1\n    def __len__(s): L.n += 1; return L.n\n    def __iter__(s): return iter([4, 4])\n"
        "def double(n): return L()\n",
    ),
    "an answer of the test's own, given back": (
        "class Own:\n            def __eq__(self, other): return True\n        self.assertIs(type(double(Own())), int)",
        "def double(own): return own\n",
    ),
    "a hash that is everybody's": (
        "self.assertIn(double(2), {4: 1})\n        self.assertEqual({4: 'a'}[double(2)], 'a')",
        "class H:\n    def __hash__(s): return 4\n    def __eq__(s, o): return True\ndef double(n): return H()\n",
    ),
    "an approximation": (
        "import math\n        self.assertTrue(math.isclose(double(2), 4))",
        "class F(float):\n    def __float__(s): return 4.5\n    def __sub__(s, o): return 0.0\n    __rsub__ = __sub__\ndef double(n): return F(3)\n",
    ),
    "sorting": (
        "self.assertEqual(sorted([3, double(2), 5]), [3, 4, 5])",
        "import functools\nclass S:\n    def __lt__(s, o): return True\n    __gt__ = __lt__\n    def __eq__(s, o): return True\ndef double(n): return S()\n",
    ),
    "text": (
        "self.assertEqual(f'{double(2)}', '4')",
        "class T:\n    def __format__(s, spec): return '4 '[1:]\ndef double(n): return T()\n",
    ),
    "a work that exits well halfway": (
        "double(2)\n        self.assertEqual(double(2), 4)",
        "import os\nn = 0\ndef double(x):\n    global n\n    n += 1\n    if n > 1: os._exit(0)\n    return 4 - 1\n",
    ),
    "a frame for another request": (
        "self.assertEqual(double(2), 4)",
        PEER + "def double(n):\n    at = peer()\n    for serial in range(1, 60):\n"
        "        at._channel.send({'t': 0, 'f': 0, 'n': serial, 'r': 5})\n    return 3\n",
    ),
    "a frame that is too long": (
        "self.assertEqual(double(2), 4)",
        PEER
        + "def double(n):\n    peer()._channel._connection.sendall(b'\\xff\\xff\\xff\\xff' + b'x' * 100)\n    return 4 - 1\n",
    ),
    "an object in the place of a set's own value": (
        "self.assertSetEqual(double(2), {4, 5})",
        "import boundary.operations as o\nclass S(set): pass\nclass Any:\n    def difference(self, other): return set()\n"
        "    def __iter__(self): return iter(range(99))\no.COPIES['set'] = lambda own: Any()\ndef double(n): return S()\n",
    ),
    "a path in the place of a dictionary's own value": (
        "self.assertTrue(double(2).is_file())",
        "import boundary.operations as o\nimport pathlib\nclass D(dict): pass\n"
        "o.COPIES['dict'] = lambda own: pathlib.Path('/bin/sh')\ndef double(n): return D()\n",
    ),
    "ten thousand requests": (
        "self.assertEqual(double(2), 4)",
        PEER + "def double(n):\n    at = peer()\n    for serial in range(10_000):\n"
        "        at._channel.send({'q': 'echo', 't': None, 'f': 0, 'n': serial, 'a': ['t', 1]})\n    return 3\n",
    ),
    "threads that print what a test captures": (
        "import contextlib, io\n        with contextlib.redirect_stdout(io.StringIO()) as out:\n            double(2)\n"
        "        self.assertEqual(out.getvalue(), '4\\n')",
        "import threading\ndef double(n):\n    for x in range(9):\n        t = threading.Thread(target=print, args=(x,)); t.start(); t.join()\n",
    ),
}


@pytest.mark.cheats
@pytest.mark.parametrize(("judged", "cheat"), OTHER_WAYS.values(), ids=OTHER_WAYS.keys())
async def test_no_other_way_past_the_boundary_passes_a_test(provider: Watched, judged: str, cheat: str) -> None:
    text = f"import unittest\nfrom mathx import double\nclass Hidden(unittest.TestCase):\n    def test_it(self):\n        {judged}\n"
    files = {"test_hidden.py": text.replace("\nself", "\n        self"), "golden": "4\n"}
    tests = {"files": {"inline": files}, "expected": ["test_hidden.Hidden.test_it"], "timeout_s": 10}
    grade = await grader(provider).grade(
        the_task(tests=tests), work({"mathx/__init__.py": cheat or "double = 1\n"})
    )
    assert grade.reward == 0.0, grade.detail


LOOKED_FOR = "msvcrt", "_winapi", "winreg", "nt"
"""Modules that the standard library imports where they are there."""


@pytest.mark.cheats
async def test_the_work_has_no_part_in_the_standard_library_of_what_judges(provider: Watched) -> None:
    text = (
        "import mimetypes, subprocess, unittest\nfrom mathx import double\nclass Hidden(unittest.TestCase):\n"
        "    def test_it(self):\n        self.assertEqual((subprocess._mswindows, mimetypes._winreg), (False, None))\n"
    )
    tests = {"files": {"inline": {"test_hidden.py": text}}, "expected": ["test_hidden.Hidden.test_it"]}
    files: dict[str, str | tuple[str, str]] = {
        f"{name}.py": "def __getattr__(name): return 1\n" for name in LOOKED_FOR
    }
    grade = await grader(provider).grade(the_task(tests=tests), work(files))
    assert grade.reward == 1.0, grade.detail


NAMES = {
    "builtins": (
        "unittest",
        "self.assertEqual([(n, double(n)) for n in range(3)], list(zip(range(3), (0, 2, 4))))",
    ),
    "builtins of pytest's tests": ("pytest", "assert all(double(n) == 2 * n for n in range(3))"),
    "modules": ("unittest", "self.assertEqual(json.loads('4'), double(2))"),
}
STAR = """
__all__ = ["double", "zip", "range", "list", "all", "json"]
class json:
    loads = staticmethod(lambda text: 3)
def double(n): return 3
def zip(*many): return []
range = list = lambda *many: []
def all(many): return True
"""


@pytest.mark.cheats
@pytest.mark.parametrize(("runner", "judged"), NAMES.values(), ids=NAMES.keys())
async def test_the_work_does_not_name_what_hidden_tests_use(provider: Watched, runner: str, judged: str) -> None:
    """By ``from mathx import *``, whose names the work lists."""
    text = f"import json, unittest\nfrom mathx import *\nclass Hidden(unittest.TestCase):\n    def test_it(self):\n        {judged}\n"
    identity = "test_hidden.Hidden.test_it" if runner == "unittest" else "test_hidden.py::Hidden::test_it"
    tests = {"runner": runner, "files": {"inline": {"test_hidden.py": text}}, "expected": [identity]}
    try:
        grade = await grader(provider).grade(the_task(tests=tests), work({"mathx/__init__.py": STAR}))
    except TaskFailed as error:
        if provider.inner.name != "docker" or "pytest is not in the image" not in error.message:
            raise
        pytest.skip("the image has no pytest")
    assert grade.reward == 0.0, grade.detail
    assert "import the names that you test" in str(grade.detail["tests"]["failed"])
