"""The gate's benchmark works: it measures everything it promises, and its own checks hold. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "gate.py"
SERVERS = ["direct", "relay", "turnstile-process", "turnstile-power"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_measures_every_server_at_every_length_streamed_and_not(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--no-peer", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gate.json").read_text())["rows"]
    seen = {(row["server"], row["tokens"], row["stream"]) for row in rows}
    assert seen == {
        (name, tokens, stream) for name in SERVERS for tokens in (1000, 4000) for stream in (False, True)
    }
    for row in rows:
        assert row["calls"] >= 3
        assert row["turns_per_s"] > 0
        assert (row["fsyncs"] > 0) == (row["server"] == "turnstile-power")
    tokenized = {row["tokenized_bytes"] for row in rows if row["server"].startswith("turnstile")}
    assert len(tokenized) == 1, "bytes tokenized per turn depend on the length of the history"
    for row in rows:
        assert f"| {row['server']} |" in (tmp_path / "gate.md").read_text()
