"""examples/external_agents.py as a process, as a newcomer runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from interruption import leaves_nothing_when_interrupted

from vllm_server import TIMEOUT_S, vllm_model

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "external_agents.py"


def run_script(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, *options],
        env={**os.environ, "COLUMNS": "160", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.slow
def test_it_passes_and_says_what_it_recorded() -> None:
    done = run_script("--episodes", "2", "--turns", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("  external-")]
    assert [row[:2] for row in rows] == [["external-1", "3"], ["external-2", "3"]], done.stdout  # turns
    assert "Passed" in done.stdout


@pytest.mark.agents
def test_it_passes_with_the_real_mini_swe_agent() -> None:
    done = run_script("--agent", "mini-swe", "--episodes", "2", "--turns", "3")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
@pytest.mark.sglang
@pytest.mark.parametrize("agent", ["bash", pytest.param("mini-swe", marks=pytest.mark.agents)])
def test_it_passes_on_a_real_sglang_server(sglang_url: str, tiny_model: Path, agent: str) -> None:
    engine = ("--engine-url", sglang_url, "--model", str(tiny_model))
    done = run_script(*engine, "--agent", agent, "--episodes", "2", "--turns", "4")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.thorough
@pytest.mark.vllm
@pytest.mark.timeout(TIMEOUT_S)
def test_it_passes_on_a_real_vllm_server(vllm_url: str) -> None:
    engine = ("--engine", "vllm", "--engine-url", vllm_url, "--model", str(vllm_model()))
    done = run_script(*engine, "--episodes", "2", "--turns", "4")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "no-such-folder"), "no-such-folder"),
        (("--agent", "mini-swe"), "TURNSTILE_MINI_SWE_PYTHON"),
    ],
)
def test_what_cannot_work_ends_it_with_a_clear_line(options: tuple[str, ...], said: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TURNSTILE_MINI_SWE_PYTHON"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--episodes", "1", "--turns", "1", *options],
        env={**environment, "COLUMNS": "500"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    assert "Failed:" in done.stdout
    assert said in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("by", [pytest.param(signal.SIGTERM, marks=pytest.mark.thorough), signal.SIGKILL])
def test_a_run_that_is_interrupted_or_killed_leaves_nothing_running(by: signal.Signals) -> None:
    # The server, its engine and two agents.
    leaves_nothing_when_interrupted([sys.executable, str(SCRIPT), "--turns", "40"], ROOT, processes=4, by=by)
