"""Findings of pytest and `turnstile agents doctor`, read from their output, in words for a table (upstream.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bounded_commands import Completed

SHOWN: Final = 3
"""Reasons that a row gives, each with its first test."""
REASON_CHARACTERS: Final = 220
FAILED: Final = re.compile(
    r"^(?:FAILED|ERROR) (?P<test>\S+?(?:\[[^\n]*?\])?)(?: - (?P<reason>.*?))?\n"
    r"(?=FAILED |ERROR |RERUN |SKIPPED |XFAIL |XPASS |=|\d+ \w|\Z)",
    re.MULTILINE | re.DOTALL,
)
"""A failed test in pytest's summary. In CI the reason is whole, of several lines."""
NO_TESTS: Final = 5
"""pytest's exit status where every test was left out."""


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """The result of a suite: how many tests passed and were skipped, and the reason of each that failed."""

    passed: int = 0
    skipped: int = 0
    failures: Mapping[str, str] = field(default_factory=dict)

    def __add__(self, other: SuiteResult) -> SuiteResult:
        failures = {**self.failures, **other.failures}
        return SuiteResult(self.passed + other.passed, self.skipped + other.skipped, failures)


def reason_of(output: str) -> str:
    """The line of an installer's output that says what is wrong: its first error, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(?i)(npm )?(error|×|╰─▶|turnstile:|fatal)", line)]
    return " ".join(errors[:2]) or (lines[-1] if lines else "it says nothing")


def result_of_pytest(ended: Completed) -> SuiteResult:
    """The counts of pytest's last line, and the failed tests of its summary with their reasons."""
    summary = ended.output.rpartition("short test summary info")[2]
    failures = {one["test"]: cause_of(one["reason"] or "no reason") for one in FAILED.finditer(summary)}
    counted = {
        what: int(number) for number, what in re.findall(r"(\d+) (passed|skipped)\b", last_line(ended.output))
    }
    if ended.code is None:
        failures["the suite"] = "it did not end in time"
    elif ended.code not in {0, NO_TESTS} and not failures:
        failures["the suite"] = last_line(ended.output) or f"pytest ended with status {ended.code}"
    return SuiteResult(counted.get("passed", 0), counted.get("skipped", 0), failures)


def cause_of(reason: str) -> str:
    """The error at the end of a traceback that a test quotes, else the whole reason."""
    _, quoted, traceback = reason.partition("Traceback (most recent call last):")
    errors = re.findall(r"^\s*([A-Z_a-z][\w.]*(?:Error|Exception|Exit|Failure)\b.*)$", traceback, re.MULTILINE)
    return errors[-1] if quoted and errors else reason


def last_line(output: str) -> str:
    return next((line.strip("= ") for line in reversed(output.splitlines()) if line.strip()), "")


def doctor_of(name: str) -> str:
    return f"turnstile agents doctor {name}"


def result_of_doctor(name: str, ended: Completed) -> SuiteResult:
    """The doctor counts as one test; what it found wrong is the reason."""
    try:
        report: dict[str, Any] = json.loads(ended.output[ended.output.index("{") : ended.output.rindex("}") + 1])
    except ValueError:
        late = "it did not end in time" if ended.code is None else last_line(ended.output)
        return SuiteResult(failures={doctor_of(name): late})
    wrong = [f"{one['name']}: {one['text']}" for one in report["findings"] if one["passed"] is False]
    if report["passed"]:
        return SuiteResult(passed=1)
    return SuiteResult(failures={doctor_of(name): "; ".join(wrong)})


def cells_of(total: SuiteResult, drifted: Mapping[str, str], before: Mapping[str, str]) -> tuple[str, str]:
    """The cells of a play. ``before``: the failures that the pinned version has too."""
    count = total.passed + len(total.failures)
    by_reason: dict[str, list[str]] = {}
    for test, reason in drifted.items():
        by_reason.setdefault(one_line(reason), []).append(test.removeprefix("tests/"))
    lines = [
        f"`{test}`{f' and {len(others)} more' if others else ''}: {reason}"
        for reason, (test, *others) in list(by_reason.items())[:SHOWN]
    ]
    if len(by_reason) > SHOWN:
        lines.append(f"and {len(by_reason) - SHOWN} more reasons")
    if before:
        lines.append(
            f"not counted, for the pinned version fails too: `{next(iter(before)).removeprefix('tests/')}`"
        )
        lines[-1] += f" and {len(before) - 1} more" if len(before) > 1 else ""
    if drifted:
        result = f"fails: {len(drifted)} of {count}"
    elif total.passed:
        result = f"passes ({total.passed})"
    else:
        result = "not played"
        lines.append(
            f"{total.skipped} tests were skipped" if total.skipped else "no test of it can be played here"
        )
    return result, "<br>".join(lines)


def one_line(reason: str) -> str:
    """A reason in one short line for a table: without addresses, and without folders of this machine."""
    text = re.sub(r"https?://[^\s'\")]+", "URL", re.sub(r"\s+", " ", reason).strip())
    tops = "|".join(re.escape(path.name) for path in Path("/").iterdir())
    text = re.sub(rf"(?<![\w.])/(?:{tops})/(?:[^\s/'\":,)]+/)*", "…/", text)
    if len(text) > REASON_CHARACTERS:
        text = text[:REASON_CHARACTERS].rstrip() + "…"
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
