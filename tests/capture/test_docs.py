"""docs/matching.md names every rule that the code names."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from turnstile.models import BreakReason, SampleKind, SampleStatus
from turnstile_server.capture.compare import Cosmetic

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "matching.md").read_text()
UNTRAINED = ("superseded", "interrupted", "given", "constrained", "greedy", "auxiliary")
NAMES = {
    *BreakReason,
    *Cosmetic,
    *UNTRAINED,
    *get_args(SampleKind),
    *get_args(SampleStatus),
}


@pytest.mark.parametrize("name", sorted(map(str, NAMES)))
def test_the_page_has_a_row_for(name: str) -> None:
    assert any(line.startswith(f"| `{name}` |") for line in PAGE.splitlines())
