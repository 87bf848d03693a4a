"""Reports of a process that runs tests, by unittest and by pytest: its plan, each beginning, each result.

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
"""Returns a sentence: what was replaced in this process (or: the failure kept from the test). None: nothing."""


def sender(descriptor: int, key: bytes) -> Send:
    """Sends values as lines that are signed with ``key``."""
    dumps, new, write, sha = json.dumps, hmac.new, os.write, hashlib.sha256

    def send(value: Any) -> None:
        payload = dumps(value).encode()
        line = new(key, payload, sha).hexdigest().encode() + b" " + payload + b"\n"
        while line:
            line = line[write(descriptor, line) :]

    return send


class Reporter:
    """Tells the runner of the tests. A beginning is answered by a word, which the result gives back (``ledger``).
    ``answers``: where the runner's words come from."""

    def __init__(self, send: Send, answers: int) -> None:
        self._send = send
        self._answers = answers
        self._read = os.read
        self._word = ""
        self._ended = 0

    def plan(self, tests: list[str]) -> None:
        self._send({"plan": tests})

    def begin(self, test: str) -> None:
        self._send({"begin": test})
        word = b""
        while not word.endswith(b"\n"):
            part = self._read(self._answers, 64)
            if not part:
                raise EOFError("the runner of the tests is gone")
            word += part
        self._word = word.decode().strip()

    def end(self, test: str, status: str, message: str) -> None:
        word, self._word = self._word, ""
        self._ended += 1
        self._send({"test": test, "status": status, "message": message[-MESSAGE:], "word": word})

    def note(self, text: str) -> None:
        self._send({"note": text[-MESSAGE:]})

    def done(self, *, changed: bool = False) -> None:
        """``changed``: the work changed an argument of a call that gave a value."""
        self._send({"done": self._ended, "changed": changed})


def described(kind: Any, error: Any) -> str:
    """The last line or lines of a traceback."""
    return "".join(traceback.format_exception_only(kind, error))[-MESSAGE:]


def result_class(reporter: Reporter, broken: Broken, kept: Broken) -> type[unittest.TestResult]:
    """A result that reports each test as it begins and as it ends: of all that was said of it, the worst."""

    class Result(unittest.TestResult):
        _said: tuple[str, str] | None = None

        def startTest(self, test: unittest.TestCase) -> None:
            super().startTest(test)
            self._said = None
            reporter.begin(test.id())

        def stopTest(self, test: unittest.TestCase) -> None:
            super().stopTest(test)
            status, message = self._said or ("not run", "")
            # Only now: what a test replaced for its time is back in place.
            replaced, swallowed = broken(), kept()
            if replaced is not None:
                status, message = "tampered", replaced
            elif swallowed is not None and status == "passed":
                status, message = "failed", swallowed
            reporter.end(test.id(), status, message)

        def _tell(self, status: str, error: Any = None) -> None:
            if self._said is None or self._said[0] == "passed":
                self._said = (status, "" if error is None else described(*error[:2]))

        def addSuccess(self, test: unittest.TestCase) -> None:
            self._tell("passed")

        def addFailure(self, test: unittest.TestCase, err: Any) -> None:
            self._tell("failed", err)

        def addError(self, test: unittest.TestCase, err: Any) -> None:
            if isinstance(test, unittest.TestCase):
                self._tell("error", err)
            else:
                reporter.note(f"{test.id()}: {described(*err[:2])}")

        def addSkip(self, test: unittest.TestCase, reason: str) -> None:
            self._tell("skipped")

        def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
            self._tell("failed as expected")

        def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
            self._tell("passed unexpectedly")

        def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
            if err is not None:
                self._tell("failed", err)

    return Result


class PytestReports:
    """A pytest plugin: one outcome per test, of its set-up, call and tear-down together. ``canaries``: names of
    tests to add, and what each does."""

    def __init__(
        self,
        reporter: Reporter,
        broken: Broken,
        kept: Broken,
        on_start: Callable[[], None],
        canaries: dict[str, Callable[[], None]],
    ) -> None:
        self._reporter = reporter
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

    def pytest_collection_finish(self, session: Any) -> None:
        self._reporter.plan([item.nodeid for item in session.items])

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._reporter.note(str(report.longrepr))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reporter.begin(nodeid)

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
                status, message = "failed", swallowed
            self._reporter.end(test, status, message)
