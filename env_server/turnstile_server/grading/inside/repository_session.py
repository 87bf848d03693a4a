"""Runs files of a repository by its own pytest, in the process of the work. Started by ``repository.py``.

It reports by ``RepositoryReports``, pytest's first plug-in, in lines keyed with a key that it got before anything
of the repository was imported. What must hold: pytest, and all that is needed to report, is imported from the
interpreter's own packages before the work's folders come onto the path.

Python 3.9 or later, standard library, and the repository's pytest.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from typing import Any

from .reports import MESSAGE, Send, described, sender
from .suite_rules import FAILED, NOT_RUN, PASSED, SKIPPED, TAMPERED, XFAILED, XPASSED
from .suite_watch import SuiteWatch, WorkFiles

RAN = (0, 1)
"""Exit codes of pytest: all passed, or some failed. Any other: it did not run all of them."""


class RepositoryReports:
    """A pytest plug-in: one outcome per test, of its set-up, call and tear-down together, and canaries."""

    def __init__(self, send: Send, watch: SuiteWatch, canaries: list[str]) -> None:
        self._send = send
        self._watch = watch
        self._canaries = canaries
        self._status: dict[str, tuple[str, str]] = {}
        self._seconds: dict[str, float] = {}

    def pytest_load_initial_conftests(self, early_config: Any) -> None:
        self._watch.begin(early_config.pluginmanager)

    def pytest_configure(self, config: Any) -> None:
        # Options of the repository that would end or split the session before all has been reported.
        options = vars(config.option)
        for name, value in (
            ("maxfail", 0),
            ("numprocesses", None),
            ("dist", "no"),
            ("tx", []),
            ("looponfail", False),
        ):
            if name in options:
                setattr(config.option, name, value)

    def pytest_collection_finish(self, session: Any) -> None:
        self._send({"collected": len(session.items)})

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        ordinary = [each for each in items if kind_of(each) is not None and module_of(each) is not None]
        if not ordinary:
            return
        for position, name in enumerate(self._canaries):
            beside = ordinary[-position]
            canary = kind_of(beside).from_parent(module_of(beside), name=name, callobj=fail)
            items.insert(items.index(beside) + 1, canary)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._send({"note": str(report.longrepr)[-MESSAGE:]})

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = report.nodeid
        expected_to_fail = "wasxfail" in vars(report)
        self._seconds[test] = self._seconds.get(test, 0.0) + float(report.duration)
        if report.outcome == "failed":
            self._status[test] = (FAILED, str(report.longrepr)[-MESSAGE:])
        elif report.outcome == "skipped":
            self._status[test] = (XFAILED if expected_to_fail else SKIPPED, "")
        elif report.when == "call" and test not in self._status:
            self._status[test] = (XPASSED if expected_to_fail else PASSED, "")
        if report.when == "teardown":
            # Only now: what a test's fixtures replaced for its time is back in place.
            status, message = self._status.pop(test, (NOT_RUN, ""))
            replaced = self._watch.broken()
            if replaced is not None:
                status, message = TAMPERED, replaced
            seconds = round(self._seconds.pop(test), 4)
            self._send({"test": test, "status": status, "message": message, "seconds": seconds})


def kind_of(item: Any) -> Any:
    """pytest's own class of the test; None for a test that is no function."""
    return next((each for each in type(item).__mro__ if each.__module__ == "_pytest.python"), None)


def module_of(item: Any) -> Any:
    """The test file's own node; None for a test that is not in a Python file."""
    node = item
    while node is not None and type(node).__name__ != "Module":
        node = node.parent
    return node


def fail() -> None:
    raise AssertionError("a canary: this test must fail")


def main() -> int:
    """Fields: ``key``, ``report`` (descriptor), ``canaries``, ``work``, ``owned``, ``import_paths``, ``files``,
    ``options``."""
    config = json.load(sys.stdin)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.set_inheritable(config["report"], False)
    send = sender(config["report"], bytes.fromhex(config.pop("key")))
    end = os._exit
    work = config["work"]
    pytest = importlib.import_module("pytest")
    for name in ("_pytest.assertion.rewrite", "_pytest.unittest", "_pytest.python", "pluggy"):
        importlib.import_module(name)
    watch = SuiteWatch(WorkFiles(work, config["owned"]))
    reports = RepositoryReports(send, watch, config["canaries"])
    sys.path[:0] = [os.path.normpath(os.path.join(work, path)) for path in config["import_paths"]]
    cache = tempfile.mkdtemp(prefix="pytest-cache-")
    argv = [*config["files"], *config["options"], "--rootdir", work, "-o", f"cache_dir={cache}"]
    sys.argv = ["pytest", *argv]
    try:
        status = int(pytest.main(argv, plugins=[reports]))
        if status not in RAN:
            send({"note": f"pytest ended with {status}"})
    except BaseException as error:  # noqa: BLE001 - whatever the repository raises, it is its own failure
        send({"note": described(type(error), error)[-MESSAGE:]})
    send({"done": True})
    sys.stdout.flush()
    sys.stderr.flush()
    end(0)
    return 0
