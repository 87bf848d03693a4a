"""The benchmark of the way to the engine runs, and counts every length, streamed and not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "engine_calls.py"


@pytest.mark.slow
def test_the_benchmark_measures_each_length_both_ways() -> None:
    command = [sys.executable, str(BENCHMARK), "--lengths", "300", "1000", "--calls", "3", "--slices", "2"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[:1] in (["300"], ["1000"])]
    assert [row[:2] for row in rows] == [["300", "no"], ["300", "yes"], ["1000", "no"], ["1000", "yes"]]
    assert all(float(number) > 0 for row in rows for number in row[2:])
