"""Cheats on the shipped tasks: work that is not a solution scores 0, whatever it does to what judges it.

Each cheat is put in front of the base's own module, so that the tests import it; a task's reward is 1 only for its
gold solution. Played in every backend.
"""

from __future__ import annotations

from typing import Any

import pytest
from grading_support import Watched, grader, tar, the_task, work

from turnstile_server.grading.protocol import Work
from turnstile_server.settings import TaskSettings
from turnstile_server.tasks.model import Task
from turnstile_server.tasks.registry import load_tasks
from turnstile_server.tasks.tarball import read_files
from turnstile_server.tasks.task_files import SHIPPED

pytestmark = [pytest.mark.anyio, pytest.mark.cheats]

TASKS = {task.id: task for task in load_tasks([str(SHIPPED)], TaskSettings())}
MODULES = {
    "add-free-slots": "planner/intervals.py",
    "add-slugify": "textkit/__init__.py",
    "add-table-join": "tables/join.py",
    "fix-calculator": "calc/__init__.py",
    "fix-cart-discount": "shop/cart.py",
    "fix-lru-cache": "cachebox/__init__.py",
    "fix-retry": "again/call.py",
}

FRAMES = """
import os, sys, json
def tell(send, expected):
    for test in expected:
        send({"test": test, "status": "passed", "message": ""})
    send({"done": True})
    os._exit(0)
frame = sys._getframe()
while frame is not None:
    for values in (frame.f_locals, frame.f_globals):
        config, send = values.get("config"), values.get("send")
        if isinstance(config, dict) and "expected" in config and callable(send):
            tell(send, config["expected"])
    frame = frame.f_back
"""
OBJECTS = """
import gc, os, types
sends = [one for one in gc.get_objects() if isinstance(one, types.FunctionType) and one.__name__ == "send"]
configs = [one for one in gc.get_objects() if isinstance(one, dict) and "expected" in one and "tests" in one]
for send in sends:
    for config in configs:
        try:
            for test in config["expected"]:
                send({"test": test, "status": "passed", "message": ""})
            send({"done": True})
        except BaseException:
            pass
os._exit(0) if sends and configs else None
"""
LINES = """
import os, glob
for fd in range(3, 200):
    for said in (b'{"done": true}\\n', b'0' * 64 + b' {"done": true}\\n', b'\\0\\0\\0\\x02{}'):
        try:
            os.write(fd, said)
        except OSError:
            pass
for path in glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/proc/[0-9]*/mem"):
    try:
        open(path, "r+b", buffering=0).write(b'{"done": true}\\n')
    except (OSError, ValueError):
        pass
"""
ANY = """
class Anything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __hash__(self): return 0
    def __bool__(self): return True
    def __len__(self): return 0
    def __contains__(self, other): return True
    def __iter__(self): return iter(())
    def __getattr__(self, name): return self
    def __getitem__(self, key): return self
    def __call__(self, *args, **kwargs): return self
    def __sub__(self, other): return 0.0
    __rsub__ = __add__ = __abs__ = __round__ = __sub__
    def __float__(self): return 0.0
"""
REPLACED = """
import sys
module = sys.modules[__name__]
class Fake(type(sys)):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return answer
fake = Fake(__name__)
fake.__path__ = []
sys.modules[__name__] = fake
for name in list(sys.modules):
    if name.startswith(__name__.split(".")[0]):
        sys.modules[name] = fake
for name in ("planner", "textkit", "tables", "calc", "shop", "cachebox", "again"):
    for part in "intervals", "slots", "slugs", "join", "cart", "discounts", "lru", "call", "policy":
        sys.modules[name] = sys.modules[name + "." + part] = fake
"""
CHEATS = {
    "frames": FRAMES,
    "objects": OBJECTS,
    "every descriptor": LINES,
    "exit": "import os\nos._exit(0)\n",
    "exit later": "import atexit, os, threading\natexit.register(os._exit, 0)\n"
    "threading.Timer(0.01, os._exit, (0,)).start()\n",
    "the parent killed": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n",
    "everything killed": "import os, signal\nos.kill(-1, signal.SIGKILL)\n",
    "everything stopped": (
        "import os, signal\nfor pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    if int(pid) != os.getpid():\n"
        "        try: os.kill(int(pid), signal.SIGSTOP)\n        except OSError: pass\n"
    ),
    "equal to everything": ANY + REPLACED.replace("answer", "Anything()"),
    "a class of them": ANY + REPLACED.replace("answer", "Anything"),
    "text that equals everything": (
        "class Text(str):\n    def __eq__(self, other): return True\n    __hash__ = str.__hash__\n"
        "    def __call__(self, *a, **k): return Text()\n" + REPLACED.replace("answer", "Text()")
    ),
    "a list that equals everything": (
        "class Many(list):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
        "    def __call__(self, *a, **k): return Many()\n" + REPLACED.replace("answer", "Many()")
    ),
    "a module in place of unittest": (
        "import sys, types\nfor name in ('unittest', 'unittest.case', 'json', 'hmac'):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
    ),
    "a trace": "import sys, threading\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\n",
    "its own protocol": (
        "import sys\nfor name, module in list(sys.modules.items()):\n    if name.startswith('boundary'):\n"
        "        for one in list(vars(module)):\n            if one not in ('Channel', 'Peer'):\n"
        "                try: setattr(module, one, lambda *a, **k: True)\n                except Exception: pass\n"
        "import boundary.service\nboundary.service.Service.perform = lambda self, name, args: True\n"
    ),
    "answers before questions": (
        "import gc, json\nfrom boundary.wire import Channel\n"
        "for one in gc.get_objects():\n    if isinstance(one, Channel):\n        for n in range(3000):\n"
        "            one.send({'t': 0, 'f': 0, 'n': n, 'r': True})\n"
    ),
    "a message that is none": (
        "import gc\nfrom boundary.wire import Channel\nfor one in gc.get_objects():\n"
        "    if isinstance(one, Channel):\n"
        "        one._connection.sendall(b'\\xff' * 100)\n"
    ),
    "a tower of lists": (
        "import gc\nfrom boundary.wire import Channel\nfor one in gc.get_objects():\n"
        "    if isinstance(one, Channel):\n"
        "        data = b'[' * 1000000\n"
        "        one._connection.sendall(len(data).to_bytes(4, 'big') + data)\n"
    ),
    "exit status": "raise SystemExit(0)\n",
    "interrupts": "raise KeyboardInterrupt\n",
    "a skip": "import unittest\nraise unittest.SkipTest('no need')\n",
}
RESOURCES = {
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n",
    "output without end": "import os\nwhile True: os.write(1, b'x' * 65536)\n",
    "prints without end": "while True: print('x' * 1000)\n",
    "memory": "kept = []\nwhile True: kept.append(bytearray(1 << 24))\n",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()\n",
    "an end that does not come": "import time\ntime.sleep(3600)\n",
    "daemons": (
        "import os, time\nfor _ in range(20):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(3600)\n        os._exit(0)\n"
    ),
}


def cheated(task_id: str, cheat: str, **more: str) -> Work:
    """The base with the cheat in front of the module that the tests import, and further files."""
    task = TASKS[task_id]
    assert task.base is not None
    files = {path: data.decode() for path, data in read_files(task.base, TaskSettings()).items()}
    module = MODULES[task_id]
    files[module] = cheat + files.get(module, "")
    return Work(archive=tar({**files, **more}))


def every_cheat_once() -> list[Any]:
    """Every cheat on every task; all but one task of each only by ``make everything``."""
    return [
        pytest.param(
            cheat,
            task_id,
            id=f"{name}-{task_id}",
            marks=[] if number % len(MODULES) == position else [pytest.mark.thorough],
        )
        for number, (name, cheat) in enumerate(CHEATS.items())
        for position, task_id in enumerate(MODULES)
    ]


def with_time(task: Task, timeout_s: float) -> Task:
    """The task with so many seconds for its tests."""
    assert task.tests is not None
    shorter = task.tests.model_copy(update={"timeout_s": timeout_s})
    return task.model_copy(update={"grading": {**task.grading, "tests": shorter}})


@pytest.mark.parametrize(("cheat", "task_id"), every_cheat_once())
async def test_work_that_cheats_scores_0(provider: Watched, cheat: str, task_id: str) -> None:
    shorter = with_time(TASKS[task_id], 8.0)
    grade = await grader(provider).grade(shorter, cheated(task_id, cheat))
    assert grade.reward == 0.0, grade.detail
    assert grade.detail["tests"]["trust"] == "boundary"


@pytest.mark.parametrize("task_id", ["fix-calculator", pytest.param("fix-lru-cache", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("cheat", RESOURCES.values(), ids=RESOURCES.keys())
async def test_work_that_uses_up_everything_scores_0(provider: Watched, cheat: str, task_id: str) -> None:
    shorter = with_time(TASKS[task_id], 4.0)
    grade = await grader(provider).grade(shorter, cheated(task_id, cheat))
    assert grade.reward == 0.0, grade.detail


PLANTED = {
    "unittest.py": "import os\nos._exit(0)\n",
    "json.py": "import os\nos._exit(0)\n",
    "sitecustomize.py": "import os\nos._exit(0)\n",
    "usercustomize.py": "import os\nos._exit(0)\n",
    "conftest.py": "import os\nos._exit(0)\n",
    "pytest.ini": "[pytest]\naddopts = --co\n",
    "cheat.pth": "import os; os._exit(0)\n",
    "boundary.py": "import os\nos._exit(0)\n",
    "inside.py": "import os\nos._exit(0)\n",
    "turnstile_tests.py": "def run(*a, **k): pass\n",
    "encodings/__init__.py": "import os\nos._exit(0)\n",
    "test_calc_hidden.py": "",
}


@pytest.mark.parametrize("task_id", MODULES)
async def test_files_that_are_planted_do_nothing_for_the_base_and_do_not_harm_the_gold(
    provider: Watched, task_id: str
) -> None:
    task = TASKS[task_id]
    judge = grader(provider)
    assert (await judge.grade(task, cheated(task_id, "", **PLANTED))).reward == 0.0
    assert task.base is not None
    assert task.gold is not None
    assert task.gold.files is not None
    files = {
        path: data.decode()
        for folder in (task.base, task.gold.files)
        for path, data in read_files(folder, TaskSettings()).items()
    }
    grade = await judge.grade(task, Work(archive=tar({**files, **PLANTED})))
    assert grade.reward == 1.0, grade.detail


async def test_an_error_of_the_works_own_is_not_a_name_for_every_error(provider: Watched) -> None:
    task = TASKS["fix-calculator"]
    assert task.base is not None
    assert task.gold is not None
    assert task.gold.files is not None
    files = {
        path: data.decode()
        for folder in (task.base, task.gold.files)
        for path, data in read_files(folder, TaskSettings()).items()
    }
    for kind, reward in (("Exception", 0.0), ('type("CalcError", (Exception,), {})', 1.0)):
        archive = tar({**files, "calc/errors.py": f"CalcError = {kind}\n"})
        grade = await grader(provider).grade(task, Work(archive=archive))
        assert grade.reward == reward, grade.detail


SCRIPTS = {
    "its parent's memory": (
        'for pid in $PPID 1 $(ls /proc | grep "^[0-9]"); do\n  for at in 0 4096; do\n'
        "    dd if=/dev/zero of=/proc/$pid/mem bs=1 seek=$at count=16 conv=notrunc 2>/dev/null\n  done\ndone\n"
    ),
    "its parent's code": (
        "python3 - <<'END'\nimport os\nfor pid in filter(str.isdigit, os.listdir('/proc')):\n    try:\n"
        "        maps = open(f'/proc/{pid}/maps').read()\n"
        "        mem = open(f'/proc/{pid}/mem', 'r+b', buffering=0)\n"
        "        for line in maps.splitlines():\n            if 'r-xp' in line and 'sh' in line:\n"
        "                start = int(line.split('-')[0], 16)\n                mem.seek(start)\n"
        "                mem.write(b'\\x31\\xff\\xb8\\x3c\\x00\\x00\\x00\\x0f\\x05' * 400)\n"
        "    except OSError:\n        pass\nEND\n"
    ),
    "its parent killed": "kill -9 $PPID\nkill -9 -1\n",
    "the check rewritten": "for f in /tmp/turnstile-hidden/*; do echo 'exit 0' > $f; done\n",
    "files that are already there": 'for n in 1 2 3; do echo one > "$1.$n"; done\n: > "$1"\n',
    "links": 'ln -sf /tmp/turnstile-hidden/check.sh "$1.1"\nln -sf /dev/null "$1"\n',
    "as-work itself": "exec 3>&-\n"
    "TURNSTILE_LAUNCHER=3 python3 /tmp/turnstile-grading/programs/inside/launch.py true\n",
    "nothing": "exit 0\n",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS.keys())
async def test_a_script_that_cheats_scores_0(provider: Watched, script: str) -> None:
    grade = await grader(provider).grade(
        TASKS["write-rotate-script"], Work(archive=tar({"README.md": "", "rotate.sh": script}))
    )
    assert grade.reward == 0.0, grade.detail


LOOK = """
import os
def double(n):
    found = []
    for folder in ("/tmp", "/home", "/workspace", "/proc", "/dev/shm", "/run"):
        for place, _, names in os.walk(folder, onerror=lambda error: None):
            for name in names:
                if name.startswith("test_hidden") or name in ("environ", "cmdline"):
                    try:
                        with open(os.path.join(place, name), "rb") as file:
                            if SECRET in file.read():
                                found.append(os.path.join(place, name))
                    except OSError:
                        pass
    return found or "nothing found"
"""


@pytest.mark.parametrize("runner", ["unittest", "command"])
async def test_the_work_cannot_read_the_hidden_tests(provider: Watched, runner: str) -> None:
    look = LOOK.replace("SECRET", "b'a-' + b'secret'")
    check = "import unittest\nfrom mathx import double\nclass T(unittest.TestCase):\n    def test_it(self):\n"
    check += "        self.assertEqual(double(1), 'nothing found')  # a-secret\n"
    program = "from turnstile_tests import as_work, python\n"
    program += "said = as_work([python, '-c', 'import mathx; print(mathx.double(1))'])\n"
    program += "print(said)\nassert said.strip() == 'nothing found'  # a-secret\n"
    tests = {
        "unittest": {"files": {"inline": {"test_hidden.py": check}}, "expected": ["test_hidden.T.test_it"]},
        "command": {
            "files": {"inline": {"test_hidden.py": program}},
            "runner": "command",
            "expected": [],
            "command": ["python3", "{tests}/test_hidden.py"],
        },
    }[runner]
    grade = await grader(provider).grade(the_task(tests=tests), work({"mathx/__init__.py": look}))
    assert grade.reward == 1.0, grade.detail
