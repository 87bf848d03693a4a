"""What the documentation says about tests: the tests that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NAMED = re.compile(r"`(?:tests/)?([a-z_]+/test_\w+\.py)(?:::(\w+))?`")


def test_every_test_that_a_page_names_is_there() -> None:
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").rglob("*.md")]
    named = {(page.name, *found) for page in pages for found in _NAMED.findall(page.read_text())}
    assert len(named) > 30
    wrong = [
        f"{page}: {file}::{test}"
        for page, file, test in named
        if not (ROOT / "tests" / file).is_file() or f"def {test}" not in (ROOT / "tests" / file).read_text()
    ]
    assert wrong == []


def test_the_ways_to_report_a_fault_are_named_where_people_look() -> None:
    assert "](SECURITY.md)" in (ROOT / "README.md").read_text()
    assert "`SECURITY.md`" in (ROOT / "docs" / "security.md").read_text()
