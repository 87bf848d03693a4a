"""Reads the results of the programs in the grading sandbox: pure functions from a command's result to a verdict.

What must hold: tests passed only when the runner's own line, keyed with the nonce of this run, names every
expected id as passed and nothing else, and the helper saw exit status 0. A fault of the hidden tests is believed
only in such a line. Everything else is work that does not pass. Text that is taken from work can be stored: UTF-8
can encode it, whatever the work called its files and wrote into its errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnstile_server.grading.inside.run_tests import FAULTY, opened
from turnstile_server.grading.inside.workdiff import REFUSED
from turnstile_server.sandboxes.protocol import ExecResult

CANNOT_RUN = (126, 127)
"""Exit statuses of a shell, and of the helper: found but not to be run, not found."""
MAX_TEXT = 4000
MAX_LINE = 300
"""Characters of a line of a summary, at most."""
LAST_LINES = 10
"""Lines of a runner's log that a message has: its last ones say why it stopped."""


@dataclass(frozen=True, slots=True)
class HiddenTestsVerdict:
    """Verdict of a run of the hidden tests."""

    passed: bool
    fault: str | None = None
    """Reason why the hidden tests cannot run, whatever the work."""
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> tuple[str, ...]:
        """Reasons why they did not pass, as lines: one for each failed test."""
        if self.passed:
            return ()
        lines = [
            one_line(f"{one['id']} {one['status']}: {one['message']}") for one in self.detail.get("failed", ())
        ]
        if not lines and "note" not in self.detail:
            lines.append(f"tests: exit status {self.detail.get('exit_code')}")
        return tuple([f"tests: {self.detail['note']}", *lines] if "note" in self.detail else lines)


@dataclass(frozen=True, slots=True)
class DiffVerdict:
    """Result of taking over the work's changes."""

    applied: bool
    fault: str | None = None
    """Reason why no work can be judged in this sandbox."""
    broken: str | None = None
    """Reason why our own program failed, by fault of neither the task nor the work."""
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def summary(self) -> tuple[str, ...]:
        """Changes that were not taken over, as lines."""
        refused = [printable(f"work: {self.detail['refused']}")] if "refused" in self.detail else []
        left_out = [printable(f"{path} is left out: {why}") for path, why in self.detail.get("left_out", ())]
        return tuple(refused + left_out)


def read_diff(result: ExecResult) -> DiffVerdict:
    if result.timed_out:
        return DiffVerdict(False, detail={"refused": "taking over the work ran out of time"})
    if result.exit_code in CANNOT_RUN:
        return DiffVerdict(False, fault=f"the image has no python3, which grading by tests needs: {_tail(result)}")
    if result.exit_code > 128:
        return DiffVerdict(False, detail={"refused": f"taking over the work was killed ({result.exit_code})"})
    if result.exit_code not in (0, REFUSED):
        return DiffVerdict(False, broken=f"the diff ended with {result.exit_code}: {_tail(result)}")
    return DiffVerdict(result.exit_code == 0, detail=storable(json.loads(result.stdout)))


def read_tests(result: ExecResult, expected: Sequence[str], nonce: bytes) -> HiddenTestsVerdict:
    detail: dict[str, Any] = {"expected": len(expected), "exit_code": result.exit_code}
    if result.timed_out:
        return HiddenTestsVerdict(False, detail={**detail, "passed": 0, "note": "the tests ran out of time"})
    try:
        said = storable(opened(nonce, result.stdout.rstrip(b"\n")))
    except ValueError:
        return HiddenTestsVerdict(
            False, detail={**detail, "passed": 0, "note": "the runner ended without a result"}
        )
    if said["faults"] and result.exit_code == FAULTY:
        return HiddenTestsVerdict(False, fault="; ".join(said["faults"])[:MAX_TEXT])
    clean = not said["faults"] and not said["failed"] and result.exit_code == 0
    passed = clean and sorted(said["passed"]) == sorted(expected)
    failed = [
        {"id": test, "status": status, "message": message.strip()} for test, status, message in said["failed"]
    ]
    shown = {"failed": failed, "slowest": said["slowest"], "output": said["output"][-MAX_TEXT:]}
    return HiddenTestsVerdict(passed, detail={**detail, "passed": len(said["passed"]), **shown})


def read_command(result: ExecResult) -> HiddenTestsVerdict:
    """Verdict of a runner ``command``, by its exit status."""
    detail: dict[str, Any] = {"exit_code": result.exit_code, "output": _tail(result)}
    if result.timed_out:
        detail["note"] = "the tests ran out of time"
    return HiddenTestsVerdict(result.exit_code == 0 and not result.timed_out, detail=detail)


def blanket(verdict: HiddenTestsVerdict, why: str) -> HiddenTestsVerdict:
    """One that passed, and does not count."""
    return HiddenTestsVerdict(False, detail={**verdict.detail, "note": f"tampered: {why}"})


def one_line(text: str) -> str:
    """The first line of ``text`` that is not blank, as ``printable`` gives it."""
    return printable(next((line.strip() for line in text.splitlines() if line.strip()), ""))


def printable(text: str) -> str:
    """``text`` as one line: control characters become spaces, and it is cut at ``MAX_LINE``."""
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return shown if len(shown) <= MAX_LINE else f"{shown[: MAX_LINE - 1]}…"


def last_lines(text: str) -> str:
    """The last lines of a log that are not blank, as one line; "no output" where there are none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(map(printable, lines[-LAST_LINES:])) or "no output"


def storable(value: Any) -> Any:
    """``value``, of JSON, with every surrogate that stands alone shown as an escape: half a character in an error,
    or a byte of a file name that is not UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [storable(each) for each in value]
    if isinstance(value, dict):
        return {storable(name): storable(each) for name, each in value.items()}
    return value


def _tail(result: ExecResult) -> str:
    return (result.stdout + result.stderr)[-MAX_TEXT:].decode(errors="replace").strip()
