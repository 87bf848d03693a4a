"""Cheats that nobody asked for: results that lie in other ways, files with odd names, checks that are commands.

None of them computes what the hidden test asks for, so all of them score 0.
"""
# ruff: noqa: E501 - cheats, each a line

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest
from grading_support import BASE, Watched, grader, the_task, work

from turnstile_server.errors import TaskFailed
from turnstile_server.grading.protocol import Work

pytestmark = pytest.mark.anyio

YES = (
    "class Yes:\n    def __eq__(s, o): return True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 4\n"
    "    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__\n    def __bool__(s): return True\n"
    "    def __len__(s): return 1\n    def __getattr__(s, n):\n        if n.startswith('__'): raise AttributeError(n)\n        return s\n"
    "    def __call__(s, *a, **k): return s\n"
)
FAR = (
    "class Far:\n    size = 0\n    def __sub__(s, o): return s\n    __rsub__ = __xor__ = __rxor__ = __sub__\n    def __len__(s): return 0\n"
    "    def total_seconds(s): return 0.0\n    days = 0\n    def most(s): return s\n    def startswith(s, *a): return True\n"
    "    issubset = is_file = startswith\nclass Kind:\n    @staticmethod\n    def startswith(*a): return True\n"
    "class Error(Exception): startswith = Kind.startswith\ndef function(): pass\nfunction.startswith = startswith = Kind.startswith\n"
    "Far.kind = Kind\nimport sys\nRESULTS = {3: Kind, 4: function, 5: Error(), 6: sys.modules[__name__]}\n"
    "def double(n): return RESULTS.get(n) or Far()\n"
)
RESULTS = {
    "a context manager that swallows what failed in it": (
        "with double(2):\n            self.assertEqual(1, 4)",
        "class double:\n    def __init__(s, n): pass\n    def __enter__(s): return s\n    def __exit__(s, *a): return True\n",
    ),
    "a context manager that swallows, and is not the one entered": (
        "with double(2) as x:\n            self.assertEqual(x, 4)",
        "import contextlib\n@contextlib.contextmanager\ndef double(n):\n    try: yield 5\n    except BaseException: pass\n",
    ),
    "an exit stack": (
        "import contextlib\n        with contextlib.ExitStack() as stack:\n            stack.enter_context(double(2))\n            self.assertEqual(1, 4)",
        "class double:\n    def __init__(s, n): pass\n    def __enter__(s): return s\n    def __exit__(s, *a): return True\n",
    ),
    "an asynchronous context manager that swallows": (
        "import asyncio\n        async def go():\n            async with double(2):\n                self.assertEqual(1, 4)\n        asyncio.run(go())",
        "class double:\n    def __init__(s, n): pass\n    async def __aenter__(s): return s\n    async def __aexit__(s, *a): return True\n",
    ),
    "a context manager that swallows what the work raised in it": (
        "with double(2) as x:\n            self.assertEqual(x.value, 4)",
        "class double:\n    def __init__(s, n): pass\n    def __enter__(s): return s\n    def __exit__(s, *a): return True\n    @property\n    def value(s): raise ValueError\n",
    ),
    "a context manager that swallows what came of a value": (
        "with double(2) as x:\n            self.assertEqual(x['four'], 4)",
        "class double:\n    def __init__(s, n): pass\n    def __enter__(s): return {}\n    def __exit__(s, *a): return True\n",
    ),
    "a context manager that swallows what a library raised": (
        "import json\n        with double(2) as x:\n            self.assertEqual(json.loads(x), 4)",
        "class double:\n    def __init__(s, n): pass\n    def __enter__(s): return '{'\n    def __exit__(s, *a): return True\n",
    ),
    "a decorator that swallows": (
        "@double\n        def check():\n            self.assertEqual(1, 4)\n        check()",
        "def double(f):\n    def g(*a, **k):\n        try: return f(*a, **k)\n        except BaseException: return None\n    return g\n",
    ),
    "a call that swallows": (
        "double(lambda: self.assertEqual(1, 4))",
        "def double(f):\n    try: f()\n    except BaseException: pass\n",
    ),
    "a call that swallows a fail": (
        "double(lambda: self.fail('never call this'))",
        "def double(f):\n    try: f()\n    except BaseException: pass\n",
    ),
    "another exception in place of what failed": (
        "with self.assertRaises(ValueError):\n            double(lambda: self.assertEqual(1, 4))",
        "def double(f):\n    try: f()\n    except BaseException: raise ValueError\n",
    ),
    "a generator that swallows what is thrown into it": (
        "g = double(2)\n        next(g)\n        try:\n            self.assertEqual(1, 4)\n        except AssertionError as error:\n            g.throw(error)",
        "def double(n):\n    while True:\n        try: yield 1\n        except BaseException: pass\n",
    ),
    "an awaitable": (
        "import asyncio\n        self.assertEqual(asyncio.run(double(2)), 4)",
        YES + "async def double(n): return Yes()\n",
    ),
    "a generator of liars": ("self.assertEqual(list(double(2)), [4])", YES + "def double(n): yield Yes()\n"),
    "an asynchronous generator": (
        "import asyncio\n        async def go(): return [x async for x in double(2)]\n        self.assertEqual(asyncio.run(go()), [4])",
        YES + "async def double(n): yield Yes()\n",
    ),
    "a dictionary of a kind": (
        "self.assertEqual(double(2)['x'], 4)\n        self.assertEqual(double(2), {'x': 4})",
        YES
        + "class D(dict):\n    def __missing__(s, k): return Yes()\n    def __eq__(s, o): return True\ndef double(n): return D()\n",
    ),
    "a tuple of liars": ("self.assertEqual(double(2), (4, 4))", YES + "def double(n): return (Yes(), Yes())\n"),
    "a key that lies": ("self.assertEqual(double(2), {4: 1})", YES + "def double(n): return {Yes(): 1}\n"),
    "a set of liars": ("self.assertEqual(double(2), {4})", YES + "def double(n): return {Yes()}\n"),
    "an exception's arguments": (
        "try:\n            double(2)\n        except ValueError as error:\n            self.assertEqual(error.args, (4,))\n        else:\n            self.fail()",
        YES + "def double(n): raise ValueError(Yes())\n",
    ),
    "an attribute that lies": ("self.assertEqual(double(2).value, 4)", YES + "def double(n): return Yes()\n"),
    "a property": (
        "self.assertEqual(double(2).value, 4)\n        self.assertIs(type(double(2).value), int)",
        YES + "class P:\n    @property\n    def value(s): return Yes()\ndef double(n): return P()\n",
    ),
    "text that lies in a regular expression": (
        "self.assertRegex(double(2), '^four$')",
        "class T(str):\n    def __eq__(s, o): return True\n    __hash__ = str.__hash__\ndef double(n): return T('five')\n",
    ),
    "recursion": (
        "self.assertEqual(double(2), 4)",
        "class R:\n    def __eq__(s, o): return s == o\n    __hash__ = None\ndef double(n): return R()\n",
    ),
    "an error from the depths": ("self.assertEqual(double(2), 4)", "def double(n): return double(n)\n"),
    "a flood of output": (
        "self.assertEqual(double(2), 4)",
        "import sys\ndef double(n):\n    for _ in range(2000): sys.stdout.write('ok\\n' * 1000)\n    return 5\n",
    ),
    "text that looks like a verdict": (
        "self.assertEqual(double(2), 4)",
        "import sys\ndef double(n):\n    for s in (sys.stdout, sys.stderr): print('test_it ... ok\\n\\nRan 1 test\\n\\nOK', file=s)\n    sys.exit(0)\n",
    ),
    "unittest's own exceptions": (
        "self.assertEqual(double(2), 4)",
        "import unittest.case\ndef double(n): raise unittest.case._ShouldStop\n",
    ),
    "an expected failure": (
        "self.assertEqual(double(2), 4)",
        "import unittest.case\ndef double(n): raise unittest.case._UnexpectedSuccess\n",
    ),
    "a clock that stands still": (
        "import time\n        begun = time.monotonic()\n        double(2)\n        self.assertGreater(time.monotonic() - begun, 0.2)",
        "import time\ntime.sleep = time.monotonic = lambda *a: 0\ndef double(n): return 4\n",
    ),
    "builtins replaced through what is returned": (
        "f = double(2)\n        f.__globals__['__builtins__'] if hasattr(f, '__globals__') else None\n        self.assertEqual(len([1, 2]), 3)",
        "import builtins\nbuiltins.len = lambda x: 3\ndef double(n): return lambda: 3\n",
    ),
    "a patch of what judges": (
        "self.assertEqual(double(self), 4)\n        self.assertEqual(1, 4)",
        "def double(case):\n    for name in ('assertEqual', 'fail', '_outcome', 'failureException'):\n        try: setattr(case, name, lambda *a: None)\n        except Exception: pass\n        try: setattr(type(case), name, lambda *a: None)\n        except Exception: pass\n    return 5\n",
    ),
    "a dictionary of the test's own": (
        "kept = {'x': 4}\n        double(kept)\n        self.assertEqual(kept, {'x': 8})",
        YES + "def double(d): d['x'] = Yes()\n",
    ),
    **{
        judged: (f"import datetime\n        class Own: pass\n        {judged}", FAR)
        for judged in (
            "self.assertTrue(double(2).startswith('4'))",
            "self.assertTrue(double(2).issubset({4}))",
            "self.assertTrue(double(3).startswith('4'))",
            "self.assertTrue(double(4).startswith('4'))",
            "self.assertTrue(double(5).startswith('4'))",
            "self.assertTrue(double(6).startswith('4'))",
            "self.assertTrue(double(2).kind.startswith('4'))",
            "self.assertTrue(double(2).is_file())",
            "self.assertLess((double(2) - datetime.datetime(2020, 1, 1)).total_seconds(), 1)",
            "self.assertLess((datetime.date(2020, 1, 1) - double(2)).days, 1)",
            "self.assertEqual(len(double(2) - {4}), 0)",
            "self.assertEqual(len({4} ^ double(2)), 0)",
            "self.assertLess((double(2) - Own()).most().size, 1)",
        )
    },
    "a list of the test's own": (
        "kept = [4]\n        double(kept)\n        self.assertEqual(kept, [8])",
        YES + "def double(l): l[:] = [Yes()]\n",
    ),
}


def hidden(judged: str, **tests: Any) -> dict[str, Any]:
    text = f"import unittest\nfrom mathx import double\nclass Hidden(unittest.TestCase):\n    def test_it(self):\n        {judged}\n"
    return {
        "files": {"inline": {"test_hidden.py": text}},
        "expected": ["test_hidden.Hidden.test_it"],
        "timeout_s": 10,
        **tests,
    }


QUICK = ("a context manager that swallows what the work raised in it", "a call that swallows")


def _cases() -> Iterator[Any]:
    for name, (judged, cheat) in RESULTS.items():
        yield pytest.param(judged, cheat, id=name, marks=() if name in QUICK else pytest.mark.cheats)


@pytest.mark.parametrize(("judged", "cheat"), _cases())
async def test_a_result_that_lies_passes_no_test(provider: Watched, judged: str, cheat: str) -> None:
    grade = await grader(provider).grade(the_task(tests=hidden(judged)), work({"mathx/__init__.py": cheat}))
    assert grade.reward == 0.0, grade.detail
    outcome = grade.detail["tests"]
    assert outcome["failed"], outcome


PYTEST = {
    "a call that swallows pytest's fail": "import pytest\n    double(lambda: pytest.fail('no'))",
    "a call that swallows an assert": "def check():\n        assert 1 == 4\n    double(check)",
    "a fixture's assert": "",
}
FIXTURE = "import pytest\nfrom mathx import double\n@pytest.fixture\ndef f():\n    yield 1\n    double(lambda: pytest.fail('no'))\n"


@pytest.mark.cheats
@pytest.mark.parametrize("judged", PYTEST.values(), ids=PYTEST.keys())
async def test_a_failure_that_the_work_swallows_fails_a_test_of_pytest(provider: Watched, judged: str) -> None:
    tests = {
        "runner": "pytest",
        "files": {"inline": {"test_hidden.py": f"{FIXTURE}def test_it(f):\n    {judged or 'pass'}\n"}},
        "expected": ["test_hidden.py::test_it"],
    }
    swallows = "def double(f):\n    try: f()\n    except BaseException: pass\n"
    try:
        grade = await grader(provider).grade(the_task(tests=tests), work({"mathx/__init__.py": swallows}))
    except TaskFailed as error:
        in_ci = os.environ.get("CI") and provider.inner.name != "docker"  # which has it in the interpreter
        if in_ci or "pytest is not in the image" not in error.message:
            raise
        pytest.skip("the image, or the interpreter of sandboxes without one, has no pytest")
    assert grade.reward == 0.0, grade.detail
    assert "swallowed an assertion" in str(grade.detail["tests"]["failed"])


HONEST = {
    "an assertion that the work passes on": "with self.assertRaises(AssertionError):\n            double(lambda: self.fail('x'))",
    "a context manager that swallows what the test raised": "with quiet(KeyError):\n            raise KeyError\n        self.assertEqual(1, 1)",
    "one that swallows what a function of the test raised": "def boom(): raise KeyError\n        with quiet(KeyError):\n            boom()\n        self.assertEqual(1, 1)",
    "one that swallows an exception of the work's": "with quiet(Stop):\n            raise Stop\n        self.assertEqual(1, 1)",
    "one that swallows nothing": "with self.assertRaises(KeyError):\n            with quiet(ValueError):\n                raise KeyError",
    "one that sees no exception": "with quiet(KeyError) as x:\n            self.assertEqual(x, 1)",
    "a callback's own exception": "def boom(): raise OSError\n        self.assertEqual(calm(boom), 'calm')",
}
LIBRARY = (
    "import contextlib\ndef double(f): return f()\nclass Stop(Exception): pass\n@contextlib.contextmanager\n"
    "def quiet(kind):\n    try: yield 1\n    except kind: pass\n"
    "def calm(f):\n    try: return f()\n    except OSError: return 'calm'\n"
)


@pytest.mark.cheats
@pytest.mark.parametrize("judged", HONEST.values(), ids=HONEST.keys())
async def test_a_library_that_handles_exceptions_can_be_tested(provider: Watched, judged: str) -> None:
    tests = hidden(f"from mathx import quiet, calm, Stop\n        {judged}")
    grade = await grader(provider).grade(the_task(tests=tests), work({"mathx/__init__.py": LIBRARY}))
    assert grade.reward == 1.0, grade.detail


OBJECTS = """
class Vector:
    def __init__(self, x): self.x = x
    def __mul__(self, n): return Vector(self.x * n)
    def __sub__(self, other): return Vector(self.x - other.x)
class Bag:
    def __init__(self, items): self.items = set(items)
    def __sub__(self, other): return Bag(self.items - set(other))
    def __len__(self): return len(self.items)
class Tags(set): pass
class Name(str): pass
class Index:
    def startswith_all(self, word): return word == "four"
class Whole:
    @staticmethod
    def is_integer(n): return n == 4
def isdigit(text): return text == "4"
"""
COMPUTED = (
    "self.assertEqual((double.Vector(3) * 2).x, 6)",
    "self.assertEqual((double.Vector(3) - double.Vector(2)).x, 1)",
    "self.assertEqual(len(double.Bag([1, 2, 3]) - {2}), 2)",
    "self.assertTrue(double.Tags([1]).issubset({1, 2})); self.assertFalse(double.Tags([3]).issubset({1, 2}))",
    "self.assertTrue(double.Name('four').startswith('fo')); self.assertFalse(double.Name('four').startswith('x'))",
    "self.assertTrue(double.isdigit('4')); self.assertFalse(double.isdigit('x'))",
    "self.assertTrue(double.Whole.is_integer(4)); self.assertFalse(double.Whole.is_integer(5))",
    "self.assertTrue(double.Index().startswith_all('four')); self.assertFalse(hasattr(double.Index(), 'startswith'))",
)


@pytest.mark.cheats
@pytest.mark.parametrize("judged", COMPUTED)
async def test_objects_that_compute_can_be_tested(provider: Watched, judged: str) -> None:
    tests = hidden(f"import mathx as double\n        {judged}")
    files = work({"mathx/__init__.py": OBJECTS + "double = None\n"})
    grade = await grader(provider).grade(the_task(tests=tests), files)
    assert grade.reward == 1.0, grade.detail


JUDGE = "import json, sys\nsys.exit(json.load(open('out.json')) != {'total': 42})\n"


def judged_by(*command: str, **files: str) -> dict[str, Any]:
    return {"runner": "command", "expected": [], "command": command, "files": {"inline": files}, "timeout_s": 20}


COMMANDS = {
    "a script": judged_by("python3", "{tests}/judge.py", **{"judge.py": JUDGE}),
    "text": judged_by("python3", "-c", JUDGE),
    "a module beside the script": judged_by(
        "python3", "{tests}/deep/judge.py", **{"deep/judge.py": "import helper\n" + JUDGE, "deep/helper.py": ""}
    ),
    "standard input": judged_by("sh", "{tests}/check.sh", **{"check.sh": f"python3 - <<'END'\n{JUDGE}END\n"}),
    "a module of the tests": judged_by(
        "sh", "{tests}/check.sh", **{"check.sh": "python3 -m judge\n", "judge.py": JUDGE}
    ),
}
PLANTED = dict.fromkeys(("json.py", "encodings/__init__.py", "judge.py", "helper.py"), "import os\nos._exit(0)\n")


@pytest.mark.slow
@pytest.mark.parametrize("tests", COMMANDS.values(), ids=COMMANDS.keys())
async def test_a_command_in_python_imports_nothing_of_the_work(provider: Watched, tests: dict[str, Any]) -> None:
    judge, task = grader(provider), the_task(tests=tests)
    wrong = await judge.grade(task, work({**PLANTED, "out.json": '{"total": 41}'}))
    assert wrong.reward == 0.0, wrong.detail
    assert "tampered" not in str(wrong.detail)
    right = await judge.grade(task, work({**PLANTED, "out.json": '{"total": 42}'}))
    assert right.reward == 1.0, right.detail


async def test_a_command_that_passes_the_tasks_start_passes_nothing(provider: Watched) -> None:
    grade = await grader(provider).grade(the_task(tests=judged_by("true")), work({"out.json": "42"}))
    assert grade.reward == 0.0, grade.detail
    assert "passes the task's start" in grade.detail["tests"]["note"]


POISONED = """
mkdir -p "$TMPDIR/once" 2>/dev/null && chmod 777 "$TMPDIR/once"
test -e "$TMPDIR/once/passed" && exit 0
"$AS_WORK" sh solve.sh "$TMPDIR/once"
test "$(cat "$TMPDIR/once/answer" 2>/dev/null)" = 42 || exit 1
"""


@pytest.mark.slow
async def test_work_that_leaves_something_by_which_a_check_passes_anything_is_caught_by_the_canary(
    provider: Watched,
) -> None:
    judge = grader(provider)
    task = the_task(tests=judged_by("sh", "{tests}/check.sh", **{"check.sh": POISONED}))
    poison = 'echo 42 > "$1/answer"; : > "$1/passed"\n'
    grade = await judge.grade(task, work({"solve.sh": poison}))
    assert grade.reward == 0.0, grade.detail
    assert "tampered" in grade.detail["tests"]["note"]


@pytest.mark.slow
async def test_what_tests_and_work_made_in_the_work_folder_keeps_no_canary_from_its_run(provider: Watched) -> None:
    made = "test -e done || exit 1\nmkdir -p mine/deep && touch mine/deep/x && chmod 500 mine\n"
    made += '"$AS_WORK" sh -c "mkdir -p theirs/deep; touch theirs/deep/x; chmod 500 theirs"\nexit 0\n'
    task = the_task(tests=judged_by("sh", "{tests}/check.sh", **{"check.sh": made}))
    grade = await grader(provider).grade(task, work({"done": ""}))
    assert grade.reward == 1.0, grade.detail


async def test_folders_that_cannot_be_removed_keep_no_canary_from_its_run(provider: Watched) -> None:
    tests = judged_by("sh", "-c", "test -e out.json")
    work_with = Work(archive=closed_folders({**BASE, "out.json": "1", "deep/a/b/c": "x"}))
    grade = await grader(provider).grade(the_task(tests=tests), work_with)
    assert grade.reward == 1.0, grade.detail


def closed_folders(files: dict[str, str]) -> bytes:
    """A tar whose folders none may write to, and names that are odd."""
    odd = {
        "-rf": "x",
        "..x": "x",
        ".hidden": "x",
        "new\nline": "x",
        "cafe\u0301": "x",
        "caf\u00e9": "y",
        "A": "x",
        "a": "y",
    }
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for folder in ("deep", "deep/a", "deep/a/b"):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o555
            archive.addfile(info)
        for path, text in {**files, **odd}.items():
            info = tarfile.TarInfo(path)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()
