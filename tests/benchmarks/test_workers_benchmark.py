"""The workers' benchmark works: it measures every server it promises, and loses no turn. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "workers.py"
SERVERS = ["one process", "2 workers", "2 workers, one agent port"]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_quick_run_measures_each_server_and_what_its_processes_use(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--quick", "--slices", "1", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "workers.json").read_text())["rows"]
    assert [row["server"] for row in rows] == SERVERS
    processes = [set(row["cpu_ms_per_turn"]) for row in rows]
    assert processes == [{"server"}, *[{"worker 0", "worker 1", "front"}] * 2]
    for row in rows:
        assert row["turns"] > 0
        assert min(row["call_ms_p50"], row["creation_ms_p50"], row["turns_per_cpu_s_of_busiest"]) > 0
    text = (tmp_path / "workers.md").read_text()
    assert [line for line in SERVERS if f"| {line} |" in text] == SERVERS
