"""What `.ci/run` may cost: the seconds of its last recorded run (`RECORD=1 .ci/run`) stay within the budget."""

from __future__ import annotations

import re

from figures import ROOT, WATCHED, figures, page, unchanged

MOST_S = 40 * 60
RUN = (ROOT / ".ci" / "run").read_text()


def test_the_suites_of_ci_run_take_at_most_forty_minutes() -> None:
    """Without those that it does not play here: what they watch is as in their last recorded run."""
    seconds = {
        name: entry["seconds"]
        for name, entry in figures()["ci"].items()
        if not (name in WATCHED and unchanged(name))
    }
    assert sum(seconds.values()) <= MOST_S, seconds


def test_every_step_of_ci_run_has_its_seconds() -> None:
    steps = set(re.findall(r"^ *(?:step|suite|begin) ([\w-]+) ", RUN, re.MULTILINE))
    assert len(steps) > 10
    recorded = set(figures()["ci"])
    assert steps - set(WATCHED) <= recorded <= steps, "record it with RECORD=1 .ci/run"


def test_the_table_in_contributing_is_that_of_the_figures() -> None:
    assert page() == (ROOT / "CONTRIBUTING.md").read_text(), "python scripts/figures.py --write"
