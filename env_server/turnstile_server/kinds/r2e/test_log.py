"""The log of an R2E-Gym task's tests: outcomes by test, whether they are the expected ones, and how the log
contradicts itself. Pure.

The rules of outcomes are R2E-Gym's own (github.com/R2E-Gym/R2E-Gym: ``repo_analysis/execution_log_parser.py``,
which has one parser for all repositories, and ``agenthub/runtime/docker.py``, which compares). No package of it is
published. What a log can prove is ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

HEADING = "short test summary info"
PASSED, FAILED, ERROR = "PASSED", "FAILED", "ERROR"
_CONTROL = re.compile(r"\x1b\[[0-9;]*m|\r")
_REASON = " - "
_FINAL = re.compile(r"^=+ (\d+ [a-z]+(?:, \d+ [a-z]+)*) in [\d.:]+ ?s", re.MULTILINE)
"""pytest's last line, with its counts."""
_COUNTED = {PASSED: re.compile(r"(\d+) passed"), FAILED: re.compile(r"(\d+) failed")}


def plain(log: str) -> str:
    """``log`` without colours."""
    return _CONTROL.sub("", log)


def outcomes(log: str) -> dict[str, str]:
    """Outcome by test, as ``Class.test``, of a plain log; empty where it has no summary. A line's word decides,
    and of several lines of one test the last does."""
    found: dict[str, str] = {}
    for line in _summary(log).strip().split("\n"):
        outcome = next((each for each in (PASSED, FAILED, ERROR) if each in line), None)
        if outcome is not None:
            name = ".".join(line.split("::")[1:])
            found[name if outcome == PASSED else name.partition(_REASON)[0]] = outcome
    return found


def differences(found: Mapping[str, str], expected: Mapping[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """Tests whose reported and expected outcomes differ: both, None for no outcome. Empty: the work is right.

    A line of pytest without the name of a test (an error of a whole file) has an empty name. R2E-Gym counts it and
    does not compare it, so two such tests that differ are no difference.
    """
    got, wanted = _named(found), _named(expected)
    names = [*wanted, *(name for name in got if name not in wanted)]
    unequal = {name: (got.get(name), wanted.get(name)) for name in names if got.get(name) != wanted.get(name)}
    return {} if len(got) == len(wanted) and set(unequal) <= {""} else unequal


def doubts(log: str) -> dict[str, str]:
    """Contradictions in a plain log, and parts of pytest's own logs that it lacks: a sentence by kind."""
    found: dict[str, str] = {}
    if (count := log.count(HEADING)) > 1:
        found["summaries"] = f"pytest's summary stands {count} times in the log"
    summary = _summary(log)
    finals = _FINAL.findall(summary)
    if not finals:
        found["end"] = "pytest did not report that it was done"
        return found
    for outcome, pattern in _COUNTED.items():
        said = sum(line.startswith(f"{outcome} ") for line in summary.split("\n"))
        counted = sum(int(each) for final in finals for each in pattern.findall(final))
        if said > counted:
            found[outcome] = f"{said} tests are reported as {outcome.lower()}, of which pytest counts {counted}"
    return found


def _summary(log: str) -> str:
    """The text between the first two headings."""
    _, _, rest = log.partition(HEADING)
    return rest.partition(HEADING)[0]


def _named(found: Mapping[str, str]) -> dict[str, str]:
    """By names without the reason of a failure. Where two become one, the later in the order of names stands."""
    return {plain(name).partition(_REASON)[0]: found[name] for name in sorted(found)}
