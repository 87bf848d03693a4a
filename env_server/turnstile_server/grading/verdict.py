"""What the grading sandbox's answers mean: pure functions from a command's result to a decision.

What must hold: tests passed only when the runner's own line, keyed with the nonce of this run, names every
expected id as passed and nothing else, and the helper saw exit status 0. A fault of the hidden tests is believed
only in such a line. Everything else is work that does not pass. What is shown of work can be stored: it is text
that UTF-8 can encode, whatever the work called its files and put into its errors.
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
"""Of a shell, and of the helper: found but not to be run, not found."""
MAX_TEXT = 4000


@dataclass(frozen=True, slots=True)
class TestsVerdict:
    passed: bool
    fault: str | None = None
    """Why the hidden tests cannot run, whatever the work."""
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DiffVerdict:
    applied: bool
    fault: str | None = None
    """Why no work can be judged in this sandbox."""
    broken: str | None = None
    """Why our own program failed: nobody's fault that this task or work could be blamed for."""
    detail: Mapping[str, Any] = field(default_factory=dict)


def read_diff(result: ExecResult) -> DiffVerdict:
    if result.timed_out:
        return DiffVerdict(False, detail={"refused": "taking over the work ran out of time"})
    if result.exit_code in CANNOT_RUN:
        return DiffVerdict(False, fault=f"the image has no python3, which grading by tests needs: {_tail(result)}")
    if result.exit_code > 128:
        return DiffVerdict(False, detail={"refused": f"taking over the work was killed ({result.exit_code})"})
    if result.exit_code not in (0, REFUSED):
        return DiffVerdict(False, broken=f"the diff ended with {result.exit_code}: {_tail(result)}")
    return DiffVerdict(result.exit_code == 0, detail=_storable(json.loads(result.stdout)))


def read_tests(result: ExecResult, expected: Sequence[str], nonce: bytes) -> TestsVerdict:
    detail: dict[str, Any] = {"expected": len(expected), "exit_code": result.exit_code}
    if result.timed_out:
        return TestsVerdict(False, detail={**detail, "passed": 0, "note": "the tests ran out of time"})
    try:
        said = _storable(opened(nonce, result.stdout.rstrip(b"\n")))
    except ValueError:
        return TestsVerdict(False, detail={**detail, "passed": 0, "note": "the runner ended without a result"})
    if said["faults"] and result.exit_code == FAULTY:
        return TestsVerdict(False, fault="; ".join(said["faults"])[:MAX_TEXT])
    clean = not said["faults"] and not said["failed"] and result.exit_code == 0
    passed = clean and set(said["passed"]) == set(expected)
    failed = [{"id": test, "status": status, "message": message} for test, status, message in said["failed"]]
    output = said["output"][-MAX_TEXT:]
    return TestsVerdict(
        passed, detail={**detail, "passed": len(said["passed"]), "failed": failed, "output": output}
    )


def read_command(result: ExecResult) -> TestsVerdict:
    """Of a runner ``command``: its exit status is all."""
    detail: dict[str, Any] = {"exit_code": result.exit_code, "output": _tail(result)}
    if result.timed_out:
        detail["note"] = "the tests ran out of time"
    return TestsVerdict(result.exit_code == 0 and not result.timed_out, detail=detail)


def _storable(value: Any) -> Any:
    """``value``, of JSON, with every surrogate that stands alone shown as an escape: half a character in an error,
    or a byte of a file name that is not UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list):
        return [_storable(each) for each in value]
    if isinstance(value, dict):
        return {_storable(name): _storable(each) for name, each in value.items()}
    return value


def _tail(result: ExecResult) -> str:
    return (result.stdout + result.stderr)[-MAX_TEXT:].decode(errors="replace").strip()
