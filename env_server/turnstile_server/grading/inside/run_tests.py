"""Runs hidden tests against an agent's work, each file in a process of its own. Runs inside the grading sandbox.

Started as ``python3 -I -S -B start.py run_tests``: no environment, no user's or site's start-up files, no current
folder on the path. Reads one JSON object from stdin (``main`` lists its fields) and writes one line to stdout: an
HMAC, keyed with the ``nonce`` that it got there, a space, and a JSON object with the outcome of every expected
test. Exit status 0: all passed; 1: not all; 3: the tests themselves cannot run, whatever the work (``faults``).

What must hold:
- This process imports nothing but the standard library, so nothing of the work runs in it.
- A test passed when its process said so on its own pipe, in lines keyed with a key it got before it imported
  anything of the work and in their order (``ledger``), then said that it was done, and exited 0; and when in the
  same process the canaries, tests that must fail, were reported as failed. What tests print is kept to be shown,
  never read.
- ``faults`` are found before the work is looked at: they are the task's.

With ``trust: boundary`` no process of this user imports anything of the work (``one_file``). With ``trust:
in_process`` code of the work runs in the tests' process and can, with effort, find the key there.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import hmac
import importlib.machinery
import json
import os
import secrets
import selectors
import signal
import site
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from . import launch
from .ledger import MAX_MESSAGE, TestReports

FAILED, FAULTY = 1, 3
CANARIES = 2
"""Canaries of each file: one among its tests, one after them."""
CHANGED = (
    "; it passes only with what the work made of an argument, in a call that gave a value: a test about that "
    "needs `in_place: true`"
)
MAX_REPORT = 8 << 20
MAX_OUTPUT = 4000
PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36


def signed(key: bytes, value: Any) -> bytes:
    payload = json.dumps(value).encode()
    return hmac.new(key, payload, hashlib.sha256).hexdigest().encode() + b" " + payload


def opened(key: bytes, line: bytes) -> Any:
    """The value of a line made by ``signed`` with the same key. Raises ValueError."""
    mac, _, payload = line.partition(b" ")
    if not hmac.compare_digest(mac, hmac.new(key, payload, hashlib.sha256).hexdigest().encode()):
        raise ValueError("not signed with this key")
    return json.loads(payload)


def guard_process() -> None:
    """Keeps other processes of this user from reading this one, and makes orphans of the tests its children."""
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        return


class TestFile:
    """The expected tests of one file."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path
        self.expected: list[str] = []


def group_unittest(tests: str, expected: list[str], faults: list[str]) -> list[TestFile]:
    groups: dict[str, TestFile] = {}
    for test in expected:
        module, klass, method = test.rsplit(".", 2)
        path = os.path.join(tests, *module.split(".")) + ".py"
        if not os.path.isfile(path):
            faults.append(f"{test}: the hidden tests have no file {os.path.relpath(path, tests)}")
            continue
        # Python 3.9 has no list of them; there such a file is not told apart.
        if module.split(".")[0] in getattr(sys, "stdlib_module_names", ()):
            faults.append(f"{test}: a module of Python's own has this name; rename the file")
            continue
        group = groups.setdefault(module, TestFile(module, path))
        group.expected.append(test)
        tree = parsed(path, faults)
        if tree is not None and not may_have(tree, klass, method):
            faults.append(f"{test}: the file has no such test")
    return list(groups.values())


def group_pytest(tests: str, expected: list[str], faults: list[str]) -> list[TestFile]:
    groups: dict[str, TestFile] = {}
    for test in expected:
        name = test.split("::")[0]
        path = os.path.join(tests, name)
        if not os.path.isfile(path):
            faults.append(f"{test}: the hidden tests have no file {name}")
            continue
        parsed(path, faults)
        groups.setdefault(name, TestFile(name, path)).expected.append(test)
    if importlib.machinery.PathFinder.find_spec("pytest", site_folders()) is None:
        faults.append("pytest is not in the image")
    return list(groups.values())


def parsed(path: str, faults: list[str]) -> ast.Module | None:
    try:
        with open(path, "rb") as file:
            return ast.parse(file.read(), path)
    except (SyntaxError, ValueError) as error:
        fault = f"{os.path.basename(path)}: not Python: {error}"
        if fault not in faults:
            faults.append(fault)
        return None


def may_have(tree: ast.Module, klass: str, method: str) -> bool:
    """False where the file surely has no such test; a class that inherits, or is made otherwise, may."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == klass:
            plain = all(ast.unparse(base) in ("unittest.TestCase", "TestCase") for base in node.bases)
            if node.decorator_list or not plain:
                return True
            return any(getattr(item, "name", None) == method for item in node.body) or any(
                not isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Expr)) for item in node.body
            )
    return any(may_bind(node, klass) for node in ast.walk(tree))


def may_bind(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.alias):
        return (node.asname or node.name) in (name, "*")
    if isinstance(node, ast.Name):
        return node.id in (name, "globals", "vars", "exec", "setattr")
    return isinstance(node, ast.ClassDef) and node.name == name


def site_folders() -> list[str]:
    """Folders of installed packages. Runs nothing that lies there (no ``.pth``, no sitecustomize)."""
    prefix = os.path.dirname(os.path.dirname(os.path.abspath(sys.executable)))
    own = os.path.join(prefix, "pyvenv.cfg")
    folders = site.getsitepackages()
    if os.path.isfile(own):
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        with open(own, encoding="utf-8") as file:
            shared = "include-system-site-packages = true" in file.read()
        folders = [os.path.join(prefix, "lib", version, "site-packages"), *(folders if shared else [])]
    return [folder for folder in dict.fromkeys(folders) if os.path.isdir(folder)]


def outcomes_of(
    group: TestFile, config: dict[str, Any], deadline: float
) -> tuple[dict[str, list[str]], TestReports]:
    """Of its tests. Where the work changed an argument of a call that gave a value, they must pass a second time
    with the arguments as the test has passed them, but for tests that are about it (``in_place``): else
    ``f(xs) == sorted(xs)`` holds of a work that empties what it is given."""
    reports = run_group(group, config, deadline)
    outcomes = {test: reports.outcome(test) for test in group.expected}
    passed = [test for test, (status, _) in outcomes.items() if status == "passed"]
    if passed and reports.changed and not config["in_place"]:
        again = run_group(group, config, time.monotonic() + config["timeout_s"], keeps=True)
        for test in passed:
            status, message = again.outcome(test)
            if status != "passed":
                outcomes[test] = [status, f"{message[: MAX_MESSAGE - len(CHANGED)]}{CHANGED}"]
    return outcomes, reports


def run_group(group: TestFile, config: dict[str, Any], deadline: float, *, keeps: bool = False) -> TestReports:
    """``keeps``: see ``boundary.peer``."""
    key = secrets.token_hex(32)
    prefix = "" if config["runner"] == "unittest" else group.name + "::"
    names = [f"test_{secrets.token_hex(8)}" for _ in range(CANARIES)]
    reports = TestReports([prefix + name for name in names])
    launcher = os.environ.get(launch.VARIABLE)
    report_read, report_write = os.pipe()
    child = subprocess.Popen(
        [
            sys.executable,
            "-I",
            "-S",
            "-B",
            os.path.join(os.path.dirname(os.path.abspath(__file__)), "start.py"),
            "one_file",
        ],
        cwd=config["work"],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(report_write,) if launcher is None else (report_write, int(launcher)),
        start_new_session=True,
    )
    os.close(report_write)
    assert child.stdin is not None
    assert child.stdout is not None
    settings = {
        "key": key,
        "report": report_write,
        "runner": config["runner"],
        "trust": config["trust"],
        "keeps": keeps,
        "canaries": names,
        "tests": config["tests"],
        "work": config["work"],
        "shared": config["shared"],
        "work_paths": [os.path.normpath(os.path.join(config["work"], path)) for path in config["import_paths"]],
        "site": site_folders(),
        "name": group.name,
        "path": group.path,
        "expected": group.expected,
    }
    try:
        child.stdin.write(json.dumps(settings).encode() + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        pass
    os.set_blocking(child.stdin.fileno(), False)
    listen(child, report_read, reports, deadline, lambda line: take(line, bytes.fromhex(key), child, reports))
    os.close(report_read)
    child.stdout.close()
    child.stdin.close()
    end_orphans()
    if launcher is not None:
        launch.sweep()
    reports.ended(child.returncode)
    return reports


def take(line: bytes, key: bytes, child: subprocess.Popen[bytes], reports: TestReports) -> None:
    """One line of the report; answers it, or ends the process that breaks the rules."""
    try:
        answer = reports.take(opened(key, line), time.monotonic())
        if answer is not None:
            assert child.stdin is not None
            os.write(child.stdin.fileno(), answer.encode() + b"\n")
    except BlockingIOError:
        reports.refuse("the process of the tests takes no answers")
    except BrokenPipeError:
        return  # it ends, which the exit status tells
    except ValueError:
        reports.refuse("something else wrote to the report of the tests")
    if reports.broken is not None:
        kill_group(child.pid)


def listen(
    child: subprocess.Popen[bytes],
    report_read: int,
    reports: TestReports,
    deadline: float,
    on_line: Callable[[bytes], None] | None = None,
) -> bytes:
    """Takes what the process says until it has ended, also where something it left behind holds the pipes open.
    ``on_line`` gets each line of the report as soon as it is there."""
    assert child.stdout is not None
    out = child.stdout.fileno()
    os.set_blocking(report_read, False)
    os.set_blocking(out, False)
    report = b""
    heard = 0
    timed_out = False
    with selectors.DefaultSelector() as selector:
        selector.register(report_read, selectors.EVENT_READ)
        selector.register(out, selectors.EVENT_READ)
        ended = False
        while True:
            ready = selector.select(0 if ended else 0.05)
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fd)
                elif key.fd == out:
                    reports.output = (reports.output + data)[-MAX_OUTPUT:]
                else:
                    report += data
                    while on_line is not None and (end := report.find(b"\n", heard)) >= 0:
                        on_line(report[heard:end])
                        heard = end + 1
            if ended:
                break
            timed_out = time.monotonic() >= deadline
            if timed_out or len(report) > MAX_REPORT:
                kill_group(child.pid)
            ended = child.poll() is not None
    kill_group(child.pid)
    child.wait()
    if timed_out:
        reports.note = "the tests ran out of time"
    return report


def kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def end_orphans() -> None:
    """Ends what the tests left running: as the subreaper, this process has become its parent."""
    for _ in range(100):
        orphans = [
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent_of(pid) == os.getpid()
        ]
        if not orphans:
            return
        for pid in orphans:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError, PermissionError):
                continue


def parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return -1


def main() -> int:
    """Fields: ``nonce`` (hex), ``runner``, ``tests`` and ``work`` (folders), ``import_paths``, ``expected``,
    ``shared`` (a folder that the work may write to), ``trust``, ``in_place``, ``timeout_s``, ``max_shown``."""
    guard_process()
    config = json.load(sys.stdin)
    nonce = bytes.fromhex(config["nonce"])
    faults: list[str] = []
    by_file = group_unittest if config["runner"] == "unittest" else group_pytest
    groups = by_file(config["tests"], config["expected"], faults)
    outcomes: dict[str, list[str]] = {}
    seconds: dict[str, float] = {}
    output = b""
    if not faults:
        deadline = time.monotonic() + config["timeout_s"]
        for group in groups:
            found, reports = outcomes_of(group, config, deadline)
            outcomes.update(found)
            seconds.update({test: round(reports.seconds.get(test, 0.0), 4) for test in group.expected})
            if any(outcomes[test][0] != "passed" for test in group.expected):
                output = (output + reports.output)[-MAX_OUTPUT:]
    failed = [[test, *rest] for test, rest in outcomes.items() if rest[0] != "passed"]
    answer = {
        "faults": faults[: config["max_shown"]],
        "passed": [test for test, (status, _) in outcomes.items() if status == "passed"],
        "failed": failed[: config["max_shown"]],
        "slowest": sorted(seconds.items(), key=lambda each: -each[1])[: config["max_shown"]],
        "output": output.decode(errors="replace"),
    }
    sys.stdout.buffer.write(signed(nonce, answer) + b"\n")
    sys.stdout.flush()
    return FAULTY if faults else FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())
