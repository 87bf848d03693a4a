"""Reports of a process of tests, checked against what must have run.

A line says, of the tests: which will run and in which order (``plan``), that one begins (``begin``), its result
(``test``), that something else failed (``note``), that all is done (``done``, with the number of results).

What must hold: a test has a result when it was planned, began once, after those before it in the plan and while no
other ran, and its result carries the word by which its beginning was answered. So results can be neither doubled,
exchanged, dated back nor made beforehand, and a duration is the time between that answer and the result by this
process's clock. Whatever breaks this makes every test of the file ``tampered``.

Python 3.9 or later, standard library only.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

MAX_MESSAGE = 500
MUST_FAIL = ("failed", "error")
"""Statuses with which a canary ends."""


class TestReports:
    """Everything that one process reported. ``canaries``: ids of tests that must fail."""

    __test__ = False

    def __init__(self, canaries: Sequence[str] = ()) -> None:
        self.canaries = canaries
        self.tests: dict[str, list[str]] = {}
        """Status and message of each test that ended."""
        self.note = ""
        self.output = b""
        """The process's output: to be shown, never read."""
        self.done = False
        self.changed = False
        """The work changed an argument of a call that gave a value."""
        self.broken: str | None = None
        """The rule that a line broke, as a sentence."""
        self.seconds: dict[str, float] = {}
        self._plan: list[str] | None = None
        self._at = 0
        """Place in the plan after the latest test that began."""
        self._ended = 0
        self._running: tuple[str, str, float] | None = None
        """Id, word, time of the answer."""

    def take(self, said: Any, now: float) -> str | None:
        """One line's value. ``now``: by this process's clock. Returns the answer to a beginning."""
        if self.broken is not None:
            return None
        if self.done:
            self.refuse("something was reported after the end")
        elif "plan" in said:
            self._take_plan(said["plan"])
        elif "begin" in said:
            return self._begin(said["begin"], now)
        elif "test" in said:
            self._end(said, now)
        elif "note" in said:
            self.note = self.note or said["note"]
        elif "done" in said:
            if said["done"] != self._ended:
                self.refuse(f"{self._ended} tests ended, and {said['done']} are said to have")
            self.done = True
            self.changed = said.get("changed") is True
        return None

    def ended(self, exit_status: int) -> None:
        """The process's end."""
        if exit_status != 0:
            self.done = False
            self.note = self.note or f"the tests' process ended with {exit_status}"
        elif not self.done:
            self.note = self.note or "the tests' process ended before the tests had"

    def outcome(self, test: str) -> list[str]:
        """Status and message of an expected test."""
        status, message = self.tests.get(test, ["not run", self.note])
        if self.broken is not None:
            return ["tampered", self.broken[:MAX_MESSAGE]]
        if status == "passed" and self._blanket():
            return ["tampered", "a test that must fail (a canary) passed, or did not run"]
        if status == "passed" and not self.done:
            return ["not counted", self.note[:MAX_MESSAGE]]
        return [status, message[:MAX_MESSAGE]]

    def _blanket(self) -> bool:
        return any(self.tests.get(name, [""])[0] not in MUST_FAIL for name in self.canaries)

    def refuse(self, why: str) -> None:
        """From now on no test of the file counts."""
        self.broken = self.broken or why
        self.done = False

    def _take_plan(self, plan: Any) -> None:
        if self._plan is not None or self._at or not isinstance(plan, list):
            self.refuse("there is a second plan of the tests")
            return
        self._plan = [str(test) for test in plan]

    def _begin(self, test: Any, now: float) -> str | None:
        """The word that the result must carry."""
        if self._plan is None:
            self.refuse(f"{test} began before there was a plan of the tests")
        elif self._running is not None:
            self.refuse(f"{test} began while {self._running[0]} ran")
        elif test not in self._plan[self._at :]:
            self.refuse(f"{test} began again, out of its order, or was not to run")
        else:
            self._at = self._plan.index(test, self._at) + 1
            word = secrets.token_hex(16)
            self._running = (test, word, now)
            return word
        return None

    def _end(self, said: Any, now: float) -> None:
        if self._running is None or self._running[:2] != (said["test"], said.get("word")):
            self.refuse(f"{said['test']} has a result that does not follow its beginning")
            return
        self.seconds[said["test"]] = now - self._running[2]
        self._running = None
        self._ended += 1
        self.tests[said["test"]] = [said["status"], said["message"]]
