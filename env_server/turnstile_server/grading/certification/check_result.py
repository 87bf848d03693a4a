"""Results of checks: of one task, and of the whole set, in the fields of OpenEnv's report.

What must hold: a set passes a check only when every task that it applies to was checked and passed. One that could
not be checked makes the whole a skip, which says what to add.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

MOST_SHOWN = 20
"""Evidence lines of one result."""


class CheckId(StrEnum):
    """The checks, by their ids in OpenEnv's policy."""

    ORACLE = "semantic.oracle_max"
    FLOOR = "semantic.floor_gap"
    CANARIES = "semantic.canary_floor"
    LEAKAGE = "semantic.no_solution_leakage"
    VERIFIER = "semantic.verifier_determinism"
    EPISODES = "runtime.episode_determinism"
    SEEDS = "runtime.seed_control"
    ISOLATION = "runtime.episode_isolation"
    TOOLS = "runtime.tool_declaration_accuracy"
    TASKS = "runtime.task_declaration_accuracy"
    ATTACKS = "statistical.adversarial_floor"


REMEDIES: Mapping[CheckId, str] = {
    CheckId.ORACLE: "mend the task's solution (`gold`, or the world's `solve`), or the grader that refuses it; "
    "`turnstile tasks validate` shows each failed test",
    CheckId.FLOOR: "make the grader ask for something that the start lacks, so that doing nothing earns less",
    CheckId.CANARIES: "ask for an answer that cannot be guessed, and compare the whole of it",
    CheckId.LEAKAGE: "take the solution, the hidden tests and the expected answer out of what the agent can read",
    CheckId.VERIFIER: "take chance and time out of the grader; a judge model needs reward.variance_tolerance",
    CheckId.EPISODES: "draw everything of the start from the seed of `reset`, and nothing from the clock",
    CheckId.SEEDS: "draw everything from the seed that `reset` gets",
    CheckId.ISOLATION: "keep an episode's state in its own sandbox or world, nothing in globals or on the host",
    CheckId.TOOLS: "correct capabilities.declared_tools in the manifest",
    CheckId.TASKS: "correct capabilities.declared_task_count in the manifest",
    CheckId.ATTACKS: "judge the work where it cannot reach what judges it: hidden tests with `trust: boundary` or "
    "a script that runs the work as a program of its own and looks at what it says (docs/attacks.md)",
}


class CheckStatus(StrEnum):
    """The outcome of a check; ``ERROR``: the machine, or an image that is not there, kept it from being made."""

    PASS = "pass"
    FAIL = "fail"
    SKIP = "skip"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TaskFinding:
    """The outcome of one check on one task."""

    status: CheckStatus
    evidence: tuple[str, ...] = ()
    measured: Mapping[str, Any] = field(default_factory=dict)
    applies: bool = True
    """False, with ``SKIP``: there is nothing in this task to check."""


def passed(**measured: Any) -> TaskFinding:
    return TaskFinding(CheckStatus.PASS, (), measured)


def failed(*evidence: str, **measured: Any) -> TaskFinding:
    return TaskFinding(CheckStatus.FAIL, evidence, measured)


def judged(problems: Sequence[str], **measured: Any) -> TaskFinding:
    """Passed without ``problems``."""
    return failed(*problems, **measured) if problems else passed(**measured)


def unchecked(reason: str) -> TaskFinding:
    """It applies, and the task lacks what it would be checked with."""
    return TaskFinding(CheckStatus.SKIP, (reason,))


def not_applicable(reason: str) -> TaskFinding:
    return TaskFinding(CheckStatus.SKIP, (reason,), applies=False)


@dataclass(frozen=True, slots=True)
class CheckedTask:
    """What one check said of one task."""

    task_id: str
    check_id: CheckId
    finding: TaskFinding
    duration_s: float


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outcome of one check on the whole set: the fields of a result in OpenEnv's report."""

    check_id: CheckId
    status: CheckStatus
    measured: Mapping[str, Any] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    remediation: str | None = None
    duration_s: float = 0.0
    applies: bool = True
    """False, with ``SKIP``: there was nothing to check in any task. No field of OpenEnv's."""


def result_of(check_id: CheckId, checked: Sequence[CheckedTask]) -> CheckResult:
    """The result of one check from those of the tasks."""
    findings = [each.finding for each in checked]
    status = _whole(findings)
    counts = Counter(each.status for each in findings)
    measured: dict[str, Any] = {"tasks": len(findings), **{str(each): counts[each] for each in CheckStatus}}
    measured["not_applicable"] = sum(not each.applies for each in findings)
    measured |= _ranges([each.measured for each in findings])
    return CheckResult(
        check_id,
        status,
        measured,
        tuple(_evidence(checked)),
        REMEDIES[check_id] if status is CheckStatus.FAIL else None,
        sum(each.duration_s for each in checked),
        applies=any(each.applies for each in findings),
    )


def _whole(findings: Sequence[TaskFinding]) -> CheckStatus:
    found = {each.status for each in findings if each.applies}
    for worst in (CheckStatus.FAIL, CheckStatus.ERROR, CheckStatus.SKIP):
        if worst in found:
            return worst
    return CheckStatus.PASS if found else CheckStatus.SKIP


def _ranges(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lowest and highest of every number, over the tasks."""
    numbers: dict[str, list[float]] = {}
    for each in measured:
        for name, value in each.items():
            if isinstance(value, int | float):
                numbers.setdefault(name, []).append(value)
    return {name: {"min": min(values), "max": max(values)} for name, values in numbers.items()}


def _evidence(checked: Sequence[CheckedTask]) -> list[str]:
    """Each fault by its task; then each reason of a skip, once."""
    lines, reasons = [], Counter[str]()
    for each in checked:
        if each.finding.status is CheckStatus.SKIP:
            reasons.update(each.finding.evidence)
        else:
            lines += [f"{each.task_id}: {line}" for line in each.finding.evidence]
    if (more := len(lines) - MOST_SHOWN) > 0:
        lines = [*lines[:MOST_SHOWN], f"and {more} more"]
    return [*lines, *(f"{count} of {len(checked)} tasks: {reason}" for reason, count in reasons.most_common())]
