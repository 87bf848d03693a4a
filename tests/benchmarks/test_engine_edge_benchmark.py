"""The benchmark of the engine's edge works: every dialect and every engine is measured. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "engine_edge.py"
DIALECTS = ["chat", "responses", "anthropic", "gemini"]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_quick_run_measures_every_dialect_and_loses_no_token(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "engine_edge.json").read_text())
    seen = {(row["server"], row["dialect"], row["concurrent"]) for row in found["rows"]}
    expected = {("gate", dialect, concurrent) for dialect in DIALECTS for concurrent in (1, 4)}
    assert seen == expected | {("direct", "-", 1), ("direct", "-", 4)}
    assert all(row["p50_ms"] > 0 and row["calls"] == 2 * row["concurrent"] for row in found["rows"])
    [embedded] = found["lost"]
    assert embedded["updates"] == 2
    assert embedded["sampled"] > 0
    assert (embedded["discarded"], embedded["failed_calls"]) == (0, 0)
    assert "| embedded | 2 |" in done.stdout
