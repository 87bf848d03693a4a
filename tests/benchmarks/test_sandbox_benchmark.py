"""The sandbox benchmark works and measures all that it promises. No time is asserted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "sandbox.py"
ROWS = [
    "`true`",
    "write a file of 64 KiB",
    "read a file of 64 KiB",
    "Docker, cold, first command done",
    "Docker, warm: handed out",
    "`docker run --rm --network none … true`",
    "bubblewrap",
]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARK), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}, timeout=200
    )


@pytest.mark.slow
@pytest.mark.docker
def test_a_quick_run_prints_every_row() -> None:
    done = run("--rounds", "2", "--starts", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ROWS:
        assert f"| {row}" in done.stdout
    commands = [
        line for line in done.stdout.splitlines() if line.startswith(("| in one", "| `", "| write", "| read"))
    ]
    assert {line.count("|") for line in commands if "docker run" not in line} == {7}, "columns are missing"


def test_without_an_engine_it_fails_and_says_so(tmp_path: Path) -> None:
    done = run(DOCKER_HOST=f"unix://{tmp_path}/none.sock")
    assert done.returncode == 1
    assert "cannot measure" in done.stderr
    assert "|" not in done.stdout
