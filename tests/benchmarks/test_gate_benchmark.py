"""The gate's benchmark works: it measures everything it promises, and its own checks hold. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "gate.py"
SERVERS = ["direct", "relay", "turnstile-process", "turnstile-power"]


def run_benchmark(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), "--quick", "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_measures_every_server_at_every_length_streamed_and_not(tmp_path: Path) -> None:
    done = run_benchmark(tmp_path, "--no-peers")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gate.json").read_text())
    rows = found["rows"]
    seen = {(row["server"], row["tokens"], row["stream"]) for row in rows}
    assert seen == {
        (name, tokens, stream) for name in SERVERS for tokens in (1000, 4000) for stream in (False, True)
    }
    for row in rows:
        assert row["calls"] >= 4
        assert row["slices"] == 2
        assert row["turns_per_s"] > 0
        assert ("first_text_p50_ms" in row) == row["stream"]
        assert (row["fsyncs"] > 0) == (row["server"] == "turnstile-power")
    tokenized = {row["tokenized_bytes"] for row in rows if row["server"].startswith("turnstile")}
    assert len(tokenized) == 1, "bytes tokenized per turn depend on the length of the history"
    text = (tmp_path / "gate.md").read_text()
    for row in rows:
        assert f"| {row['server']} |" in text
    memory: dict[str, Any] = found["memory"]
    assert (memory["traces"], memory["open_episodes"]) == (2, 8)
    assert memory["open_hot_mb"] > memory["empty_mb"] > 0
    assert "8 open episodes of 2,000 tokens" in text
    assert text.count("| not measured | - |") == 8, "a short run says of no aim that it was reached"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_calls_per_turn_are_counted_in_the_process_of_the_server(tmp_path: Path) -> None:
    done = run_benchmark(tmp_path, "--count-calls", "--lengths", "1000", "2000")
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads((tmp_path / "gate_calls.json").read_text())["calls"]
    by = {(one["server"], one["tokens"], one["stream"]): one for one in counts}
    assert len(by) == 8
    for (_, tokens, stream), one in by.items():
        relay = by["relay", tokens, stream]
        assert one["python"] >= relay["python"] > 0
        assert one["c"] > 0
