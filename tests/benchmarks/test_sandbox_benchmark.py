"""The sandbox benchmark works and measures all that it promises. No time is asserted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ROWS = [
    "`true`",
    "write a file of 64 KiB",
    "read a file of 64 KiB",
    "Docker, cold, first command done",
    "Docker, warm: handed out",
    "`docker run --rm --network none … true`",
    "bubblewrap",
]
TRANSPORT_ROWS = [
    "exec of `true`",
    "write a file of 1 MiB",
    "read a file of 1 MiB",
    "model call, POST of 40 KiB",
    "new sandbox, first command done",
    "sandbox removed",
    "first sandbox with an agent of 200 MiB",
]


def run_program(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / program), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}, timeout=200
    )


@pytest.mark.thorough
@pytest.mark.docker
def test_a_quick_run_prints_every_row() -> None:
    done = run_program("sandbox.py", "--rounds", "2", "--starts", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ROWS:
        assert f"| {row}" in done.stdout
    commands = [
        line for line in done.stdout.splitlines() if line.startswith(("| in one", "| `", "| write", "| read"))
    ]
    assert {line.count("|") for line in commands if "docker run" not in line} == {7}, "columns are missing"


@pytest.mark.thorough
@pytest.mark.docker
def test_a_quick_run_puts_the_transports_side_by_side() -> None:
    done = run_program("sandbox_transports.py", "--rounds", "1", "--starts", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row[0].strip() for row in rows[1:]] == TRANSPORT_ROWS
    assert all(float(cell) > 0 for row in rows[1:] for cell in row[1:])


@pytest.mark.parametrize("program", ["sandbox.py", "sandbox_transports.py"])
def test_without_an_engine_it_fails_and_says_so(tmp_path: Path, program: str) -> None:
    done = run_program(program, DOCKER_HOST=f"unix://{tmp_path}/none.sock")
    assert done.returncode == 1
    assert "cannot measure" in done.stderr
    assert "|" not in done.stdout
