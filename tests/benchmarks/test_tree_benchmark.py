"""The benchmark of the token tree measures what docs/performance.md says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def table(text: str) -> list[list[str]]:
    """Rows of the table, without the ratios behind gzip, which differ between versions of zlib."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "
    ]
    return [row[:-1] for row in rows if len(row) == 7]


@pytest.mark.slow
def test_the_table_in_the_docs_is_what_the_benchmark_prints() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "tree.py")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    section = page.partition("\n## The token tree\n")[2].partition("\n## ")[0]
    measured = table(result.stdout)
    assert table(section) == measured
    ratios = {row[0]: float(row[4]) for row in measured[1:]}
    assert ratios["linear, 40 turns"] == 1.0
    assert ratios["16 answers to the call after 40 turns"] > 10
