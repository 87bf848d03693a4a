"""Runs the expected tests of one hidden file. Started by run_tests.py, which reads what it reports.

What must hold: all that is needed to run and report is imported before the work can be imported, from the
standard library and the image's packages; the work's folders come last on the path, so a module of the work
takes no other's name. Before each test counts, ``unittest`` (or pytest) and the builtins must still be what they
were: work that replaces them fails, whatever it replaced.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import builtins
import hashlib
import hmac
import importlib
import importlib.util
import json
import os
import sys
import traceback
import types
import unittest
import unittest.async_case
import unittest.mock
from collections.abc import Callable
from typing import Any

MESSAGE = 500
Send = Callable[[Any], None]


def sender(descriptor: int, key: bytes) -> Send:
    dumps, new, write, sha = json.dumps, hmac.new, os.write, hashlib.sha256

    def send(value: Any) -> None:
        payload = dumps(value).encode()
        line = new(key, payload, sha).hexdigest().encode() + b" " + payload + b"\n"
        while line:
            line = line[write(descriptor, line) :]

    return send


CODE = (types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod, property, type)


def function_of(value: Any) -> Any:
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


class TamperCheck:
    """Remembers the code of modules and classes, and reports code that was replaced, rewritten or added.

    Added code counts where it hides other code: in a class an inherited method, in a module a builtin.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[str, Any, str, Any, Any]] = []
        self._names: list[tuple[str, Any, frozenset[str], bool]] = []
        self._classes: set[type] = set()

    def add_module(self, module: types.ModuleType) -> None:
        self._add(module.__name__, vars(module), module.__name__.split(".")[0], False)

    def add_class(self, one: type) -> None:
        self._classes.add(one)
        self._add(one.__qualname__, vars(one), one.__module__.split(".")[0], True)

    def _add(self, owner: str, names: Any, package: str, is_class: bool) -> None:
        self._names.append((owner, names, frozenset(names), is_class))
        for name, value in list(names.items()):
            if not isinstance(value, CODE):
                continue
            self._seen.append((owner, names, name, value, getattr(function_of(value), "__code__", None)))
            if isinstance(value, type) and value not in self._classes:
                self._classes.add(value)
                if str(value.__module__).split(".")[0] == package:
                    self._add(owner + "." + name, vars(value), package, True)

    def broken(self) -> str | None:
        """What has changed, as a sentence; None: nothing."""
        for owner, names, name, value, code in self._seen:
            if names.get(name) is not value:
                return f"{owner}.{name} was replaced"
            if code is not None and function_of(value).__code__ is not code:
                return f"{owner}.{name} was rewritten"
        for owner, names, known, is_class in self._names:
            if len(names) == len(known):
                continue
            for name in frozenset(names) - known:
                if (is_class and isinstance(names[name], CODE)) or (not is_class and name in BUILTINS):
                    return f"{owner}.{name} was added"
        return None


BUILTINS = frozenset(vars(builtins))


def watch_over(watch: TamperCheck, *packages: str) -> None:
    """The loaded modules of ``packages``, the builtins, and this module."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in packages:
            watch.add_module(module)
    watch.add_module(builtins)
    watch.add_module(sys.modules[__name__])


def result_class(send: Send, watch: TamperCheck) -> type[unittest.TestResult]:
    class Result(unittest.TestResult):
        def _tell(self, test: Any, status: str, error: Any = None) -> None:
            replaced = watch.broken()
            if replaced is not None:
                send({"test": test.id(), "status": "tampered", "message": replaced})
                return
            message = "" if error is None else "".join(traceback.format_exception_only(*error[:2]))
            send({"test": test.id(), "status": status, "message": message[-MESSAGE:]})

        def addSuccess(self, test: unittest.TestCase) -> None:
            self._tell(test, "passed")

        def addFailure(self, test: unittest.TestCase, err: Any) -> None:
            self._tell(test, "failed", err)

        def addError(self, test: unittest.TestCase, err: Any) -> None:
            if isinstance(test, unittest.TestCase):
                self._tell(test, "error", err)
            else:
                message = "".join(traceback.format_exception_only(*err[:2]))
                send({"note": f"{test.id()}: {message}"[-MESSAGE:]})

        def addSkip(self, test: unittest.TestCase, reason: str) -> None:
            self._tell(test, "skipped")

        def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
            self._tell(test, "failed as expected")

        def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
            self._tell(test, "passed unexpectedly")

        def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
            if err is not None:
                self._tell(test, "failed", err)

    return Result


def run_unittest(config: dict[str, Any], send: Send) -> None:
    watch = TamperCheck()
    kind = result_class(send, watch)
    result = kind()
    watch_over(watch, "unittest")
    watch.add_class(kind)
    module = load(config["name"], config["path"])
    replaced = watch.broken()
    if replaced is not None:
        send({"note": "on import, " + replaced})
        return
    suite = unittest.TestSuite()
    for test in config["expected"]:
        klass, method = test.rsplit(".", 2)[1:]
        case = getattr(module, klass, None)
        if isinstance(case, type) and issubclass(case, unittest.TestCase) and hasattr(case, method):
            suite.addTest(case(method))
    suite.run(result)


def load(name: str, path: str) -> types.ModuleType:
    if "." in name:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class PytestReports:
    """A pytest plugin: one outcome per test, of its set-up, call and tear-down together."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._watch = TamperCheck()
        self._status: dict[str, tuple[str, str]] = {}

    def pytest_sessionstart(self) -> None:
        # pytest's own plugins have changed each other by now, and no test file has been imported.
        watch_over(self._watch, "_pytest", "pluggy", "unittest")

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._send({"note": str(report.longrepr)[-MESSAGE:]})

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = report.nodeid
        if report.failed:
            self._status[test] = ("failed", str(report.longrepr)[-MESSAGE:])
        elif report.skipped:
            self._status[test] = ("skipped", "")
        elif report.when == "call" and test not in self._status:
            xpassed = hasattr(report, "wasxfail")
            self._status[test] = ("passed unexpectedly" if xpassed else "passed", "")
        if report.when == "teardown":
            # Only now: what a test's fixtures replaced for its time is back in place.
            replaced = self._watch.broken()
            status, message = self._status.get(test, ("not run", ""))
            if replaced is not None:
                status, message = "tampered", replaced
            self._send({"test": test, "status": status, "message": message})


def run_pytest(config: dict[str, Any], send: Send, pytest: Any) -> None:
    # Rewriting is off: it would read and write beside the tests, and plain assertions say enough.
    options = ["--noconftest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", config["tests"], "-q"]
    options += ["--import-mode", "append", "--assert", "plain"]
    pytest.main([*options, config["path"]], plugins=[PytestReports(send)])


def main() -> None:
    config = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(config["report"], False)
    send = sender(config["report"], bytes.fromhex(config.pop("key")))
    end = os._exit
    pytest: Any = None
    if config["runner"] == "pytest":
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        sys.path.extend(config["site"])
        pytest = importlib.import_module("pytest")
        importlib.import_module("_pytest.assertion.rewrite")
        sys.path.insert(len(sys.path) - len(config["site"]), config["tests"])
    else:
        sys.path.append(config["tests"])
        sys.path.extend(config["site"])
    sys.path.extend(config["work_paths"])
    try:
        if pytest is None:
            run_unittest(config, send)
        else:
            run_pytest(config, send, pytest)
    except BaseException as error:  # noqa: BLE001 - whatever the work raises on import is its own failure
        send({"note": "".join(traceback.format_exception_only(type(error), error))[-MESSAGE:]})
    send({"done": True})
    sys.stdout.flush()
    sys.stderr.flush()
    end(0)


if __name__ == "__main__":
    main()
