"""The findings of a grading, in words: the part of an episode's ``why`` that is about its reward. Pure.

The evidence of a grading is free JSON: of another version, or of a grader that this one does not know. So nothing
is taken for granted: what is not understood is left to the grading's own ``summary``, and to the components.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from turnstile.visible import visible_line

MOST_NAMES = 3
"""Failed tests that are named; the others are counted."""
_NAME = 60
_NOTE = 120
_SUITES = {"tests": "hidden tests", "swe": "tests of SWE-bench", "r2e": "tests of R2E-Gym"}
_NOT_OF_A_GRADER = frozenset({"summary", "diff", "gate", "not_run", "steps", "step_reward", "not_played"})


def grade_in_words(grading: Mapping[str, Any], components: Mapping[str, float]) -> str:
    """The reasons for the reward, the most important first. Empty where the grading says nothing."""
    steps = _object(grading.get("steps"))
    if steps:
        return _steps(steps, grading)
    found = [*_first(grading)]
    names = [name for name in grading if name not in _NOT_OF_A_GRADER]
    names.sort(key=lambda name: components.get(name, 0.0) >= 1)  # stable: else in the order of the graders
    said = {name: words for name in names if (words := _part(name, _object(grading[name]), components.get(name)))}
    summary = grading.get("summary")
    if not found and not said and isinstance(summary, list) and summary:
        return "; ".join(_short(line) for line in summary[:MOST_NAMES])
    found += said.values()
    others = [name for name in components if name not in said]
    if others and not (found and all(components[name] == 0 for name in others)):
        shown = [
            f"{visible_line(name, _NAME)} is {shown_number(components[name])}" for name in others[:MOST_NAMES]
        ]
        found.append(_listed(shown, len(others)))
    left_out = _count(_object(_object(grading.get("diff")).get("counts")).get("left_out"))
    if left_out and any(value < 1 for value in components.values()):
        found.append(f"{left_out} changed path{' was' if left_out == 1 else 's were'} left out")
    return "; ".join(found)


def _first(grading: Mapping[str, Any]) -> Iterable[str]:
    """The findings that decide over all graders: work that was not taken over, and a gate that closed."""
    diff, gate = _object(grading.get("diff")), _object(grading.get("gate"))
    if "refused" in diff:
        yield f"the work was not taken over: {_short(diff['refused'])}"
    value, least = _number(gate.get("value")), _number(gate.get("at_least"))
    if value is not None and least is not None:
        component = _short(gate.get("component"), _NAME)
        yield f"{component} is {shown_number(value)}, below its gate {shown_number(least)}"


def _part(name: str, part: Mapping[str, Any], value: float | None) -> str:
    """The findings of one grader. ``value``: its component. Empty where its evidence does not say more than
    that."""
    shown = visible_line(name, _NAME)
    expected, passed = _count(part.get("expected")), _count(part.get("passed"))
    suite = _SUITES.get(name, f"tests of {shown}")
    if part.get("note"):
        credit = _number(part.get("credit"))
        gives = f" gives {shown_number(credit)}" if credit else ""
        return f"{suite if name in _SUITES else shown}{gives}: {_short(part['note'])}"
    if expected is not None and passed is not None:
        return _tests(suite, expected, passed, part)
    if name in _SUITES and "exit_code" in part and value is not None:
        failed = f"the {suite} ended with exit status {_short(part['exit_code'], _NAME)}"
        return f"the {suite} passed" if value >= 1 else failed
    if part.get("right") is True:
        return f"the {shown} is right"
    if part.get("fits") is False:
        errors = part.get("errors")
        return (
            f"{shown} does not fit its schema: {_short(errors[0] if isinstance(errors, list) and errors else '')}"
        )
    if part.get("fits") is True:
        return f"{shown} fits its schema"
    if value is None:
        return ""
    if "rewards" in part and "file" in part:
        return f"the script gave {shown_number(value)}"
    if "server" in part and "reported" in part:
        return f"{shown}: the resource server gave {shown_number(value)}"
    if "votes" in part and "judge" in part:
        return f"{shown}: the judge gave {shown_number(value)}{_reason(part['votes'])}"
    return ""


def _tests(suite: str, expected: int, passed: int, part: Mapping[str, Any]) -> str:
    failed = part.get("failed")
    tests = failed if isinstance(failed, list) else []
    ids = [_short(_object(one).get("id"), _NAME) for one in tests[:MOST_NAMES]]
    count = max(expected - passed, 0)
    if count:
        of = f"{count} of {expected} {suite} failed"
        return f"{of}: {_listed(ids, count)}" if ids else of
    if ids:  # such as a test that nobody expects
        return f"the {suite} have other outcomes than they must: {_listed(ids, len(tests))}"
    if part.get("exit_code") not in (0, None) and "resolved" not in part and suite == _SUITES["tests"]:
        return (
            f"the {expected} {suite} passed, but their run ended with exit status {_short(part['exit_code'], 20)}"
        )
    return f"all {expected} {suite} passed"


def _reason(votes: Any) -> str:
    """The first judge's reason, where its reply has one."""
    first = _object(votes[0] if isinstance(votes, list) and votes else None)
    try:
        reply = _object(json.loads(str(first.get("reply"))))
    except (ValueError, RecursionError):
        return ""
    return f": {_short(reply['reason'])}" if reply.get("reason") else ""


def _steps(steps: Mapping[str, Any], grading: Mapping[str, Any]) -> str:
    """``the mean of 3 steps: build is 1, test is 0 (1 of 2 hidden tests failed: test_a), ship was not played``."""
    left = grading.get("not_played")
    unplayed = [f"{_short(name, _NAME)} was not played" for name in (left if isinstance(left, list) else ())]
    played = []
    for name, step in steps.items():
        found = _object(step)
        reward = _number(found.get("reward"))
        value = "has no reward" if reward is None else f"is {shown_number(reward)}"
        evidence = {key: each for key, each in found.items() if isinstance(each, dict) or key == "summary"}
        words = (
            grade_in_words(evidence, {}) if reward is not None and reward < 1 and "steps" not in evidence else ""
        )
        played.append(f"{visible_line(name, _NAME)} {value}{f' ({words})' if words else ''}")
    how = "last" if grading.get("step_reward") == "final" else "mean"
    return f"the {how} of {len(steps) + len(unplayed)} steps: {', '.join([*played, *unplayed])}"


def _listed(names: Sequence[str], count: int) -> str:
    """The first few names, and how many more of ``count`` there are."""
    more = count - MOST_NAMES
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


def shown_number(value: float) -> str:
    """In six digits, or as many as tell it from a whole number: 0.9999999 is not 1."""
    short = f"{value + 0.0:g}"  # no minus before a zero
    return short if float(short) == value or not float(short).is_integer() else f"{value!r}"


def _short(value: Any, most: int = _NOTE) -> str:
    return visible_line(value, most) if isinstance(value, str) else visible_line(repr(value)[: 4 * most], most)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None


def _number(value: Any) -> float | None:
    """A number that a float can be."""
    return float(value) if type(value) is float or (type(value) is int and abs(value) < 2**63) else None
