"""What a process that runs tests reports: one signed line for each test, by unittest and by pytest.

Python 3.9 or later, standard library only; pytest where the image has it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import traceback
import unittest
from collections.abc import Callable
from typing import Any

MESSAGE = 500
Send = Callable[[Any], None]
Broken = Callable[[], "str | None"]
"""What was replaced in this process (or: which failure was kept from the test), as a sentence; None: nothing."""


def sender(descriptor: int, key: bytes) -> Send:
    """Sends values as lines that are signed with ``key``."""
    dumps, new, write, sha = json.dumps, hmac.new, os.write, hashlib.sha256

    def send(value: Any) -> None:
        payload = dumps(value).encode()
        line = new(key, payload, sha).hexdigest().encode() + b" " + payload + b"\n"
        while line:
            line = line[write(descriptor, line) :]

    return send


def described(kind: Any, error: Any) -> str:
    """The last line or lines of a traceback."""
    return "".join(traceback.format_exception_only(kind, error))[-MESSAGE:]


def result_class(send: Send, broken: Broken, kept: Broken) -> type[unittest.TestResult]:
    """A result that reports each test as it ends."""

    class Result(unittest.TestResult):
        def _tell(self, test: Any, status: str, error: Any = None) -> None:
            replaced = broken()
            if replaced is not None:
                send({"test": test.id(), "status": "tampered", "message": replaced})
                return
            swallowed = kept()
            if swallowed is not None and status == "passed":
                send({"test": test.id(), "status": "failed", "message": swallowed[-MESSAGE:]})
                return
            send({"test": test.id(), "status": status, "message": "" if error is None else described(*error[:2])})

        def addSuccess(self, test: unittest.TestCase) -> None:
            self._tell(test, "passed")

        def addFailure(self, test: unittest.TestCase, err: Any) -> None:
            self._tell(test, "failed", err)

        def addError(self, test: unittest.TestCase, err: Any) -> None:
            if isinstance(test, unittest.TestCase):
                self._tell(test, "error", err)
            else:
                send({"note": f"{test.id()}: {described(*err[:2])}"[-MESSAGE:]})

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


class PytestReports:
    """A pytest plugin: one outcome per test, of its set-up, call and tear-down together. ``canaries``: names of
    tests to add, and what each does."""

    def __init__(
        self,
        send: Send,
        broken: Broken,
        kept: Broken,
        on_start: Callable[[], None],
        canaries: dict[str, Callable[[], None]],
    ) -> None:
        self._send = send
        self._broken = broken
        self._kept = kept
        self._on_start = on_start
        self._canaries = canaries
        self._status: dict[str, tuple[str, str]] = {}

    def pytest_sessionstart(self) -> None:
        # pytest's own plugins have changed each other by now, and no test file has been imported.
        self._on_start()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if not items:
            return
        kind: Any = next(each for each in type(items[0]).__mro__ if each.__module__ == "_pytest.python")
        parent = items[0]
        while type(parent).__name__ != "Module":
            parent = parent.parent
        for position, (name, check) in enumerate(self._canaries.items()):
            canary = kind.from_parent(parent, name=name, callobj=check)
            items.insert(len(items) if position else len(items) // 2, canary)

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
            # pytest sets it on reports of expected failures alone.
            xpassed = hasattr(report, "wasxfail")
            self._status[test] = ("passed unexpectedly" if xpassed else "passed", "")
        if report.when == "teardown":
            # Only now: what a test's fixtures replaced for its time is back in place.
            replaced = self._broken()
            status, message = self._status.get(test, ("not run", ""))
            swallowed = self._kept()
            if replaced is not None:
                status, message = "tampered", replaced
            elif swallowed is not None and status == "passed":
                status, message = "failed", swallowed[-MESSAGE:]
            self._send({"test": test, "status": status, "message": message})
