"""The benchmark of small calls beside a huge one works: it measures what it promises. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "beside.py"


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_measures_small_calls_beside_huge_ones(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    alone, *rows = json.loads((tmp_path / "beside.json").read_text())
    assert {row["name"] for row in rows} == {"28 MB of text", "2 MB of text"}
    for row in rows:
        assert row["status"] == 400
        assert "context_length_exceeded" in row["words"]
        assert row["peak_mb"] > 0
    for row in (alone, *rows):
        assert min(row["model_calls"], row["health_calls"], row["status_calls"]) >= 1
        assert row["name"] in (tmp_path / "beside.md").read_text()
