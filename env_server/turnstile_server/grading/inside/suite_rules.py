"""Which outcomes of a suite's tests count: the rules of SWE-bench for FAIL_TO_PASS and PASS_TO_PASS.

Pure functions, used on the server and inside sandboxes. Python 3.9 or later, standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
XFAILED, XPASSED = "failed as expected", "passed unexpectedly"
NOT_RUN, TAMPERED = "not run", "tampered"
MUST_PASS = frozenset((PASSED, XFAILED))
MUST_NOT_FAIL = frozenset((PASSED, XFAILED, SKIPPED))
"""Good statuses of tests that passed before the work. One that did not run has failed."""


def is_cut(test: str) -> bool:
    """True if the id ends within its parameter, as ids do that were taken from a log up to the first space."""
    return "[" in test and not test.endswith("]")


def found_for(test: str, statuses: Mapping[str, str], *, cut_ids: bool) -> list[str]:
    """The ids of the tests that ran for which ``test`` stands."""
    if test in statuses:
        return [test]
    if not cut_ids or not is_cut(test):
        return []
    return [each for each in statuses if each.startswith(test)]


def outcomes(
    must_pass: Iterable[str], must_not_fail: Iterable[str], statuses: Mapping[str, str], *, cut_ids: bool = False
) -> dict[str, tuple[bool, str]]:
    """For each wanted id whether it counts, and its status: of several, the first that does not count."""
    found: dict[str, tuple[bool, str]] = {}
    for wanted, good in ((must_pass, MUST_PASS), (must_not_fail, MUST_NOT_FAIL)):
        for test in wanted:
            those = [statuses[each] for each in found_for(test, statuses, cut_ids=cut_ids)] or [NOT_RUN]
            bad = [status for status in those if status not in good]
            found[test] = (not bad, bad[0] if bad else those[0])
    return found
