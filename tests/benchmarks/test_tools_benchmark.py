"""The benchmark of the MCP endpoint measures what it says, in few calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough
@pytest.mark.slow
def test_the_tools_benchmark_puts_every_way_beside_the_sandboxs_own(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "tools.py"), "--calls", "3", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "tools.json").read_text())
    ways = {"exec of the sandbox", "MCP, 2025-11-25", "MCP, 2026-07-28"}
    commands = {row["command"] for row in rows}
    assert len(commands) == 3
    assert {(row["backend"], row["command"], row["subject"]) for row in rows} == {
        ("local", name, way) for name in commands for way in ways
    }
    assert all(row["ratio"] == 1 and row["added"] == 0 for row in rows if row["subject"] == "exec of the sandbox")
    assert all(row["calls"] == 3 and row["p50"] > 0 and row["cpu"] > 0 for row in rows)
    assert (tmp_path / "tools.md").read_text() in result.stdout
